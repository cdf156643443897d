"""What differs between two versions, element by element, as Arrow record batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from deltafmt.kernels.diff import DiffScratch, diff
from deltafmt.tensors import numpy_bits

CHANGES = pa.schema(
    [
        pa.field("tensor", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("index", pa.uint64(), nullable=False),
        pa.field("old", pa.uint64()),
        pa.field("new", pa.uint64(), nullable=False),
    ],
    metadata={
        "old": "bit pattern, zero-extended; null where the older version lacks the element",
        "new": "bit pattern",
    },
)
"""Columns of `Lineage.changes`: name, flat canonical index, old and new bit pattern."""

BATCH_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class NameColumn:
    """The dictionary of the `tensor` column, made once, and where each name stands in it."""

    dictionary: pa.Array
    rows: dict[str, int]


def name_column(names: Sequence[str]) -> NameColumn:
    """The dictionary of these tensors."""
    return NameColumn(pa.array(names, pa.string()), {name: row for row, name in enumerate(names)})


def tensor_changes(
    names: NameColumn, name: str, old: torch.Tensor | None, new: torch.Tensor
) -> Iterator[pa.RecordBatch]:
    """Batches for one tensor (contiguous, both on the CPU); `old` None means that every element is new."""
    dictionary, row = names.dictionary, names.rows[name]
    after = numpy_bits(new).reshape(-1)
    if old is None:
        for low in range(0, len(after), BATCH_ROWS):
            bits = after[low : low + BATCH_ROWS]
            yield _batch(dictionary, row, np.arange(low, low + len(bits), dtype=np.uint64), None, bits)
        return
    before = numpy_bits(old).reshape(-1)
    step = 1 << 30
    for first in range(0, len(after), step):
        # Positions have 32 bits; the flat index is put together again here.
        for positions, was, now in diff(
            before[first : first + step], after[first : first + step], 0, DiffScratch()
        ):
            index = positions.astype(np.uint64) + np.uint64(first)
            for low in range(0, len(index), BATCH_ROWS):
                rows = slice(low, low + BATCH_ROWS)
                yield _batch(dictionary, row, index[rows], was[rows], now[rows])


def _batch(
    dictionary: pa.Array, row: int, index: np.ndarray, old: np.ndarray | None, new: np.ndarray
) -> pa.RecordBatch:
    tensor = pa.DictionaryArray.from_arrays(np.full(len(index), row, np.int32), dictionary)
    before = pa.nulls(len(index), pa.uint64()) if old is None else pa.array(old.astype(np.uint64))
    return pa.RecordBatch.from_arrays(
        [tensor, pa.array(index), before, pa.array(new.astype(np.uint64))], schema=CHANGES
    )
