"""The rules of a column table over whole arrays: what `chunk.check_columns` says chunk by chunk, all at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deltafmt.errors import FormatError
from deltafmt.format.constants import (
    BLOCK,
    CODE,
    DENSE,
    ESCAPE,
    GAP,
    LOW,
    MAGNITUDE,
    PLANE,
    RAW,
    SET,
    STEP,
    WIDTHS,
    ZSTD,
)
from deltafmt.format.records import ChunkTable, ColumnTable
from deltafmt.tiling import Tiling

Ints = npt.NDArray[np.int64]

_BOUNDED = (GAP, LOW, BLOCK, CODE, MAGNITUDE, ESCAPE)
_ROW = np.full(256, len(_BOUNDED), np.int64)
_ROW[list(_BOUNDED)] = range(len(_BOUNDED))
_ALLOWED = np.zeros((DENSE + 1, 256), bool)
"""Which columns (by id) each operation has, of the widest elements."""
_ALLOWED[SET, [GAP, LOW, BLOCK]] = True
_ALLOWED[STEP, [GAP, LOW, BLOCK, CODE, MAGNITUDE, ESCAPE]] = True
_ALLOWED[[SET, DENSE], PLANE : PLANE + max(WIDTHS)] = True


def check_column_table(chunks: ChunkTable, columns: ColumnTable, *, where: object) -> None:
    """Column rows belong to chunks, one and all, and hold possible values whatever the domain."""
    if int(chunks.columns.sum(dtype=np.int64)) != len(columns):
        raise FormatError("chunks and columns disagree", kind="column-count", where=where)
    _refuse(chunks.columns == 0, "chunk without columns", "column-count", where)
    _refuse((columns.codec != RAW) & (columns.codec != ZSTD), "unknown codec", "codec-unknown", where)
    stored, raw = columns.stored, columns.raw
    _refuse((stored == 0) | (raw == 0), "empty column", "column-length", where)
    _refuse((stored >= 2**48) | (raw >= 2**40), "column is too large", "column-length", where)
    _refuse((columns.codec == RAW) & (stored != raw), "raw column of another length", "column-length", where)
    # What is fetched stays near what it decodes to, whatever a manifest claims.
    _refuse(stored > raw + raw // 256 + 1024, "more is stored than decoded", "column-length", where)


def check_columns_fit(chunks: ChunkTable, columns: ColumnTable, tiling: Tiling, *, where: object) -> None:
    """Each chunk has the columns of its operation, at lengths that its domain and blocks allow.

    `chunks` must have passed the rules of the chunk table, and both `check_column_table`.
    """
    chunk = np.repeat(np.arange(len(chunks)), chunks.columns)
    column = columns.column.astype(np.int64)
    unordered = (np.diff(column) <= 0) & (np.diff(chunk) == 0)
    _refuse(unordered, "columns are not in order", "column-order", where)
    allowed = _ALLOWED[chunks.operation[chunk], columns.column] & (
        column < PLANE + chunks.width[chunk].astype(np.int64)
    )
    _refuse(~allowed, "column does not belong to the operation", "column-unexpected", where)
    optional = np.bincount(chunk[(column == MAGNITUDE) | (column == ESCAPE)], minlength=len(chunks))
    complete = chunks.columns.astype(np.int64) - optional == _required(chunks)
    _refuse(~complete, "column is missing, or should be", "column-length", where)
    least, most = _limits(column, chunk, chunks, tiling)
    raw = columns.raw.astype(np.int64)
    _refuse((raw < least) | (raw > most), "column has an impossible length", "column-length", where)
    escapes = np.flatnonzero(column == ESCAPE)
    odd = raw[escapes] % chunks.width[chunk[escapes]] != 0
    _refuse(odd, "escapes are not a whole number", "column-length", where)


def count_blocks_of(chunks: ChunkTable, tiling: Tiling) -> Ints:
    """Blocks that each chunk's domain is cut into; 0 for dense."""
    blocks = np.zeros(len(chunks), np.int64)
    sparse = chunks.operation != DENSE
    for log2 in np.flatnonzero(np.bincount(chunks.block[sparse])).tolist():
        # Negated twice, so that the shift rounds up.
        of_boxes = -(-tiling.box_volume >> log2)
        rows = sparse & (chunks.block == log2)
        blocks[rows] = np.add.reduceat(of_boxes, tiling.domain_box[:-1])[chunks.domain[rows]]
    return blocks


def _required(chunks: ChunkTable) -> Ints:
    """How many columns each chunk has at least."""
    width, shifted = chunks.width.astype(np.int64), (chunks.shift > 0).astype(np.int64)
    counts = [width, 2 + shifted + width, 3 + shifted]
    return np.select([chunks.operation == operation for operation in (DENSE, SET, STEP)], counts)


def _limits(column: Ints, chunk: Ints, chunks: ChunkTable, tiling: Tiling) -> tuple[Ints, Ints]:
    """(least, most) raw bytes of every column row."""
    n, shift = chunks.listed.astype(np.int64), chunks.shift.astype(np.int64)
    entries = n + (tiling.volume[chunks.domain] >> shift) // 255 + 1
    packed, codes = (n * shift + 7) // 8, (2 * n + 7) // 8
    blocks, escapes = 16 * count_blocks_of(chunks, tiling), n * chunks.width
    one = np.ones_like(n)
    # One row for each of `_BOUNDED`, and the last one for byte planes.
    least = np.stack((n, packed, blocks, codes, one, one, n))
    most = np.stack((entries, packed, blocks, codes, n, escapes, n))
    at = _ROW[column] * len(n) + chunk
    return least.reshape(-1)[at], most.reshape(-1)[at]


def _refuse(bad: npt.NDArray[Any], message: str, kind: str, where: object) -> None:
    if bad.any():
        raise FormatError(message, kind=kind, where=f"{where}, row {int(bad.argmax())}")
