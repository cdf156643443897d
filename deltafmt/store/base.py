"""What a store must do, and what all of them share: checked lengths, coalesced and parallel reads."""

from __future__ import annotations

import abc
import itertools
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from deltafmt.errors import NotFoundError, StoreError, UnsupportedError
from deltafmt.threads import pool_of

GAP_BYTES = 64 << 10
"""Ranges of one object that lie at most this far apart are fetched as one."""
FETCH_BYTES = 8 << 20
"""Neighbouring ranges are joined up to this size; one longer range is still fetched whole."""
_WASTE = 16
"""Joined reads ask for at most one byte in so many that nobody wants."""
AHEAD_BYTES = 32 << 20
"""Bytes that may be fetched ahead of the consumer."""
PASSING = frozenset({"store-unreachable", "store-busy"})
"""Kinds of `StoreError` after which another try may succeed."""
_LONGEST_PAUSE = 5.0

Buffer = bytes | bytearray | memoryview
_Result = TypeVar("_Result")
_Sized = TypeVar("_Sized", bytes, memoryview)


class AlreadyExists(StoreError):  # noqa: N818 (an outcome as much as an error)
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


@dataclass(frozen=True, slots=True)
class Entry:
    """An object in a listing: its size in bytes, and when it was written, in seconds since 1970 UTC.

    The time is by the storage's clock, which need not agree with this machine's.
    """

    key: str
    size: int
    modified: float


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
    wasted = 0
    for number, request in enumerate(requests):
        if fetches:
            last, served = fetches[-1].range, fetches[-1].requests
            gap = max(0, request.start - last.stop)
            size = max(last.stop, request.stop) - last.start
            neighbours = request.key == last.key and request.start >= last.start and gap <= gap_bytes
            if neighbours and size <= fetch_bytes and _WASTE * (wasted + gap) <= size:
                whole = Range(last.key, last.start, last.start + size)
                fetches[-1] = Fetch(whole, (*served, number))
                wasted += gap
                continue
        fetches.append(Fetch(request, (number,)))
        wasted = 0
    return fetches


class Store(abc.ABC):
    """Objects under one root, named by relative keys.

    Absent objects raise `NotFoundError` (`object-missing`); everything else that goes wrong is a
    `StoreError`, `store-unreachable` where another try may succeed. Names that leave the root are refused
    (`key-unsafe`) before anything is touched. Objects are never changed once written. Instances may be used
    from several threads.

    A back end overrides the abstract methods; callers use `read` and `read_ranges`, which check lengths and
    are patient with failures that pass.
    """

    url: str
    """The root, without credentials."""
    readers: int = 4
    """Reads that are under way at once."""
    attempts: int = 4
    """Tries of a request that finds the storage unreachable."""
    pause_seconds: float = 0.2
    """The pause before the second try, on average; later ones double."""
    budget_seconds: float = 15.0
    """No further try of a request begins after so long."""

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
        """Create an object that is never partly visible; `AlreadyExists` if there is one.

        One request, which is not repeated after a lost reply: only the caller can tell whether what a second
        try would meet is its own.
        """

    @abc.abstractmethod
    def open_sink(self, key: str) -> Sink:
        """Write a new object piece by piece."""

    @abc.abstractmethod
    def list(self, folder: str, *, after: str | None = None) -> Iterator[str]:
        """Keys of the objects directly in a folder, ascending; empty if there is no such folder.

        With `after`, only those behind this key.
        """

    def entries(self, folder: str) -> Iterator[Entry]:
        """All objects below a folder, at any depth, ascending by key; empty if there is no such folder.

        Only retention asks for it: `UnsupportedError` from a back end that cannot tell.
        """
        raise UnsupportedError(
            "this back end does not tell when objects were written, so nothing can be collected here",
            kind="store-unsupported",
            where=f"{self.url}, {folder}",
        )

    @abc.abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; absent ones are no error."""

    def remnants(self) -> Iterator[Entry]:
        """What unfinished writes have left anywhere below the root, of live processes and of dead ones.

        No object is among them; `discard` removes them. Most back ends leave nothing that can be seen.
        """
        return iter(())

    def discard(self, remnants: Iterable[Entry]) -> None:
        """Remove what `remnants` has named; what is gone already is no error."""
        self.delete(remnant.key for remnant in remnants)

    def check_exclusive(self) -> None:  # noqa: B027 (most back ends have nothing to object)
        """Raise `UnsupportedError` if this back end cannot create exclusively."""

    def probe_exclusive(self, existing: str | None = None) -> None:  # noqa: ARG002 (the same)
        """Find out by trying whether an exclusive create is exclusive; `UnsupportedError` if it is not.

        With the key of an object that exists one request is enough; what it holds does not change. Without,
        an object is created and removed. Back ends whose promise does not depend on a server try nothing.
        """
        self.check_exclusive()

    def create(self, key: str, data: Buffer) -> None:
        """`put_if_absent`, again while storage is unreachable, and a lost reply settled by reading back.

        `data` must be nobody else's (hold something random): an equal object that is there is taken for ours.
        """
        try:
            self._again(lambda: self.put_if_absent(key, data))
        except AlreadyExists:
            if self.read(key) != data:
                raise

    def exists(self, key: str) -> bool:
        try:
            self._again(lambda: self.size(key))
        except NotFoundError:
            return False
        return True

    def read(self, key: str, *, limit: int | None = None) -> bytes:
        """A whole object; with `limit`, a larger one is refused before it is read, and its size is checked."""
        if limit is None:
            return self._again(lambda: self.read_all(key))
        size = self.size(key)
        if size > limit:
            raise StoreError(
                "object is larger than the limit",
                kind="object-too-large",
                where=key,
                expected=limit,
                found=size,
            )
        return self._measured(key, size, lambda: self.read_all(key))

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
        with pool_of(min(self.readers, len(fetches)), "deltafmt-read") as pool:
            while waiting or upcoming:
                while upcoming and (not waiting or pending + upcoming.range.nbytes <= ahead_bytes):
                    pending += upcoming.range.nbytes
                    waiting.append((upcoming, pool.submit(self._fetch, upcoming.range)))
                    upcoming = next(queue, None)
                fetch, future = waiting.popleft()
                data = future.result()
                pending -= fetch.range.nbytes
                yield from _views(fetch, requests, data)

    def _fetch(self, wanted: Range) -> memoryview:
        if wanted.nbytes == 0:
            return memoryview(b"")
        where = f"{wanted.key} [{wanted.start}, {wanted.stop})"
        return self._measured(
            where, wanted.nbytes, lambda: memoryview(self.read_range(wanted.key, wanted.start, wanted.stop))
        )

    def _measured(self, where: str, nbytes: int, read: Callable[[], _Sized]) -> _Sized:
        """What `read` returns if it has the right length, at the second try at the latest."""
        data = self._again(read)
        if len(data) != nbytes:
            data = self._again(read)
        if len(data) != nbytes:
            raise StoreError(
                "storage returned another number of bytes, twice",
                kind="short-read",
                where=where,
                expected=nbytes,
                found=len(data),
            )
        return data

    def pause(self, attempt: int) -> float:
        """Seconds to wait after try number `attempt` (from 1).

        They double, and they vary, so that those who failed together do not come back together.
        """
        seconds: float = min(self.pause_seconds * 2 ** (attempt - 1), _LONGEST_PAUSE)
        return varied(seconds)

    def _again(self, request: Callable[[], _Result], passing: frozenset[str] = PASSING) -> _Result:
        """Run a request that may be repeated after errors of these kinds, as long as tries and time last."""
        began = time.monotonic()
        for attempt in itertools.count(1):
            try:
                return request()
            except StoreError as error:
                pause = self.pause(attempt)
                late = time.monotonic() + pause - began > self.budget_seconds
                if error.kind not in passing or attempt >= self.attempts or late:
                    raise
            time.sleep(pause)
        raise AssertionError


def varied(seconds: float) -> float:
    """A pause that is up to half as long again, or as short, so that many who wait do not move in step."""
    return seconds * random.uniform(0.5, 1.5)


def _views(fetch: Fetch, requests: Sequence[Range], data: memoryview) -> Iterator[memoryview]:
    for number in fetch.requests:
        start = requests[number].start - fetch.range.start
        yield data[start : start + requests[number].nbytes]


def behind(after: str | None, keys: Iterable[str]) -> Iterator[str]:
    """Those of the keys that stand behind `after`; all of them if it is None."""
    return (key for key in keys if after is None or key > after)


def guarded(where: str, action: Callable[[], object]) -> None:
    """Run a clean-up whose failure must not hide the error that led to it."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - the caller is already handling the real failure
        logging.getLogger("deltafmt").warning("cannot clean up %s: %s", where, error)
