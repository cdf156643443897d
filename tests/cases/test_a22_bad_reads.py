"""A22: short, shifted or changed reads never reach a live tensor."""

from __future__ import annotations

import pytest
import torch

import deltafmt
from deltafmt.errors import DeltafmtError, StoreError
from deltafmt.format import keys
from deltafmt.store import Range, open_store
from deltafmt.testing.faulty import Effect, flipped, long, replayed, shifted, short, unreachable
from tests.cases.common import assert_same, copied, faulty, new_root

EFFECTS = {
    "short": short(),
    "long": long(),
    "shifted": shifted(),
    "flipped": flipped(),
    "replayed": replayed(b"old" * 1000),
}


def states() -> list[dict[str, torch.Tensor]]:
    first = torch.arange(5000.0)
    return [{"w": first}, {"w": first + (torch.arange(5000) % 7 == 0)}]


@pytest.mark.parametrize("effect", EFFECTS.values(), ids=EFFECTS)
@pytest.mark.parametrize("verb", ["read_range", "read_all"])
@pytest.mark.parametrize("times", [1, 1000])
def test_what_storage_gets_wrong_is_read_again_or_a_typed_error(
    effect: Effect, verb: str, times: int
) -> None:
    root = new_root()
    url, store = faulty(root)
    first, second = states()
    writer = deltafmt.Writer(root)
    writer.publish_anchor(first)
    live = copied(first)
    receiver = deltafmt.Receiver(url, live)
    receiver.adopt(0)
    writer.publish(second)
    place = f"data/{1:020d}" if verb == "read_range" else keys.version_key(1)
    store.inject(effect, verb=verb, key=place, times=times)
    try:
        receiver.advance(1)
    except DeltafmtError as error:
        found = error
    else:
        assert times == 1
        assert_same(live, second)
        return
    assert place in str(found)
    assert receiver.version == 0
    assert_same(live, first)
    store.heal()
    receiver.advance(1)
    assert_same(live, second)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_connection_that_breaks_twice_is_waited_for(streaming: bool) -> None:
    root = new_root()
    url, store = faulty(root)
    first, second = states()
    writer = deltafmt.Writer(root)
    writer.publish_anchor(first)
    live = copied(first)
    receiver = deltafmt.Receiver(url, live)
    receiver.adopt(0)
    writer.publish(second)
    store.inject(unreachable(), verb="read_range", times=2)
    store.inject(unreachable(), verb="read_all", times=2)
    assert receiver.advance(streaming=streaming) == 1
    assert_same(live, second)


def test_the_error_names_object_and_range() -> None:
    root = new_root()
    url, store = faulty(root)
    first, second = states()
    writer = deltafmt.Writer(root)
    writer.publish_anchor(first)
    live = copied(first)
    receiver = deltafmt.Receiver(url, live)
    receiver.adopt(0)
    writer.publish(second)
    store.inject(short(), verb="read_range", times=2)
    with pytest.raises(StoreError) as caught:
        receiver.advance()
    reads = [call for call in store.log if call.verb == "read_range"]
    assert len(reads) == 2, "read again at once, and then no more"
    assert reads[0] == reads[1]
    assert caught.value.kind == "short-read"
    assert f"{reads[0].key} [{reads[0].start}, {reads[0].stop})" in str(caught.value)
    assert_same(live, first)


def test_ranges_at_the_ends_of_an_object() -> None:
    store = open_store(new_root())
    store.put("a", b"0123456789")
    whole, last, none = store.read_ranges([Range("a", 0, 10), Range("a", 9, 10), Range("a", 10, 10)])
    assert (bytes(whole), bytes(last), bytes(none)) == (b"0123456789", b"9", b"")
