"""A folder of this machine as a store."""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from deltafmt.errors import NotFoundError, StoreError, UnsupportedError
from deltafmt.format.keys import check_name
from deltafmt.store.base import AlreadyExists, Buffer, Entry, Sink, Store, behind, guarded

_PRIVATE = "."
"""Names that begin so are work in progress, never objects."""
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}")
"""Names of files that `put` and `put_if_absent` write before they give them their names."""
_FOLDER_TRIES = 8
"""Of making a folder and a file in it, while a collector removes folders that it finds empty."""
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_PASSING = frozenset({errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR})
"""Failures of network file systems after which another try may succeed."""


class LocalStore(Store):
    """Objects as files; durable when a write returns, created exclusively by hard link.

    No key and no symbolic link leads outside the root.
    """

    readers = 2

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(root))
        self.url = str(self.root)

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    def check_exclusive(self) -> None:
        # A folder that is not there yet is made later, below the nearest one that is.
        standing = next(path for path in (self.root, *self.root.parents) if path.exists())
        if not standing.is_dir():
            raise UnsupportedError(
                "a root is a folder, and a file stands there; name another path",
                kind="store-unsupported",
                where=str(standing),
            )

    def read_range(self, key: str, start: int, stop: int) -> Buffer:
        with _errors(key):
            descriptor = os.open(self._path(key), os.O_RDONLY)
            try:
                data = bytearray(stop - start)
                view, filled = memoryview(data), 0
                # One call may return less than it was asked for, and at most 2 GiB.
                while filled < len(data):
                    count = os.preadv(descriptor, [view[filled : filled + (1 << 30)]], start + filled)
                    if count == 0:
                        break
                    filled += count
                return view[:filled]
            finally:
                os.close(descriptor)

    def read_all(self, key: str) -> bytes:
        with _errors(key):
            return self._path(key).read_bytes()

    def size(self, key: str) -> int:
        with _errors(key):
            path = self._path(key)
            if path.is_dir():
                raise FileNotFoundError(key)
            return path.stat().st_size

    def put(self, key: str, data: Buffer) -> None:
        with _errors(key):
            path = self._path(key)
            temporary = self._write_temporary(path, data)
            try:
                os.replace(temporary, path)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
            _sync_folder(path.parent)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        with _errors(key):
            path = self._path(key)
            temporary = self._write_temporary(path, data)
            try:
                # A link is made whole or not at all, and never replaces what is there.
                os.link(temporary, path)
            except FileExistsError:
                raise AlreadyExists("object exists already", kind="already-exists", where=key) from None
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                raise UnsupportedError(
                    "this file system has no hard links, by which versions are created exclusively; "
                    "publish to another file system or to object storage",
                    kind="store-unsupported",
                    where=self.url,
                ) from error
            finally:
                temporary.unlink(missing_ok=True)
            _sync_folder(path.parent)

    def open_sink(self, key: str) -> Sink:
        with _errors(key):
            path = self._path(key)
            return _in_folder(path.parent, lambda: _FileSink(key, path))

    def list(self, folder: str, *, after: str | None = None) -> Iterator[str]:
        with _errors(folder):
            path = self._path(folder)
            try:
                with os.scandir(path) as entries:
                    names = [entry.name for entry in entries if _is_object(entry)]
            except (FileNotFoundError, NotADirectoryError):
                return
        yield from behind(after, (f"{folder}/{name}" for name in sorted(names)))

    def entries(self, folder: str) -> Iterator[Entry]:
        with _errors(folder):
            check_name(folder, where=self.url)
            yield from self._dated(f for f in self._files(folder) if not f.name.startswith(_PRIVATE))

    def remnants(self) -> Iterator[Entry]:
        with _errors(""):
            yield from self._dated(f for f in self._files("") if _TEMPORARY.fullmatch(f.name))

    def _files(self, folder: str) -> Iterator[os.DirEntry[str]]:
        """All files below a folder; links are not followed."""
        try:
            with os.scandir(self._path(folder) if folder else self.root) as entries:
                found = list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                yield from self._files(f"{folder}/{entry.name}" if folder else entry.name)
            elif entry.is_file(follow_symlinks=False):
                yield entry

    def _dated(self, files: Iterable[os.DirEntry[str]]) -> Iterator[Entry]:
        found = []
        for file in files:
            with suppress(FileNotFoundError):
                status = file.stat(follow_symlinks=False)
                found.append(Entry(os.path.relpath(file.path, self.root), status.st_size, status.st_mtime))
        return iter(sorted(found, key=lambda entry: entry.key))

    def delete(self, keys: Iterable[str]) -> None:
        folders = set()
        for key in keys:
            with _errors(key), suppress(FileNotFoundError):
                path = self._path(key)
                path.unlink()
                folders.add(path.parent)
        for folder in folders:
            self._remove_empty(folder)

    def _remove_empty(self, folder: Path) -> None:
        """Remove a folder and those above it, up to the root, as far as nothing is in them."""
        with suppress(OSError):
            while folder != self.root:
                folder.rmdir()
                folder = folder.parent

    def _path(self, key: str) -> Path:
        check_name(key, where=self.url)
        path = self.root / key
        real = os.path.realpath(path)
        root = os.path.realpath(self.root)
        if real != os.path.join(root, key):
            raise StoreError(
                "a symbolic link on the way to the object; a root holds plain files and folders only",
                kind="key-unsafe",
                where=key,
            )
        return path

    def _write_temporary(self, path: Path, data: Buffer) -> Path:
        temporary = path.parent / f"{_PRIVATE}{path.name}.{secrets.token_hex(8)}"
        try:
            with _in_folder(path.parent, lambda: temporary.open("xb")) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            # Whatever is in its way, the first error is the one to tell.
            with suppress(OSError):
                temporary.unlink()
            raise
        return temporary


class _FileSink:
    def __init__(self, key: str, path: Path) -> None:
        self._key, self._path = key, path
        self._file = path.open("xb", buffering=0)

    def write(self, data: Buffer) -> None:
        with _errors(self._key):
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]

    def close(self) -> None:
        with _errors(self._key):
            os.fsync(self._file.fileno())
            self._file.close()
            _sync_folder(self._path.parent)

    def abort(self) -> None:
        guarded(self._key, self._file.close)
        guarded(self._key, lambda: self._path.unlink(missing_ok=True))


def _is_object(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(_PRIVATE) and entry.is_file(follow_symlinks=False)


def _make_folder(path: Path) -> None:
    if path.is_dir():
        return
    _make_folder(path.parent)
    path.mkdir(exist_ok=True)
    _sync_folder(path.parent)


_Made = TypeVar("_Made")


def _in_folder(folder: Path, make: Callable[[], _Made]) -> _Made:
    """What `make` makes in a folder, which is made before if need be."""
    for _ in range(_FOLDER_TRIES - 1):
        with suppress(FileNotFoundError):
            _make_folder(folder)
            return make()
    try:
        _make_folder(folder)
        return make()
    except FileNotFoundError as error:
        raise StoreError("the folder cannot be made", kind="store-failed", where=str(folder)) from error


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _errors(key: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise NotFoundError("no such object", kind="object-missing", where=key) from error
    except OSError as error:
        kind = "store-unreachable" if error.errno in _PASSING else "store-failed"
        raise StoreError(f"the file system refused ({error.strerror})", kind=kind, where=key) from error
