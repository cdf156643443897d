"""Any fsspec file system as a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any

import fsspec

from deltafmt.errors import DeltafmtError, NotFoundError, StoreError, UnsupportedError
from deltafmt.format.keys import check_name
from deltafmt.store.base import AlreadyExists, Buffer, Entry, Sink, Store, guarded

Create = Callable[[Any, str, bytes], None]
"""(file system, path, data) -> None, or `FileExistsError`: an exclusive create that is never partly seen."""


def conditional_put(fs: Any, path: str, data: bytes) -> None:
    """One PUT with a condition; metadata objects are far below the size at which back ends split a PUT."""
    fs.pipe_file(path, data, mode="create")


EXCLUSIVE_CREATE: dict[str, Create] = dict.fromkeys(
    ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl"), conditional_put
)
"""Protocols whose fsspec package turns `mode="create"` into a conditional request.

fsspec's own version of it looks first and writes then, so that two writers both succeed: every protocol
that is not listed here is refused for writing.
"""

_CACHES_OFF = {"use_listings_cache": False, "skip_instance_cache": True}
"""Other machines write too; and an instance of our own makes the option hold, whoever else uses the URL."""
_TRANSIENT = (ConnectionError, TimeoutError, BlockingIOError, InterruptedError)
_TRANSIENT_NAMES = frozenset(
    {
        "ClientConnectionError",
        "ClientPayloadError",
        "EndpointConnectionError",
        "ConnectTimeoutError",
        "ReadTimeoutError",
        "ConnectionClosedError",
        "FSTimeoutError",
    }
)
"""Classes of the client libraries that stand for a lost connection, without having to import them."""
_TRANSIENT_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_CONFLICT_STATUS = frozenset({409, 412})


class FsspecStore(Store):
    """Objects of an fsspec file system below the path `root`.

    `make_fs` makes the file system, again in every forked process: event loops do not survive a fork.
    `create` does exclusive creates; without one the root can be read but not published to. `folders` says
    whether a file needs its folder to be made before it.
    """

    readers = 8

    def __init__(
        self,
        make_fs: Callable[[], Any],
        root: str,
        *,
        url: str,
        create: Create | None,
        folders: bool = True,
    ) -> None:
        self._make, self._create, self._folders = make_fs, create, folders
        self._fs, self._process = make_fs(), os.getpid()
        self.root, self.url = root.rstrip("/"), url

    def __repr__(self) -> str:
        return f"FsspecStore({self.url!r})"

    @classmethod
    def open(cls, url: str, options: Mapping[str, Any]) -> FsspecStore:
        """The store of a URL."""
        settings = {**options, **_CACHES_OFF}
        protocol, shown = fsspec.utils.get_protocol(url), public_url(url)
        try:
            fs, root = fsspec.core.url_to_fs(url, **settings)
        except (ImportError, ValueError, TypeError) as error:
            reason = f" ({error})" if isinstance(error, ImportError) else ""
            raise UnsupportedError(
                f"fsspec cannot open this kind of URL{reason}", kind="store-unsupported", where=shown
            ) from error
        except Exception as error:
            raise translated(error, shown) from error
        first = [fs]

        def make() -> Any:
            return first.pop() if first else fsspec.core.url_to_fs(url, **settings)[0]

        return cls(
            make,
            root,
            url=shown,
            create=EXCLUSIVE_CREATE.get(protocol),
            folders=protocol not in EXCLUSIVE_CREATE,
        )

    @property
    def fs(self) -> Any:
        """The file system, an instance of this process."""
        if self._process != os.getpid():
            self._fs, self._process = self._make(), os.getpid()
        return self._fs

    def check_exclusive(self) -> None:
        if self._create is None:
            raise UnsupportedError(
                "this back end has no exclusive create that is known to be safe, so two writers could both "
                "publish one version; publish to a local path, S3, GCS or Azure instead",
                kind="store-unsupported",
                where=self.url,
            )

    def read_range(self, key: str, start: int, stop: int) -> Buffer:
        data: Buffer = self._once(key, lambda path: self.fs.cat_file(path, start=start, end=stop))
        return data

    def read_all(self, key: str) -> bytes:
        return bytes(self._once(key, self.fs.cat_file))

    def size(self, key: str) -> int:
        def measure(path: str) -> int:
            info = self.fs.info(path)
            if info["type"] != "file":
                raise FileNotFoundError(path)
            return int(info["size"])

        size: int = self._again(lambda: self._once(key, measure))
        return size

    def put(self, key: str, data: Buffer) -> None:
        self._make_folder(key)
        self._again(lambda: self._once(key, lambda path: self.fs.pipe_file(path, bytes(data))))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self.check_exclusive()
        create = self._create
        assert create is not None
        self._make_folder(key)
        # Not repeated here: after a lost reply a second try would meet its own object. The caller settles
        # that by reading back.
        self._once(key, lambda path: create(self.fs, path, bytes(data)))

    def open_sink(self, key: str) -> Sink:
        self._make_folder(key)
        file = self._again(lambda: self._once(key, lambda path: self.fs.open(path, "wb")))
        return _FsspecSink(self, key, file)

    def list(self, folder: str) -> Iterator[str]:
        try:
            entries = self._again(lambda: self._once(folder, lambda path: self.fs.ls(path, detail=True)))
        except NotFoundError:
            return
        paths = [entry["name"].split("/") for entry in entries if entry["type"] == "file"]
        # A file system may answer for a file of the folder's name with that file.
        inside = folder.split("/")
        yield from sorted(f"{folder}/{path[-1]}" for path in paths if path[-1 - len(inside) : -1] == inside)

    def entries(self, folder: str) -> Iterator[Entry]:
        try:
            found = self._again(lambda: self._once(folder, lambda path: self.fs.find(path, detail=True)))
        except NotFoundError:
            return
        inside = f"{self._path(folder).strip('/')}/"
        for name, info in sorted(found.items()):
            path = name.lstrip("/")
            if path.startswith(inside):
                yield Entry(f"{folder}/{path[len(inside) :]}", int(info["size"]), self._modified(info))

    def _modified(self, info: Mapping[str, Any]) -> float:
        """When a file was written, in any driver's words."""
        for word in ("LastModified", "last_modified", "mtime", "modified", "updated", "created"):
            value = info.get(word)
            if isinstance(value, datetime):
                return value.timestamp()
            if isinstance(value, (int, float)):
                return float(value)
        raise UnsupportedError(
            "this back end does not tell when objects were written, so nothing can be collected here",
            kind="store-unsupported",
            where=self.url,
        )

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            remove = partial(self._once, key, self.fs.rm_file)
            with suppress(NotFoundError):
                self._again(remove)

    def _path(self, key: str) -> str:
        return f"{self.root}/{check_name(key, where=self.url)}"

    def _make_folder(self, key: str) -> None:
        if self._folders:
            parent = self._path(key).rpartition("/")[0]
            self._once(key, lambda _: self.fs.makedirs(parent, exist_ok=True))

    def _once(self, key: str, action: Callable[[str], Any]) -> Any:
        path = self._path(key)
        try:
            return action(path)
        except DeltafmtError:
            raise
        except Exception as error:
            raise translated(error, key) from error


class _FsspecSink:
    def __init__(self, store: FsspecStore, key: str, file: Any) -> None:
        self._store, self._key, self._file = store, key, file

    def write(self, data: Buffer) -> None:
        try:
            self._file.write(data)
        except Exception as error:
            raise translated(error, self._key) from error

    def close(self) -> None:
        try:
            self._file.close()
        except Exception as error:
            raise translated(error, self._key) from error

    def abort(self) -> None:
        guarded(self._key, self._discard)

    def _discard(self) -> None:
        """Leaving a file to its own devices would publish what it holds so far."""
        if isinstance(self._file, fsspec.spec.AbstractBufferedFile):
            # Gives up a multipart upload; and the finalizer closes, which means finishes, what is open.
            self._file.discard()
            self._file.closed = True
        else:
            self._file.close()
        self._store.delete([self._key])


def translated(error: Exception, key: str) -> DeltafmtError:
    """A back end's error as one of ours.

    Its text may hold URLs with credentials and is left to the cause.
    """
    if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
        return NotFoundError("no such object", kind="object-missing", where=key)
    causes = list(_causes(error))
    if any(isinstance(cause, FileExistsError) or _status(cause) in _CONFLICT_STATUS for cause in causes):
        return AlreadyExists("object exists already", kind="already-exists", where=key)
    passing = any(
        isinstance(cause, _TRANSIENT)
        or _status(cause) in _TRANSIENT_STATUS
        or any(base.__name__ in _TRANSIENT_NAMES for base in type(cause).__mro__)
        for cause in causes
    )
    kind = "store-unreachable" if passing else "store-failed"
    return StoreError(f"storage failed ({type(error).__name__})", kind=kind, where=key)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    """The HTTP status in an error of botocore, aiohttp, google-auth or azure-core."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        status = getattr(error, "status", None) or getattr(error, "status_code", None)
        status = status or getattr(error, "code", None)
    return status if isinstance(status, int) else None


def public_url(url: str) -> str:
    """The URL without user names, passwords and queries, in every link of a chain."""
    return "::".join(_public_link(link) for link in url.split("::"))


def _public_link(url: str) -> str:
    head, separator, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{head}{separator}{authority.rpartition('@')[2]}{slash}{path.partition('?')[0]}"
