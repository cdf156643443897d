"""Generators that work with threads can be left at any point, by anybody."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from deltafmt.store import MemoryStore, Range
from deltafmt.testing.faulty import Call, FaultyStore
from deltafmt.write.pack import in_order

LONG = 60.0


def held_in_order(go_on: threading.Event) -> Iterator[object]:
    def work(item: int) -> int:
        if item:
            assert go_on.wait(LONG)
        return item

    return in_order(work, range(9), 2)


def held_reads(go_on: threading.Event) -> Iterator[object]:
    store = FaultyStore(MemoryStore())
    store.put("a", bytes(100 << 20))

    def hold(call: Call, action: object) -> object:
        if call.start:
            assert go_on.wait(LONG)
        return bytes(8 << 20)

    store.inject(hold, verb="read_range", times=99)
    return store.read_ranges([Range("a", n << 23, (n + 1) << 23) for n in range(9)])


@pytest.mark.parametrize("make", [held_in_order, held_reads])
def test_leaving_a_generator_waits_for_nobody(make: object) -> None:
    """It may be collected in a thread that others need in order to end."""
    go_on, left = threading.Event(), threading.Event()
    generator = make(go_on)  # type: ignore[operator]
    next(generator)

    def leave() -> None:
        generator.close()
        left.set()

    thread = threading.Thread(target=leave, daemon=True)
    thread.start()
    try:
        assert left.wait(LONG / 2), "it waits for a worker that waits for somebody else"
    finally:
        go_on.set()
        thread.join(LONG)
