"""A store that fails, lies, dawdles or dies at a chosen call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from deltafmt.errors import StoreError
from deltafmt.store import Entry, Sink, Store
from deltafmt.store.base import Buffer

Effect = Callable[["Call", Callable[[], object]], object]
"""Gets the call and the way to carry it out; returns what the caller sees, or raises."""


class Crash(BaseException):
    """The process dies here, as far as the code under test can tell."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call to the store, and what it is about.

    `verb` is `read_range`, `read_all`, `size`, `put`, `put_if_absent`, `open_sink`, `write`, `close`, `list`,
    `entries`, `remnants`, `discard` or `delete`; `[start, stop)` are the bytes of a ranged read.
    """

    verb: str
    key: str
    start: int | None = None
    stop: int | None = None


@dataclass(slots=True, kw_only=True)
class Fault:
    """An effect on the calls number `first` to `first + times - 1` (from 1) among those that match."""

    effect: Effect
    verb: str | None = None
    key: str = ""
    first: int = 1
    times: int = 1
    seen: int = 0

    def meets(self, call: Call) -> bool:
        """Whether the call is one of those to be spoiled; counts it if it matches."""
        if self.verb not in (None, call.verb) or self.key not in call.key:
            return False
        self.seen += 1
        return self.first <= self.seen < self.first + self.times


@dataclass(slots=True)
class _State:
    log: list[Call] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    dead: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class FaultyStore(Store):
    """Passes calls on to another store, logs them, and spoils those that a `Fault` names.

    Once an effect raises `Crash`, the store is dead: later calls do nothing but raise it too, so that no
    clean-up runs that a process which has really died would not have run. Waiting between tries takes no
    time here.

    >>> from deltafmt.store import MemoryStore
    >>> store = FaultyStore(MemoryStore())
    >>> store.inject(failing(OSError("no")), verb="put")
    >>> store.put("a", b"")
    Traceback (most recent call last):
    OSError: no
    >>> store.put("a", b"")
    >>> [call.verb for call in store.log]
    ['put', 'put']
    """

    pause_seconds = 0.0

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url
        self.readers = inner.readers
        self._state = _State()

    @property
    def log(self) -> list[Call]:
        """All calls so far, in order."""
        return self._state.log

    @property
    def dead(self) -> bool:
        """Whether a `Crash` has happened."""
        return self._state.dead

    def inject(
        self, effect: Effect, *, verb: str | None = None, key: str = "", first: int = 1, times: int = 1
    ) -> None:
        """Spoil calls of a verb (None: any) whose key contains `key`."""
        self._state.faults.append(Fault(effect=effect, verb=verb, key=key, first=first, times=times))

    def heal(self) -> None:
        """Drop all faults, forget the log, and come back to life."""
        self._state.faults.clear()
        self._state.log.clear()
        self._state.dead = False

    def call(self, call: Call, action: Callable[[], object]) -> object:
        """Log a call and carry it out, spoiled or not."""
        with self._state.lock:
            if self._state.dead:
                raise Crash
            self._state.log.append(call)
            effects = [fault.effect for fault in self._state.faults if fault.meets(call)]
        for effect in effects:
            action = partial(effect, call, action)
        try:
            return action()
        except Crash:
            self._state.dead = True
            raise

    def read_range(self, key: str, start: int, stop: int) -> Buffer:
        call = Call("read_range", key, start, stop)
        return self.call(call, lambda: self.inner.read_range(key, start, stop))  # type: ignore[return-value]

    def read_all(self, key: str) -> bytes:
        return self.call(Call("read_all", key), lambda: self.inner.read_all(key))  # type: ignore[return-value]

    def size(self, key: str) -> int:
        return self.call(Call("size", key), lambda: self.inner.size(key))  # type: ignore[return-value]

    def put(self, key: str, data: Buffer) -> None:
        self.call(Call("put", key), lambda: self.inner.put(key, data))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self.call(Call("put_if_absent", key), lambda: self.inner.put_if_absent(key, data))

    def open_sink(self, key: str) -> Sink:
        inner = self.call(Call("open_sink", key), lambda: self.inner.open_sink(key))
        return _FaultySink(self, key, inner)  # type: ignore[arg-type]

    def list(self, folder: str, *, after: str | None = None) -> Iterator[str]:
        yield from self.call(Call("list", folder), lambda: list(self.inner.list(folder, after=after)))  # type: ignore[misc]

    def entries(self, folder: str) -> Iterator[Entry]:
        yield from self.call(Call("entries", folder), lambda: list(self.inner.entries(folder)))  # type: ignore[misc]

    def remnants(self) -> Iterator[Entry]:
        yield from self.call(Call("remnants", ""), lambda: list(self.inner.remnants()))  # type: ignore[misc]

    def discard(self, remnants: Iterable[Entry]) -> None:
        for remnant in remnants:
            self.call(Call("discard", remnant.key), partial(self.inner.discard, [remnant]))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.call(Call("delete", key), partial(self.inner.delete, [key]))

    def check_exclusive(self) -> None:
        self.inner.check_exclusive()

    def probe_exclusive(self, existing: str | None = None) -> None:
        self.inner.probe_exclusive(existing)


class _FaultySink:
    def __init__(self, store: FaultyStore, key: str, inner: Sink) -> None:
        self._store, self._key, self._inner = store, key, inner

    def write(self, data: Buffer) -> None:
        self._store.call(Call("write", self._key), lambda: self._inner.write(data))

    def close(self) -> None:
        self._store.call(Call("close", self._key), self._inner.close)

    def abort(self) -> None:
        if not self._store.dead:
            self._inner.abort()


def failing(error: BaseException) -> Effect:
    """Nothing happens, and the error is raised."""

    def effect(_call: Call, _action: Callable[[], object]) -> object:
        raise error

    return effect


def unreachable() -> Effect:
    """Nothing happens: the connection is gone."""
    return failing(StoreError("the connection is gone", kind="store-unreachable"))


def crashing() -> Effect:
    """The process dies just before the call."""
    return failing(Crash())


def crashing_after() -> Effect:
    """The call is carried out, and the process dies before it learns of it."""
    return lost_reply(Crash())


def lost_reply(error: BaseException) -> Effect:
    """The call is carried out, but the caller sees an error."""

    def effect(_call: Call, action: Callable[[], object]) -> object:
        action()
        raise error

    return effect


def duplicated() -> Effect:
    """The call is carried out twice, and the caller sees how the second one ended."""

    def effect(_call: Call, action: Callable[[], object]) -> object:
        action()
        return action()

    return effect


def delayed(seconds: float) -> Effect:
    """The call takes longer."""

    def effect(_call: Call, action: Callable[[], object]) -> object:
        time.sleep(seconds)
        return action()

    return effect


def altered(change: Callable[[bytes], bytes]) -> Effect:
    """The bytes read are changed."""

    def effect(_call: Call, action: Callable[[], object]) -> object:
        return change(bytes(action()))  # type: ignore[call-overload]

    return effect


def short() -> Effect:
    """One byte less than asked for."""
    return altered(lambda data: data[:-1])


def long() -> Effect:
    """One byte more than asked for."""
    return altered(lambda data: data + b"\0")


def shifted() -> Effect:
    """As many bytes as asked for, from one byte further on."""
    return altered(lambda data: data[1:] + b"\0")


def flipped(index: int = 0) -> Effect:
    """One bit is wrong."""
    return altered(lambda data: data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :])


def replayed(old: bytes) -> Effect:
    """The bytes of an older object, as many as asked for."""
    return altered(lambda data: (old + bytes(len(data)))[: len(data)])
