"""Storage: the only I/O of the library, behind one small protocol with batch verbs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from deltafmt.errors import UnsupportedError
from deltafmt.store.base import AlreadyExists, Entry, Range, Sink, Store
from deltafmt.store.local import LocalStore
from deltafmt.store.memory import MemoryStore

__all__ = [
    "AlreadyExists",
    "Entry",
    "LocalStore",
    "MemoryStore",
    "Range",
    "Sink",
    "Store",
    "Url",
    "open_store",
    "register_protocol",
]

Url = str | os.PathLike[str]
"""A root: a path, or a URL."""

Opener = Callable[[str, Mapping[str, Any]], Store]
"""(what follows `protocol://`, storage options) -> the store."""


def register_protocol(protocol: str, opener: Opener) -> None:
    """Make `protocol://...` a back end of one's own, in this process; it goes before fsspec's."""
    _OPENERS[protocol] = opener


def open_store(url: Url, storage_options: Mapping[str, Any] | None = None) -> Store:
    """The store of a root.

    A plain path and `file://` mean this machine's file system, `memory://` this process's memory; any
    other URL goes to a registered protocol or to fsspec, with `storage_options`. A plain path is literal.
    """
    url = os.fspath(url)
    if not url:
        raise UnsupportedError("no root is named; give a path or URL", kind="store-unsupported")
    protocol, separator, rest = url.partition("://")
    if not separator:
        return LocalStore(url)
    if protocol in _OPENERS and "::" not in url:
        return _OPENERS[protocol](rest, storage_options or {})
    from deltafmt.store.fsspec import FsspecStore
    from deltafmt.store.s3 import S3Store

    kind = S3Store if protocol in S3Store.protocols else FsspecStore
    return kind.open(url, storage_options or {})


def _open_local(path: str, _: Mapping[str, Any]) -> Store:
    return LocalStore(path)


def _open_memory(name: str, _: Mapping[str, Any]) -> Store:
    return MemoryStore.named(name)


_OPENERS: dict[str, Opener] = {"file": _open_local, "local": _open_local, "memory": _open_memory}
