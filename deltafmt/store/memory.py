"""A store in this process's memory, for tests and for trainers and engines in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

from deltafmt.errors import NotFoundError
from deltafmt.format.keys import check_name
from deltafmt.store.base import AlreadyExists, Buffer, Entry, Sink, Store, behind


class MemoryStore(Store):
    """Objects in a dictionary under a lock; `named` gives everybody in the process the same one.

    `clock` is what objects are dated by; tests may set it.
    """

    _stores: ClassVar[dict[str, MemoryStore]] = {}
    _stores_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, name: str = "") -> None:
        self.url = f"memory://{name}"
        self.objects: dict[str, bytes] = {}
        self.clock: Callable[[], float] = time.time
        self._written: dict[str, float] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"MemoryStore({self.url!r})"

    @classmethod
    def named(cls, name: str) -> MemoryStore:
        """The store of this name, made when first asked for."""
        name = name.strip("/")
        with cls._stores_lock:
            return cls._stores.setdefault(name, cls(name))

    def read_range(self, key: str, start: int, stop: int) -> Buffer:
        return memoryview(self._get(key))[start:stop]

    def read_all(self, key: str) -> bytes:
        return self._get(key)

    def size(self, key: str) -> int:
        return len(self._get(key))

    def put(self, key: str, data: Buffer) -> None:
        check_name(key, where=self.url)
        with self._lock:
            self._set(key, data)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        check_name(key, where=self.url)
        with self._lock:
            if key in self.objects:
                raise AlreadyExists("object exists already", kind="already-exists", where=key)
            self._set(key, data)

    def open_sink(self, key: str) -> Sink:
        check_name(key, where=self.url)
        return _MemorySink(self, key)

    def list(self, folder: str, *, after: str | None = None) -> Iterator[str]:
        start = len(folder) + 1
        keys = (entry.key for entry in self.entries(folder) if "/" not in entry.key[start:])
        yield from behind(after, keys)

    def entries(self, folder: str) -> Iterator[Entry]:
        prefix = f"{check_name(folder, where=self.url)}/"
        with self._lock:
            found = [
                Entry(key, len(data), self._written.setdefault(key, self.clock()))
                for key, data in self.objects.items()
                if key.startswith(prefix)
            ]
        yield from sorted(found, key=lambda entry: entry.key)

    def delete(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self.objects.pop(check_name(key, where=self.url), None)
                self._written.pop(key, None)

    def _set(self, key: str, data: Buffer) -> None:
        self.objects[key] = bytes(data)
        self._written[key] = self.clock()

    def _get(self, key: str) -> bytes:
        check_name(key, where=self.url)
        with self._lock:
            try:
                return self.objects[key]
            except KeyError:
                raise NotFoundError("no such object", kind="object-missing", where=key) from None


class _MemorySink:
    def __init__(self, store: MemoryStore, key: str) -> None:
        self._store, self._key = store, key
        self._data = bytearray()

    def write(self, data: Buffer) -> None:
        self._data += data

    def close(self) -> None:
        self._store.put(self._key, bytes(self._data))

    def abort(self) -> None:
        self._data.clear()
