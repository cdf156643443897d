"""fsspec's memory and local file systems under the adapter, for tests only.

Neither has an exclusive create of its own. The ones here are safe within one process (memory) and between
processes of one machine (local); outside tests `open_store` serves both with stores that do it themselves.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from typing import Any

import fsspec

from deltafmt.store.fsspec import Create, FsspecStore

_memory_lock = threading.Lock()


def locked_create(fs: Any, path: str, data: bytes) -> None:
    """Look, then write, under a lock that every memory file system of the process shares."""
    with _memory_lock:
        if fs.exists(path):
            raise FileExistsError(path)
        fs.pipe_file(path, data)


def linked_create(fs: Any, path: str, data: bytes) -> None:
    """A temporary file, then a hard link to it under the real name."""
    temporary = f"{path}.{secrets.token_hex(8)}.part"
    fs.pipe_file(temporary, data)
    try:
        os.link(temporary, path)
    finally:
        fs.rm_file(temporary)


TEST_CREATE: dict[str, Create] = {"memory": locked_create, "file": linked_create}
"""Exclusive creates that are good enough for tests, by protocol."""


def fsspec_store(protocol: str, root: str, wrap: Callable[[Any], Any] = lambda fs: fs) -> FsspecStore:
    """A store on fsspec's file system of this protocol (`memory` or `file`), which `wrap` may dress up."""
    return FsspecStore(
        lambda: wrap(fsspec.filesystem(protocol, skip_instance_cache=True)),
        root,
        url=f"{protocol}+test://{root}",
        create=TEST_CREATE[protocol],
    )
