"""A version as an ordinary checkpoint folder: safetensors shards, index, side files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from deltafmt.errors import ChecksumError, StoreError
from deltafmt.format import keys
from deltafmt.format.checksum import blake2b
from deltafmt.format.records import Manifest
from deltafmt.safetensors_file import FileLayout, split_files
from deltafmt.schema import Schema
from deltafmt.store import Store
from deltafmt.tensors import numpy_bits

INDEX = "model.safetensors.index.json"
FILE_BYTES = 5_000_000_000
"""Size from which on a checkpoint is cut into several files."""

ReadNames = Callable[[list[str]], Iterator[tuple[str, torch.Tensor]]]


def export_version(
    store: Store,
    manifest: Manifest,
    schema: Schema,
    read: ReadNames,
    directory: str | Path,
    *,
    file_bytes: int = FILE_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Write the checkpoint into a new or empty folder; returns the files written.

    Tied tensors are written under each of their names, so that any loader finds them. Raises `StoreError`
    if the folder has something in it or cannot be written; what was written by then is removed.
    """
    folder = Path(directory)
    files = split_files(list(schema), file_bytes=file_bytes)
    total = sum(file.nbytes for file in files)
    names = _file_names(len(files))
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise StoreError(
                "folder is not empty; export into a new one", kind="export-exists", where=str(folder)
            )
        done = 0
        for name, file in zip(names, files, strict=True):
            written.append(folder / name)
            for size in _write_file(folder / name, file, read):
                done += size
                if progress is not None:
                    progress(done, total)
        written.append(folder / INDEX)
        written[-1].write_text(_index(names, files))
        for name, (digest, _) in manifest.files.items():
            written.append(folder / keys.check_name(name, where="side file"))
            _write_side_file(written[-1], read_side_file(store, digest))
    except BaseException as error:
        for path in written:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise StoreError(
                f"cannot write ({error.strerror})", kind="store-failed", where=str(folder)
            ) from error
        raise
    return written


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{k + 1:05d}-of-{count:05d}.safetensors" for k in range(count)]


def _write_file(path: Path, file: FileLayout, read: ReadNames) -> Iterator[int]:
    with path.open("xb") as out:
        out.write(file.head)
        yield len(file.head)
        # Tensors arrive in the asked order, which is that of the file's bytes.
        for _, tensor in read([spec.name for spec in file.tensors]):
            if tensor.numel():
                out.write(numpy_bits(tensor).reshape(-1).data)
            yield tensor.numel() * tensor.element_size()


def _index(names: list[str], files: list[FileLayout]) -> str:
    weights = {spec.name: name for name, file in zip(names, files, strict=True) for spec in file.tensors}
    size = sum(spec.nbytes for file in files for spec in file.tensors)
    return json.dumps({"metadata": {"total_size": size}, "weight_map": weights}, indent=2) + "\n"


def _write_side_file(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as out:
        out.write(data)


def read_side_file(store: Store, digest: bytes) -> bytes:
    """A side file's bytes; `ChecksumError` if they differ from their name."""
    key = keys.file_key(digest)
    data = store.read(key)
    if blake2b(data) != digest:
        raise ChecksumError("side file differs from its name", kind="digest-mismatch", where=key)
    return data


def side_files(store: Store, files: Mapping[str, tuple[bytes, int]]) -> dict[str, bytes]:
    """All side files of a manifest."""
    return {name: read_side_file(store, digest) for name, (digest, _) in files.items()}
