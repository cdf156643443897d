"""A14: a failed apply must not move the base."""

from __future__ import annotations

import pytest
import torch

import deltafmt
from deltafmt.errors import ChecksumError
from deltafmt.read.options import ReadOptions
from deltafmt.testing.faulty import flipped
from tests.cases.common import assert_same, copied, faulty, new_root


def published() -> tuple[str, list[dict[str, torch.Tensor]]]:
    root = new_root()
    states = [{"w": torch.arange(100.0), "v": torch.arange(50)}]
    writer = deltafmt.Writer(root, options=deltafmt.WriterOptions(domain_elements=64))
    writer.publish_anchor(states[0])
    for k in (1, 2, 3):
        state = copied(states[-1])
        state["w"][10 * k] += 1
        state["v"][k] = -k
        writer.publish(state)
        states.append(state)
    return root, states


def test_a_byte_that_is_wrong_once_is_read_again() -> None:
    root, states = published()
    url, store = faulty(root)
    live = copied(states[0])
    receiver = deltafmt.Receiver(url, live)
    receiver.adopt(0)
    receiver.advance(1)
    store.inject(flipped(), verb="read_range", key=f"data/{2:020d}")
    assert receiver.advance(3) == 3
    assert_same(live, states[3])


def test_a_byte_that_stays_wrong_stops_before_anything_is_written() -> None:
    root, states = published()
    url, store = faulty(root)
    live = copied(states[0])
    receiver = deltafmt.Receiver(url, live)
    receiver.adopt(0)
    receiver.advance(1)
    store.inject(flipped(), verb="read_range", key=f"data/{2:020d}", times=1000)
    with pytest.raises(ChecksumError, match="CRC32C"):
        receiver.advance(3)
    assert receiver.version == 1
    assert_same(live, states[1])
    store.heal()
    receiver.advance(3)
    assert_same(live, states[3])
    receiver.verify()


def test_live_bits_that_are_not_the_base_are_repaired_once() -> None:
    root, states = published()
    live = copied(states[0])
    receiver = deltafmt.Receiver(root, live)
    receiver.adopt(0)
    live["w"][10] = -77
    assert receiver.advance(3) == 3
    assert_same(live, states[3])


def test_what_a_step_cannot_tell_a_full_digest_does() -> None:
    """A step moves a wrong value as it moves the right one; only reading everything shows it."""
    root, states = published()
    live = copied(states[0])
    receiver = deltafmt.Receiver(root, live, options=ReadOptions(audit_domains=0))
    receiver.adopt(0)
    live["w"][99] = 77
    receiver.advance(3)
    with pytest.raises(ChecksumError, match="'w'"):
        receiver.verify()
    assert receiver.version is None
    receiver.advance(3)
    assert_same(live, states[3])


def test_an_audit_by_turns_finds_what_drifted_and_repairs_it() -> None:
    root, states = published()
    live = copied(states[0])
    receiver = deltafmt.Receiver(root, live)
    receiver.adopt(0)
    live["w"][99] = 77
    live["w"][0] = 55
    writer = deltafmt.Writer(root)
    state = copied(states[-1])
    # Both domains of `w` change in each version, so that each is looked at in its turn.
    for _ in range(3):
        state["w"][[5, 95]] += 1
        writer.publish(state)
        receiver.advance()
    assert_same(live, state)
    receiver.verify()
