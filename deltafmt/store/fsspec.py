"""Any fsspec file system as a store."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, ClassVar, Self

import fsspec

from deltafmt.errors import DeltafmtError, NotFoundError, StoreError, UnsupportedError
from deltafmt.format.keys import check_name, probe_key
from deltafmt.store.base import AlreadyExists, Buffer, Entry, Sink, Store, behind, guarded
from deltafmt.store.hidden import fit_to_show, secrets_of
from deltafmt.store.translate import public_url, statuses, translated

Create = Callable[[Any, str, bytes], None]
"""(file system, path, data) -> None, or `FileExistsError`: an exclusive create that is never partly seen."""


def conditional_put(fs: Any, path: str, data: bytes) -> None:
    """One PUT with a condition; metadata objects are far below the size at which back ends split a PUT."""
    fs.pipe_file(path, data, mode="create")


EXCLUSIVE_CREATE: dict[str, Create] = dict.fromkeys(("gs", "gcs", "az", "abfs", "abfss"), conditional_put)
"""Protocols whose fsspec package turns `mode="create"` into a conditional request.

fsspec's own version of it looks first and writes then, so that two writers both succeed: every protocol
that is not listed here is refused for writing.
"""

_CACHES_OFF = {"use_listings_cache": False}
"""Other machines write too."""
_NO_SUCH_RANGE = 416
"""The HTTP status of a range that lies outside its object."""
_UNSUPPORTED = (
    "this back end has no exclusive create that is known to be safe, so two writers could both publish one "
    "version; publish to a local path, S3, GCS or Azure instead"
)
_NOT_EXCLUSIVE = (
    "this storage server overwrites an object that it is asked to create, so two writers could both publish "
    "one version; publish to a server that honours If-None-Match, or to a local path (reading is possible)"
)
_BUSY = frozenset({"store-busy"})
_CREATE_BYTES = 48 << 20
"""An exclusive create is one request: drivers split larger objects, and drop the condition on the way."""


class FsspecStore(Store):
    """Objects of an fsspec file system below the path `root`.

    `make_fs` makes the file system, again in every forked process: event loops do not survive a fork.
    `create` does exclusive creates; without one the root can be read but not published to. `folders` says
    whether a file needs its folder to be made before it. Errors of the file system that tell a secret of `hidden`
    are no causes of ours.
    """

    readers = 8
    attempts = 8
    creates: ClassVar[Mapping[str, Create]] = EXCLUSIVE_CREATE
    """How a protocol creates exclusively; those that are not here can be read only."""

    def __init__(
        self,
        make_fs: Callable[[], Any],
        root: str,
        *,
        url: str,
        create: Create | None,
        folders: bool = True,
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        self._hidden = hidden
        self._make, self._create, self._folders = make_fs, create, folders
        self._fs, self._process = make_fs(), os.getpid()
        self._inherited: list[Any] = []
        self.root, self.url = root.rstrip("/"), url

    def __repr__(self) -> str:
        return f"FsspecStore({self.url!r})"

    @classmethod
    def open(cls, url: str, options: Mapping[str, Any]) -> Self:
        """The store of a URL."""
        settings = {**cls.settings(options), **_CACHES_OFF}
        protocol, shown = fsspec.utils.get_protocol(url), public_url(url)
        hidden = secrets_of(url, options)

        def connect() -> tuple[Any, str]:
            fs, root = fsspec.core.url_to_fs(url, **settings)
            return cls.prepared(fs), root

        try:
            fs, root = connect()
        except (ImportError, ValueError, TypeError) as error:
            reason = f" ({error})" if isinstance(error, ImportError) else ""
            raise UnsupportedError(
                f"fsspec cannot open this kind of URL{reason}", kind="store-unsupported", where=shown
            ) from fit_to_show(error, hidden)
        except Exception as error:  # noqa: BLE001 (raised again as one of ours)
            raise translated(error, shown) from fit_to_show(error, hidden)
        first = [fs]

        def make() -> Any:
            return first.pop() if first else connect()[0]

        return cls(
            make,
            root,
            url=shown,
            create=cls.creates.get(protocol),
            folders=protocol not in cls.creates,
            hidden=hidden,
        )

    @classmethod
    def settings(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """The driver's options: those given, and what this kind of storage needs besides."""
        # With an instance of our own the other options hold, whoever else uses the URL.
        return {**options, "skip_instance_cache": True}

    @classmethod
    def prepared(cls, fs: Any) -> Any:
        """A new file system, made ready for use."""
        return fs

    @property
    def fs(self) -> Any:
        """The file system, an instance of this process."""
        if self._process != os.getpid():
            # Dropping the parent's would close connections by an event loop that did not survive the fork.
            self._inherited.append(self._fs)
            self._fs, self._process = self._make(), os.getpid()
        return self._fs

    @property
    def address(self) -> str:
        """The root, and the server if it is not the usual one; without credentials."""
        endpoint = getattr(self._fs, "endpoint_url", None)
        return f"{self.url} at {public_url(endpoint)}" if isinstance(endpoint, str) else self.url

    def check_exclusive(self) -> None:
        if self._create is None:
            raise UnsupportedError(_UNSUPPORTED, kind="store-unsupported", where=self.url)

    def probe_exclusive(self, existing: str | None = None) -> None:
        self.check_exclusive()
        if existing is not None:
            data = self.read(existing)
            # If it was removed in between, the first one creates it; the second one settles it.
            if self._creates(existing, data) and self._creates(existing, data):
                raise self._not_exclusive()
            return
        first, second = secrets.token_bytes(16), secrets.token_bytes(16)
        key = probe_key(first)
        try:
            self.create(key, first)
            if self._creates(key, second) or self.read(key) != first:
                raise self._not_exclusive()
        finally:
            guarded(key, partial(self.delete, [key]))

    def _creates(self, key: str, data: bytes) -> bool:
        """Whether a create succeeds, lost replies apart."""
        try:
            self._again(lambda: self.put_if_absent(key, data))
        except AlreadyExists:
            return False
        return True

    def _not_exclusive(self) -> UnsupportedError:
        return UnsupportedError(_NOT_EXCLUSIVE, kind="create-not-exclusive", where=self.address)

    def read_range(self, key: str, start: int, stop: int) -> Buffer:
        data: bytes = self._once(key, lambda path: self._cat(path, start=start, end=stop))
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
        content = bytes(data)
        if len(content) > _CREATE_BYTES:
            raise StoreError(
                "too large to be created by one request",
                kind="object-too-large",
                where=key,
                expected=f"at most {_CREATE_BYTES} bytes",
                found=len(content),
            )
        self._make_folder(key)
        # A busy server has certainly not created it; after a lost reply a second try could meet its own object.
        self._again(lambda: self._once(key, lambda path: create(self.fs, path, content)), _BUSY)

    def open_sink(self, key: str) -> Sink:
        self._make_folder(key)
        file = self._again(lambda: self._once(key, lambda path: self.fs.open(path, "wb")))
        return _FsspecSink(self, key, file)

    def list(self, folder: str, *, after: str | None = None) -> Iterator[str]:
        try:
            entries = self._again(lambda: self._once(folder, lambda path: self.fs.ls(path, detail=True)))
        except NotFoundError:
            return
        paths = [entry["name"].split("/") for entry in entries if entry["type"] == "file"]
        # A file system may answer for a file of the folder's name with that file.
        inside = folder.split("/")
        keys = sorted(f"{folder}/{path[-1]}" for path in paths if path[-1 - len(inside) : -1] == inside)
        yield from behind(after, keys)

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

    def _cat(self, path: str, **bounds: int) -> bytes:
        """Bytes of a file; none where servers refuse a range outside of it."""
        try:
            return bytes(self.fs.cat_file(path, **bounds))
        except OSError as error:
            if _NO_SUCH_RANGE in statuses(error):
                return b""
            raise

    def _path(self, key: str) -> str:
        return f"{self.root}/{check_name(key, where=self.url)}"

    def _make_folder(self, key: str) -> None:
        if self._folders:
            parent = self._path(key).rpartition("/")[0]
            self._once(key, lambda _: self.fs.makedirs(parent, exist_ok=True))

    def cause(self, error: Exception) -> Exception:
        """What to give as the cause of an error of ours."""
        return fit_to_show(error, self._hidden)

    def _once(self, key: str, action: Callable[[str], Any]) -> Any:
        path = self._path(key)
        try:
            return action(path)
        except DeltafmtError:
            raise
        except Exception as error:  # noqa: BLE001 (raised again as one of ours)
            raise translated(error, key) from self.cause(error)


class _FsspecSink:
    def __init__(self, store: FsspecStore, key: str, file: Any) -> None:
        self._store, self._key, self._file = store, key, file

    def write(self, data: Buffer) -> None:
        try:
            written = self._file.write(data)
        except Exception as error:  # noqa: BLE001 (raised again as one of ours)
            raise translated(error, self._key) from self._store.cause(error)
        if isinstance(written, int) and written != memoryview(data).nbytes:
            raise StoreError(
                "storage took only a part of what it was given",
                kind="store-failed",
                where=self._key,
                expected=memoryview(data).nbytes,
                found=written,
            )

    def close(self) -> None:
        try:
            self._file.close()
        except Exception as error:  # noqa: BLE001 (raised again as one of ours)
            raise translated(error, self._key) from self._store.cause(error)

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
