"""What every store gets from its base: joined reads, bounded look-ahead, patience and checked lengths."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafmt import NotFoundError, StoreError
from deltafmt.store import MemoryStore, Range
from deltafmt.store.base import Buffer, coalesce


def spans(requests: list[Range], **limits: int) -> list[tuple[str, int, int, tuple[int, ...]]]:
    fetches = coalesce(requests, **limits)
    return [(f.range.key, f.range.start, f.range.stop, f.requests) for f in fetches]


def test_neighbours_are_fetched_as_one() -> None:
    requests = [Range("a", 0, 100), Range("a", 100, 250), Range("a", 260, 400), Range("b", 400, 500)]
    assert spans(requests) == [("a", 0, 400, (0, 1, 2)), ("b", 400, 500, (3,))]


def test_distant_large_or_backward_ranges_stay_apart() -> None:
    assert spans([Range("a", 0, 100), Range("a", 111, 200)], gap_bytes=10) == [
        ("a", 0, 100, (0,)),
        ("a", 111, 200, (1,)),
    ]
    assert spans([Range("a", 0, 60), Range("a", 60, 110)], fetch_bytes=100) == [
        ("a", 0, 60, (0,)),
        ("a", 60, 110, (1,)),
    ]
    assert spans([Range("a", 50, 60), Range("a", 0, 50)]) == [("a", 50, 60, (0,)), ("a", 0, 50, (1,))]
    assert spans([Range("a", 0, 500)], fetch_bytes=100) == [("a", 0, 500, (0,))], "one range is one read"


def test_joined_reads_waste_little() -> None:
    requests = [Range("a", start, start + 50) for start in range(0, 1000, 100)]
    assert len(spans(requests)) == 10, "half of it would be thrown away"


ranges = st.builds(
    lambda key, start, size: Range(key, start, start + size),
    st.sampled_from("ab"),
    st.integers(0, 2000),
    st.integers(0, 300),
)


@given(st.lists(ranges), st.integers(0, 200), st.integers(1, 500), st.booleans())
def test_every_request_is_served_in_order_by_one_fetch(
    requests: list[Range], gap: int, limit: int, ascending: bool
) -> None:
    if ascending:
        requests.sort(key=lambda r: (r.key, r.start))
    fetches = coalesce(requests, gap_bytes=gap, fetch_bytes=limit)
    assert [number for fetch in fetches for number in fetch.requests] == list(range(len(requests)))
    for fetch in fetches:
        served = [requests[number] for number in fetch.requests]
        assert {r.key for r in served} == {fetch.range.key}
        assert fetch.range.start == min(r.start for r in served)
        assert fetch.range.stop == max(r.stop for r in served)
        assert len(served) == 1 or fetch.range.nbytes <= limit
        wasted = set(range(fetch.range.start, fetch.range.stop)).difference(
            *(range(r.start, r.stop) for r in served)
        )
        assert 16 * len(wasted) <= fetch.range.nbytes


class Misbehaving(MemoryStore):
    """Reads go through `answers`, one after another; when these are used up, all is well."""

    pause_seconds = 0.0

    def __init__(self, answers: list[Callable[[bytes], Buffer]]) -> None:
        super().__init__("misbehaving")
        self.answers = answers
        self.reads = 0

    def _answer(self, data: bytes) -> bytes:
        self.reads += 1
        return bytes(self.answers.pop(0)(data)) if self.answers else data

    def read_range(self, key: str, start: int, stop: int) -> Buffer:
        return self._answer(bytes(super().read_range(key, start, stop)))

    def read_all(self, key: str) -> bytes:
        return self._answer(super().read_all(key))


def unreachable(_: bytes) -> bytes:
    raise StoreError("no route", kind="store-unreachable", where="a")


def refused(_: bytes) -> bytes:
    raise StoreError("forbidden", kind="store-failed", where="a")


def right(data: bytes) -> bytes:
    return data


def short(data: bytes) -> bytes:
    return data[:-1]


def long(data: bytes) -> bytes:
    return data + b"!"


def read_by_range(store: MemoryStore) -> bytes:
    return bytes(next(store.read_ranges([Range("a", 0, 10)])))


def read_whole(store: MemoryStore) -> bytes:
    return store.read("a", limit=100)


Wrong = Callable[[bytes], bytes]
reading = pytest.mark.parametrize("read", [read_by_range, read_whole])


@reading
@pytest.mark.parametrize("wrong", [short, long])
def test_a_wrong_length_is_read_again_at_once(read: Callable[[MemoryStore], bytes], wrong: Wrong) -> None:
    store = Misbehaving([wrong])
    store.put("a", b"0123456789")
    assert read(store) == b"0123456789"
    assert store.reads == 2


@reading
@pytest.mark.parametrize(("wrong", "found"), [(short, 9), (long, 11)])
def test_a_length_that_stays_wrong_is_an_error(
    read: Callable[[MemoryStore], bytes], wrong: Wrong, found: int
) -> None:
    store = Misbehaving([wrong, wrong])
    store.put("a", b"0123456789")
    with pytest.raises(StoreError) as caught:
        read(store)
    assert (caught.value.kind, caught.value.expected, caught.value.found) == ("short-read", 10, found)
    assert store.reads == 2


@reading
def test_storage_that_comes_back_is_waited_for(read: Callable[[MemoryStore], bytes]) -> None:
    store = Misbehaving([unreachable, unreachable, short, unreachable, right])
    store.put("a", b"0123456789")
    assert read(store) == b"0123456789"


@reading
def test_storage_that_stays_away_is_an_error(read: Callable[[MemoryStore], bytes]) -> None:
    store = Misbehaving([unreachable] * 100)
    store.put("a", b"0123456789")
    with pytest.raises(StoreError) as caught:
        read(store)
    assert caught.value.kind == "store-unreachable"
    assert store.reads == store.attempts


@reading
def test_what_will_not_pass_is_not_repeated(read: Callable[[MemoryStore], bytes]) -> None:
    store = Misbehaving([refused] * 100)
    store.put("a", b"0123456789")
    with pytest.raises(StoreError, match="forbidden"):
        read(store)
    assert store.reads == 1


def test_pauses_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("deltafmt.store.base.time.sleep", pauses.append)
    store = Misbehaving([unreachable] * 3)
    store.pause_seconds = 0.2
    store.put("a", b"0123456789")
    assert read_whole(store) == b"0123456789"
    assert len(pauses) == 3
    for number, pause in enumerate(pauses):
        assert 0.1 * 2**number <= pause <= 0.3 * 2**number


class Counting(MemoryStore):
    """Says how many bytes have been read."""

    def __init__(self) -> None:
        super().__init__("counting")
        self.bytes = 0
        self._counter = threading.Lock()

    def read_range(self, key: str, start: int, stop: int) -> Buffer:
        with self._counter:
            self.bytes += stop - start
        return super().read_range(key, start, stop)


def test_only_a_bounded_amount_is_read_ahead() -> None:
    store = Counting()
    store.put("a", bytes(100_000))
    requests = [Range("a", start, start + 1000) for start in range(99_000, -1, -1000)]
    views: Iterator[memoryview] = store.read_ranges(requests, ahead_bytes=5000)
    assert store.bytes == 0, "nothing is read before it is asked for"
    for number in range(1, 50):
        next(views)
        assert store.bytes <= number * 1000 + 5000
    assert sum(len(view) for view in views) == 51_000
    assert store.bytes == 100_000


def test_an_error_comes_in_its_turn() -> None:
    store = MemoryStore("turns")
    store.put("a", b"0123456789")
    views = store.read_ranges([Range("a", 0, 5), Range("gone", 0, 1), Range("a", 5, 10)])
    assert bytes(next(views)) == b"01234"
    with pytest.raises(NotFoundError, match="gone"):
        next(views)


def test_a_generator_that_is_dropped_waits_for_nobody() -> None:
    """The garbage collector closes it anywhere, also where waiting for threads would never end."""
    held, release = threading.Event(), threading.Event()

    class Holding(MemoryStore):
        def read_range(self, key: str, start: int, stop: int) -> Buffer:
            if start:
                held.set()
                assert release.wait(60)
            return super().read_range(key, start, stop)

    store = Holding()
    store.put("a", bytes(2_000_000))
    views = store.read_ranges([Range("a", 0, 10), Range("a", 1_000_000, 1_000_010)])
    assert bytes(next(views)) == bytes(10)
    assert held.wait(60)
    closer = threading.Thread(target=views.close)  # type: ignore[attr-defined]
    closer.start()
    closer.join(30)
    assert not closer.is_alive()
    release.set()


def test_the_time_for_tries_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    class Away(MemoryStore):
        attempts, budget_seconds, tries = 1000, 10.0, 0

        def read_all(self, key: str) -> bytes:
            self.tries += 1
            raise StoreError("no route", kind="store-unreachable", where=key)

    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr("deltafmt.store.base.time.sleep", sleep)
    monkeypatch.setattr("deltafmt.store.base.time.monotonic", lambda: clock[0])
    store = Away()
    with pytest.raises(StoreError):
        store.read("a")
    assert 2.5 < clock[0] <= 10.0
    assert 4 < store.tries < 20
