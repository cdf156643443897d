"""Any fsspec file system as a store."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import fsspec
from fsspec.utils import get_protocol

from deltafmt.errors import DeltafmtError, NotFoundError, StoreError, UnsupportedError
from deltafmt.format.keys import check_name
from deltafmt.store.base import AlreadyExists, Buffer, Sink, Store, guarded

Create = Callable[[Any, str, bytes], None]
"""(file system, path, data) -> None, or `FileExistsError`: an exclusive create that is never partly seen."""

_ATTEMPTS = 4
_FIRST_PAUSE_SECONDS = 0.2
_TRANSIENT = (ConnectionError, TimeoutError, BlockingIOError, InterruptedError)


def conditional_put(fs: Any, path: str, data: bytes) -> None:
    """One PUT with a condition; the back end must not split it into parts."""
    fs.pipe_file(path, data, mode="create")


EXCLUSIVE: dict[str, Create] = {
    protocol: conditional_put for protocol in ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl")
}
"""Protocols whose fsspec package turns `mode="create"` into a conditional request."""


class FsspecStore(Store):
    """Objects of an fsspec file system below a path.

    `create` does exclusive creates; without one the root can be read but not committed to.
    """

    readers = 8

    def __init__(self, fs: Any, root: str, *, url: str, create: Create | None) -> None:
        self._make = fs if callable(fs) else (lambda: fs)
        self._fs, self._process = self._make(), os.getpid()
        self.root, self.url, self._create = root.rstrip("/"), url, create

    def __repr__(self) -> str:
        return f"FsspecStore({self.url!r})"

    @classmethod
    def open(cls, url: str, options: Mapping[str, Any]) -> FsspecStore:
        """The store of a URL; listings are never cached, since other machines write."""
        protocol = get_protocol(url)

        def make() -> Any:
            settings = {"use_listings_cache": False, "skip_instance_cache": True, **options}
            return fsspec.core.url_to_fs(url, **settings)[0]

        try:
            root = fsspec.core.url_to_fs(url, **options)[1]
            return cls(make, root, url=_public(url), create=EXCLUSIVE.get(protocol))
        except (ImportError, ValueError) as error:
            raise UnsupportedError(
                f"fsspec cannot open this URL ({error})", kind="store-unsupported", where=_public(url)
            ) from error

    @property
    def fs(self) -> Any:
        """The file system; a forked process gets its own, since event loops do not survive a fork."""
        if self._process != os.getpid():
            self._fs, self._process = self._make(), os.getpid()
        return self._fs

    def check_exclusive(self) -> None:
        if self._create is None:
            raise UnsupportedError(
                "this back end has no exclusive create that deltafmt knows to be safe; "
                "publish to a local path, S3, GCS or Azure instead",
                kind="store-unsupported",
                where=self.url,
            )

    def read_range(self, key: str, start: int, stop: int) -> Buffer:
        data: Buffer = self._call(key, lambda path: self.fs.cat_file(path, start=start, end=stop))
        return data

    def read_all(self, key: str) -> bytes:
        return bytes(self._call(key, lambda path: self.fs.cat_file(path)))

    def size(self, key: str) -> int:
        def measure(path: str) -> int:
            info = self.fs.info(path)
            if info["type"] != "file":
                raise FileNotFoundError(path)
            return int(info["size"])

        return self._call(key, measure)

    def put(self, key: str, data: Buffer) -> None:
        self._folder(key)
        self._call(key, lambda path: self.fs.pipe_file(path, bytes(data)))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self.check_exclusive()
        create = self._create
        assert create is not None
        self._folder(key)
        try:
            # Not repeated here: after a lost reply a second try would meet its own object. The caller
            # settles that by reading back.
            create(self.fs, self._path(key), bytes(data))
        except Exception as error:
            if _is_conflict(error):
                raise AlreadyExists("object exists already", kind="already-exists", where=key) from error
            raise _translated(error, key) from error

    def open_sink(self, key: str) -> Sink:
        self._folder(key)
        return self._call(key, lambda path: _FsspecSink(key, self.fs.open(path, "wb")))

    def list(self, folder: str) -> Iterator[str]:
        try:
            entries = self._call(folder, lambda path: self.fs.ls(path, detail=True))
        except NotFoundError:
            return
        names = [entry["name"].rsplit("/", 1)[-1] for entry in entries if entry["type"] == "file"]
        for name in sorted(names):
            yield f"{folder}/{name}"

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            try:
                self._call(key, lambda path: self.fs.rm_file(path))
            except NotFoundError:
                continue

    def _path(self, key: str) -> str:
        return f"{self.root}/{check_name(key, where=self.url)}"

    def _folder(self, key: str) -> None:
        """Back ends with real folders need them before a file."""
        parent = self._path(key).rsplit("/", 1)[0]
        if getattr(self.fs, "local_file", False) or self.fs.protocol in ("memory", ("file", "local")):
            self.fs.makedirs(parent, exist_ok=True)

    def _call(self, key: str, action: Callable[[str], Any]) -> Any:
        """Run a request that may safely be repeated; transient failures are, after growing pauses."""
        path = self._path(key)
        for attempt in range(_ATTEMPTS):
            try:
                return action(path)
            except DeltafmtError:
                raise
            except Exception as error:
                if attempt + 1 == _ATTEMPTS or not isinstance(error, _TRANSIENT):
                    raise _translated(error, key) from error
                time.sleep(_FIRST_PAUSE_SECONDS * 2**attempt * random.uniform(0.5, 1.5))
        raise AssertionError


class _FsspecSink:
    def __init__(self, key: str, file: Any) -> None:
        self._key, self._file = key, file

    def write(self, data: Buffer) -> None:
        try:
            self._file.write(data)
        except Exception as error:
            raise _translated(error, self._key) from error

    def close(self) -> None:
        try:
            self._file.close()
        except Exception as error:
            raise _translated(error, self._key) from error

    def abort(self) -> None:
        # Leaving the file to its own devices would publish what it holds so far.
        discard = getattr(self._file, "discard", None)
        if discard is not None:
            guarded(self._key, discard)


def _is_conflict(error: BaseException | None) -> bool:
    """Whether the store said that the object exists: by type, or by HTTP status 412 or 409 underneath."""
    while error is not None:
        if isinstance(error, FileExistsError):
            return True
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if status in (409, 412):
                return True
        if getattr(error, "code", None) == 412 or getattr(error, "status_code", None) in (409, 412):
            return True
        error = error.__cause__ or error.__context__
    return False


def _translated(error: Exception, key: str) -> DeltafmtError:
    if isinstance(error, FileNotFoundError):
        return NotFoundError("no such object", kind="object-missing", where=key)
    kind = "store-unreachable" if isinstance(error, _TRANSIENT) else "store-failed"
    # The text of a back end's error may hold URLs with credentials; the cause keeps it for debuggers.
    return StoreError(f"storage failed ({type(error).__name__})", kind=kind, where=key)


def _public(url: str) -> str:
    """The URL without user name, password and query."""
    head, separator, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{head}{separator}{authority.rpartition('@')[2]}{slash}{path.partition('?')[0]}"
