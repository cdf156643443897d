"""Which boxes may meet: boxes of a schema's tensors as intervals on one axis, and pairs of intervals that overlap."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_PAIRS = 1 << 19


def row_major_strides(shapes: Ints) -> Ints:
    """Strides in elements of C-ordered arrays of the given shapes (one per row)."""
    tail = np.cumprod(shapes[:, ::-1], axis=1)[:, ::-1]
    return np.concatenate((tail[:, 1:], np.ones((len(shapes), 1), np.int64)), axis=1)


def spans(shapes: Ints, tensor: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """(first, last) of each non-empty box on an axis that numbers all elements, tensor after tensor.

    Boxes that share an element overlap there; the converse does not hold. `shapes` are those of all
    tensors. Where they have 2^62 elements or more together, the axis counts in coarser steps.
    """
    volumes = shapes.prod(axis=1)
    shift = max(0, int(volumes.astype(np.float64).sum()).bit_length() - 61)
    base = np.concatenate(([0], np.cumsum((volumes >> shift) + 1)))[:-1][tensor]
    strides = row_major_strides(shapes)[tensor]
    first = (start * strides).sum(axis=1) >> shift
    last = ((stop - 1) * strides).sum(axis=1) >> shift
    return base + first, base + last


def meetings(first: Ints, last: Ints, other_first: Ints, other_last: Ints) -> Iterator[tuple[Ints, Ints]]:
    """All (row, other row) whose intervals overlap, and some more; in order, in parts of bounded size.

    `other_first` must ascend.
    """
    low = np.searchsorted(np.maximum.accumulate(other_last), first)
    high = np.searchsorted(other_first, last, side="right")
    return _expanded(low, np.maximum(high - low, 0))


def self_meetings(first: Ints, last: Ints) -> tuple[int, Iterator[tuple[Ints, Ints]]]:
    """(number, pairs) of rows i < j whose intervals overlap; `first` must ascend."""
    low = np.arange(1, len(first) + 1)
    count = np.searchsorted(first, last, side="right") - low
    return int(count.sum()), _expanded(low, count)


def expanded(low: Ints, count: Ints) -> tuple[Ints, Ints]:
    """(row, low[row] + k) for every row and every k below its count."""
    row = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    return row, low[row] + within


def _expanded(low: Ints, count: Ints) -> Iterator[tuple[Ints, Ints]]:
    total = np.cumsum(count)
    at = 0
    while at < len(count):
        done = int(total[at - 1]) if at else 0
        end = max(at + 1, int(np.searchsorted(total, done + _PAIRS, side="right")))
        row, other = expanded(low[at:end], count[at:end])
        yield row + at, other
        at = end
