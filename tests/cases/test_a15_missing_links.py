"""A15: pruned or missing links in the chain."""

from __future__ import annotations

import pytest
import torch

import deltafmt
from deltafmt.errors import FormatError, NotFoundError
from deltafmt.format import keys
from deltafmt.store import MemoryStore, open_store
from tests.cases.common import assert_same, blank, copied, new_root


def published() -> tuple[str, MemoryStore, list[dict[str, torch.Tensor]]]:
    root = new_root()
    states = [{"w": torch.arange(100.0)}]
    writer = deltafmt.Writer(root)
    writer.publish_anchor(states[0])
    for k in range(1, 7):
        state = copied(states[-1])
        state["w"][k] += 1
        writer.publish(state)
        states.append(state)
    deltafmt.open(root).add_anchor(4)
    store = open_store(root)
    assert isinstance(store, MemoryStore)
    return root, store, states


def remove(store: MemoryStore, version: int) -> None:
    gone = [key for key in store.objects if f"/{version:020d}" in key]
    assert keys.version_key(version) in gone
    store.delete(gone)


def at(
    root: str, states: list[dict[str, torch.Tensor]], held: int | None
) -> tuple[deltafmt.Receiver, dict[str, torch.Tensor]]:
    live = blank(states[0]) if held is None else copied(states[held])
    receiver = deltafmt.Receiver(root, live)
    if held is not None:
        receiver.adopt(held)
    return receiver, live


@pytest.mark.parametrize("held", [None, 0, 5])
def test_readers_go_round_what_was_pruned(held: int | None) -> None:
    root, store, states = published()
    receiver, live = at(root, states, held)
    for version in (1, 2, 3):
        remove(store, version)
    assert receiver.advance(6) == 6
    assert_same(live, states[6])


@pytest.mark.parametrize("held", [None, 0])
def test_a_missing_link_is_named_and_nothing_is_applied_over_it(held: int | None) -> None:
    root, store, states = published()
    receiver, live = at(root, states, held)
    before = copied(live)
    for version in (1, 2, 3, 5):
        remove(store, version)
    with pytest.raises(NotFoundError, match="version 5") as caught:
        receiver.advance(6)
    assert caught.value.kind == "chain-broken"
    assert receiver.version == held
    assert_same(live, before)


def test_a_reader_of_the_base_still_goes_on() -> None:
    root, store, states = published()
    receiver, live = at(root, states, 5)
    for version in (1, 2, 3):
        remove(store, version)
    assert receiver.advance() == 6
    assert_same(live, states[6])


@pytest.mark.parametrize("held", [None, 5])
def test_a_delta_made_from_another_parent_of_the_same_number_is_not_applied(held: int | None) -> None:
    root, store, states = published()
    fork = new_root()
    other = open_store(fork)
    assert isinstance(other, MemoryStore)
    other.objects.update(store.objects)
    for version in (5, 6):
        remove(other, version)
    writer = deltafmt.Writer(fork)
    for version in (5, 6):
        writer.publish({"w": states[4]["w"] + version})
    remove(store, 6)
    store.objects.update({key: data for key, data in other.objects.items() if f"/{6:020d}" in key})
    receiver, live = at(root, states, held)
    before = copied(live)
    with pytest.raises(FormatError) as caught:
        receiver.advance(6)
    assert caught.value.kind == "base-differs"
    assert receiver.version == held
    assert_same(live, before)
