"""What a store must do, and what all of them share: checked lengths, coalesced and parallel reads."""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from deltafmt.errors import StoreError

GAP_BYTES = 64 << 10
"""Ranges of one object that lie at most this far apart are fetched as one."""
FETCH_BYTES = 8 << 20
"""Neighbouring ranges are joined up to this size; one longer range is still fetched whole."""
_WASTE = 16
"""Joined reads ask for at most one byte in so many that nobody wants."""
AHEAD_BYTES = 32 << 20
"""Bytes that may be fetched ahead of the consumer."""

Buffer = bytes | bytearray | memoryview


class AlreadyExists(StoreError):
    """An exclusive create found the object there."""


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes `[start, stop)` of an object."""

    key: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Sink(Protocol):
    """An object being written; it may be seen cut short until it is closed."""

    def write(self, data: Buffer) -> None:
        """Append; the data may be reused when this returns."""

    def close(self) -> None:
        """Finish; the object is durable when this returns."""

    def abort(self) -> None:
        """Give up and remove what was written, as far as the store lets us; never raises."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """One read, and the requested ranges (by number) that it serves."""

    range: Range
    requests: tuple[int, ...]


def coalesce(
    requests: Sequence[Range], *, gap_bytes: int = GAP_BYTES, fetch_bytes: int = FETCH_BYTES
) -> list[Fetch]:
    """Join neighbouring requests of one object that follow one another in order.

    Requests come out in their order; only ones that stand next to each other in the list are joined. Bytes
    that nobody asked for are at most a sixteenth of a joined read, so that a rank's share stays its share.
    """
    fetches: list[Fetch] = []
    asked = 0
    for number, request in enumerate(requests):
        if fetches:
            last = fetches[-1]
            joined = last.range.key == request.key and last.range.start <= request.start
            near = request.start - last.range.stop <= gap_bytes
            size = max(last.range.stop, request.stop) - last.range.start
            wasted = size - asked - request.nbytes
            if joined and near and size <= fetch_bytes and _WASTE * wasted <= size:
                whole = Range(request.key, last.range.start, last.range.start + size)
                fetches[-1] = Fetch(whole, (*last.requests, number))
                asked += request.nbytes
                continue
        fetches.append(Fetch(request, (number,)))
        asked = request.nbytes
    return fetches


class Store(abc.ABC):
    """Objects under one root, named by relative keys.

    Absent objects raise `NotFoundError` (`object-missing`); everything else that goes wrong is a
    `StoreError`. Objects are never changed once written. Instances may be used from several threads.
    """

    url: str
    """The root, without credentials."""
    readers: int = 4
    """Reads that are under way at once."""

    @abc.abstractmethod
    def read_range(self, key: str, start: int, stop: int) -> Buffer:
        """Bytes `[start, stop)` as the back end returns them; lengths are checked by the callers here."""

    @abc.abstractmethod
    def read_all(self, key: str) -> bytes:
        """The whole object as the back end returns it."""

    @abc.abstractmethod
    def size(self, key: str) -> int:
        """Bytes of an object."""

    @abc.abstractmethod
    def put(self, key: str, data: Buffer) -> None:
        """Write a whole object; durable when this returns. An equal object may be there already."""

    @abc.abstractmethod
    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Create an object that is never partly visible; `AlreadyExists` if there is one."""

    @abc.abstractmethod
    def open_sink(self, key: str) -> Sink:
        """Write a new object piece by piece."""

    @abc.abstractmethod
    def list(self, folder: str) -> Iterator[str]:
        """Keys of the objects directly in a folder, ascending; empty if there is no such folder."""

    @abc.abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; absent ones are no error."""

    def check_exclusive(self) -> None:
        """Raise `UnsupportedError` if this back end cannot create exclusively."""

    def exists(self, key: str) -> bool:
        from deltafmt.errors import NotFoundError

        try:
            self.size(key)
        except NotFoundError:
            return False
        return True

    def read(self, key: str, *, limit: int | None = None) -> bytes:
        """A whole object; with `limit`, a larger one is refused before it is read."""
        if limit is not None and (found := self.size(key)) > limit:
            raise StoreError(
                "object is larger than the limit",
                kind="object-too-large",
                where=key,
                expected=limit,
                found=found,
            )
        return self.read_all(key)

    def read_ranges(
        self, requests: Sequence[Range], *, ahead_bytes: int = AHEAD_BYTES
    ) -> Iterator[memoryview]:
        """The requested bytes in order, fetched in parallel and a bounded amount ahead.

        A read of another length than asked for is repeated once and then a `StoreError` (`short-read`).
        """
        fetches = coalesce(requests)
        if len(fetches) <= 1:
            for fetch in fetches:
                yield from _views(fetch, requests, self._fetch(fetch.range))
            return
        waiting: deque[tuple[Fetch, Future[memoryview]]] = deque()
        queue, pending = iter(fetches), 0
        upcoming = next(queue, None)
        with ThreadPoolExecutor(min(self.readers, len(fetches)), "deltafmt-read") as pool:
            try:
                while waiting or upcoming:
                    while upcoming and (not waiting or pending + upcoming.range.nbytes <= ahead_bytes):
                        pending += upcoming.range.nbytes
                        waiting.append((upcoming, pool.submit(self._fetch, upcoming.range)))
                        upcoming = next(queue, None)
                    fetch, future = waiting.popleft()
                    data = future.result()
                    pending -= fetch.range.nbytes
                    yield from _views(fetch, requests, data)
            finally:
                for _, future in waiting:
                    future.cancel()

    def _fetch(self, wanted: Range) -> memoryview:
        if wanted.nbytes == 0:
            return memoryview(b"")
        for last in (False, True):
            data = memoryview(self.read_range(wanted.key, wanted.start, wanted.stop))
            if len(data) == wanted.nbytes:
                return data
            if last:
                raise StoreError(
                    "storage returned another number of bytes",
                    kind="short-read",
                    where=f"{wanted.key} [{wanted.start}, {wanted.stop})",
                    expected=wanted.nbytes,
                    found=len(data),
                )
        raise AssertionError


def _views(fetch: Fetch, requests: Sequence[Range], data: memoryview) -> Iterator[memoryview]:
    for number in fetch.requests:
        start = requests[number].start - fetch.range.start
        yield data[start : start + requests[number].nbytes]


def guarded(where: str, action: Callable[[], object]) -> None:
    """Run a clean-up whose failure must not hide the error that led to it."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - the caller is already handling the real failure
        import logging

        logging.getLogger("deltafmt").warning("cannot clean up %s: %s", where, error)
