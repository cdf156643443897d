"""A folder of this machine as a store."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deltafmt.errors import NotFoundError, StoreError, UnsupportedError
from deltafmt.format.keys import check_name
from deltafmt.store.base import AlreadyExists, Buffer, Sink, Store, guarded

_PRIVATE = "."
"""Names that begin so are work in progress, never objects."""
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
            _make_folder(path.parent)
            return _FileSink(key, path)

    def list(self, folder: str) -> Iterator[str]:
        with _errors(folder):
            path = self._path(folder)
            try:
                with os.scandir(path) as entries:
                    names = [entry.name for entry in entries if _is_object(entry)]
            except (FileNotFoundError, NotADirectoryError):
                return
        for name in sorted(names):
            yield f"{folder}/{name}"

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with _errors(key), suppress(FileNotFoundError):
                self._path(key).unlink()

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
        _make_folder(path.parent)
        temporary = path.parent / f"{_PRIVATE}{path.name}.{secrets.token_hex(8)}"
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
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
