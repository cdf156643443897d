"""Safetensors files as the format's own notes describe them: header, then tensors without holes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from deltafmt.dtypes import dtype_of
from deltafmt.schema import TensorSpec

MAX_HEADER_BYTES = 100_000_000
"""The largest header that the safetensors library opens."""
_METADATA = {"format": "pt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """One file: its head (length and JSON), and its tensors in the order of their bytes."""

    head: bytes
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return len(self.head) + sum(spec.nbytes for spec in self.tensors)


def file_layout(specs: Sequence[TensorSpec]) -> FileLayout:
    """The layout of a file with these tensors.

    Wider elements come first, so that every tensor is aligned to its element width; the head is padded by
    spaces to a multiple of 8 bytes.
    """
    ordered = sorted(specs, key=lambda spec: -spec.width)
    entries: dict[str, object] = {"__metadata__": _METADATA}
    offset = 0
    for spec in ordered:
        entries[spec.name] = {
            "dtype": dtype_of(spec.dtype).safetensors,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return FileLayout(head=len(text).to_bytes(8, "little") + text, tensors=tuple(ordered))


def split_files(specs: Sequence[TensorSpec], *, file_bytes: int) -> list[FileLayout]:
    """Tensors in order, cut into files of about `file_bytes` and of headers that can be opened."""
    groups: list[list[TensorSpec]] = [[]]
    data = head = 0
    for spec in specs:
        # Upper bound of an entry: every character of the name may be escaped, numbers have 20 digits.
        entry = 6 * len(spec.name.encode()) + 22 * len(spec.shape) + 128
        if groups[-1] and (data + spec.nbytes > file_bytes or head + entry > MAX_HEADER_BYTES - 256):
            groups.append([])
            data = head = 0
        groups[-1].append(spec)
        data += spec.nbytes
        head += entry
    return [file_layout(group) for group in groups]
