"""Columns of one chunk to stored buffers and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deltafmt.errors import ChecksumError, FormatError
from deltafmt.format.checksum import crc32c
from deltafmt.format.codec import compress, decompress
from deltafmt.format.constants import (
    BLOCK,
    CODE,
    COLUMNS,
    DENSE,
    ESCAPE,
    GAP,
    LOW,
    MAGNITUDE,
    PLANE,
    RAW,
    SET,
    STEP,
)

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkHead:
    """What the chunk table says of one chunk, shard and offset left out (see `records.ChunkTable`)."""

    domain: int
    operation: int
    order: int
    width: int
    shift: int
    block: int
    listed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedChunk:
    """A chunk ready to be stored.

    `columns` holds a row of the column table per buffer: (column id, codec, stored, raw, crc).
    """

    head: ChunkHead
    columns: tuple[tuple[int, int, int, int, int], ...]
    buffers: tuple[bytes, ...]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.buffers))


class ChunkPacker:
    """Compresses and checksums the columns of a chunk one by one, so that they need not all be there at once."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, int, int]] = []
        self._buffers: list[bytes] = []
        self.nbytes = 0

    def add(self, column: int, raw: Bytes) -> None:
        """Store the next column (ids ascend); an empty one is left out."""
        if len(raw) == 0:
            return
        # Low bits are the noise that the writer's shift has cut off: zstd would find nothing in them.
        codec, stored = (RAW, bytes(raw)) if column == LOW else compress(raw)
        self._rows.append((column, codec, len(stored), len(raw), crc32c(stored)))
        self._buffers.append(stored)
        self.nbytes += len(stored)

    def packed(self, head: ChunkHead) -> PackedChunk:
        return PackedChunk(head=head, columns=tuple(self._rows), buffers=tuple(self._buffers))


def pack_chunk(head: ChunkHead, columns: Mapping[int, Bytes]) -> PackedChunk:
    """Compress and checksum the columns (id -> raw bytes); empty ones are left out."""
    packer = ChunkPacker()
    for column in sorted(columns):
        packer.add(column, columns[column])
    return packer.packed(head)


class ColumnHead(NamedTuple):
    """One row of the column table; a tuple, since a way may have hundreds of thousands."""

    column: int
    codec: int
    stored: int
    raw: int
    crc: int


def unpack_chunk(
    head: ChunkHead,
    columns: tuple[ColumnHead, ...],
    data: memoryview,
    *,
    volume: int,
    blocks: int,
    where: object,
) -> dict[int, Bytes]:
    """Raw columns of a stored chunk: checksums first, then lengths, then decoding.

    `data` holds the chunk's stored columns back to back; `volume` is the domain's, `blocks` the number of
    blocks that its boxes are cut into. Nothing larger than these allow is allocated. Columns may alias
    `data`.
    """
    check_columns(head, columns, volume=volume, blocks=blocks, where=where)
    expected = sum(column.stored for column in columns)
    if len(data) != expected:
        raise FormatError("chunk is cut", kind="truncated", where=where, expected=expected, found=len(data))
    result, start = {}, 0
    for column in columns:
        stored = data[start : start + column.stored]
        start += column.stored
        place = f"{where}, column {COLUMNS[column.column]}"
        found = crc32c(stored)
        if found != column.crc:
            raise ChecksumError(
                "column does not match its CRC32C",
                kind="crc-mismatch",
                where=place,
                expected=f"{column.crc:08x}",
                found=f"{found:08x}",
            )
        result[column.column] = decompress(column.codec, stored, column.raw, where=place)
    return result


def check_columns(
    head: ChunkHead, columns: tuple[ColumnHead, ...], *, volume: int, blocks: int, where: object
) -> None:
    """Raise `FormatError` unless exactly the columns of the operation are there, with possible lengths."""
    limits = column_limits(head, volume=volume, blocks=blocks)
    found = {column.column: column.raw for column in columns}
    if len(found) != len(columns) or list(found) != sorted(found):
        raise FormatError("columns are not in order", kind="column-order", where=where)
    for column, (low, high) in limits.items():
        if not low <= found.get(column, 0) <= high:
            raise FormatError(
                "column has an impossible length",
                kind="column-length",
                where=f"{where}, column {COLUMNS[column]}",
                expected=f"{low} to {high} bytes",
                found=found.get(column, 0),
            )
    if head.operation == STEP and found.get(ESCAPE, 0) % head.width:
        raise FormatError("escapes are not a whole number", kind="column-length", where=where)
    if not found.keys() <= limits.keys():
        others = sorted(found.keys() - limits.keys())
        raise FormatError(
            "column does not belong to the operation",
            kind="column-unexpected",
            where=where,
            found=", ".join(str(COLUMNS.get(column, column)) for column in others),
        )


def column_limits(head: ChunkHead, *, volume: int, blocks: int) -> dict[int, tuple[int, int]]:
    """(least, most) raw bytes of each column that a chunk may have."""
    n, width = head.listed, head.width
    if head.operation == DENSE:
        return {PLANE + j: (n, n) for j in range(width)}
    # An entry of 255 goes on by at least one element times 2^shift, so entries are bounded by the volume.
    entries = n + (volume >> head.shift) // 255 + 1
    packed = (n * head.shift + 7) // 8
    positions = {GAP: (n, entries), LOW: (packed, packed), BLOCK: (16 * blocks, 16 * blocks)}
    if head.operation == SET:
        return positions | {PLANE + j: (n, n) for j in range(width)}
    assert head.operation == STEP
    codes = (2 * n + 7) // 8
    return positions | {CODE: (codes, codes), MAGNITUDE: (0, n), ESCAPE: (0, n * width)}
