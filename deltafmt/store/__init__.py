"""Storage: the only I/O of the library, behind one small protocol with batch verbs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deltafmt.store.base import AlreadyExists, Range, Sink, Store
from deltafmt.store.local import LocalStore
from deltafmt.store.memory import MemoryStore

__all__ = ["AlreadyExists", "LocalStore", "MemoryStore", "Range", "Sink", "Store", "open_store"]


def open_store(url: str, storage_options: Mapping[str, Any] | None = None) -> Store:
    """The store of a root.

    A plain path and `file://` mean this machine's file system, `memory://` this process's memory; any
    other URL goes to fsspec with `storage_options`. A plain path is taken literally.
    """
    protocol, separator, rest = url.partition("://")
    if not separator:
        return LocalStore(url)
    if "::" not in url:
        if protocol in ("file", "local"):
            return LocalStore(rest)
        if protocol == "memory":
            return MemoryStore.named(rest)
    from deltafmt.store.fsspec import FsspecStore

    return FsspecStore.open(url, storage_options or {})
