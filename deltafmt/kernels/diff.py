"""Which elements of two equally long runs differ, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from deltafmt.kernels.intrinsics import LANES, differs, ones, trailing_zeros

Bits = npt.NDArray[Any]

_U64 = np.uint64
_PIECE = 1 << 22
"""Elements compared per call; the scratch is that long."""
_BLOCK = 1 << 14
"""Elements compared before their positions are taken, small enough to stay in cache."""


class DiffScratch:
    """Reusable buffers of one thread for `diff`."""

    def __init__(self) -> None:
        self._buffers: dict[np.dtype[Any], tuple[npt.NDArray[np.uint32], Bits, Bits]] = {}

    def buffers(self, dtype: np.dtype[Any]) -> tuple[npt.NDArray[np.uint32], Bits, Bits]:
        if dtype not in self._buffers:
            self._buffers[dtype] = (
                np.empty(_PIECE + LANES, np.uint32),
                np.empty(_PIECE, dtype),
                np.empty(_PIECE, dtype),
            )
        return self._buffers[dtype]


def diff(
    old: Bits, new: Bits, first: int, scratch: DiffScratch
) -> list[tuple[npt.NDArray[np.uint32], Bits, Bits]]:
    """Positions, old bits and new bits of what differs, piece by piece, in ascending order.

    `old` and `new` are contiguous unsigned arrays of one type and length; position `first` belongs to their
    first element. The pieces own their memory.
    """
    position, before, after = scratch.buffers(old.dtype)
    pieces = []
    for low in range(0, len(old), _PIECE):
        a, b = old[low : low + _PIECE], new[low : low + _PIECE]
        count = _diff(a, b, first + low, position, before, after)
        if count:
            pieces.append((position[:count].copy(), before[:count].copy(), after[:count].copy()))
    return pieces


@njit(nogil=True, cache=True)
def _diff(old: Any, new: Any, first: int, position: Any, before: Any, after: Any) -> Any:
    masks = np.empty(_BLOCK // LANES, np.uint64)
    total = _U64(0)
    for low in range(0, old.size, _BLOCK):
        a, b = old[low : low + _BLOCK], new[low : low + _BLOCK]
        # Three loops over one block in cache: compares without branches, then positions, then gathers.
        _compare(a, b, masks)
        count = _positions(masks, (a.size + LANES - 1) // LANES, _U64(first + low), position[total:])
        here = position[total : total + count]
        origin = np.uint32(first + low)
        old_out, new_out = before[total : total + count], after[total : total + count]
        for k in range(here.size):
            at = _U64(here[k] - origin)
            old_out[k] = a[at]
            new_out[k] = b[at]
        total += count
    return total


@njit(nogil=True, cache=True)
def _compare(old: Any, new: Any, masks: Any) -> None:
    vectors = old.size // LANES
    for v in range(vectors):
        masks[v] = differs(old, new, v * LANES)
    if vectors * LANES < old.size:
        mask = _U64(0)
        for k in range(vectors * LANES, old.size):
            mask |= _U64(old[k] != new[k]) << _U64(k - vectors * LANES)
        masks[vectors] = mask


@njit(nogil=True, cache=True)
def _positions(masks: Any, vectors: int, first: Any, position: Any) -> Any:
    """Positions of set bits; `position` has room for 64 more than there are."""
    count = _U64(0)
    one = _U64(1)
    for v in range(vectors):
        mask = masks[v]
        set_bits = ones(mask)
        origin = first + _U64(v * LANES)
        # Two are written whatever the mask says: at the densities of training that spares a branch that
        # no processor can predict. What is too much is overwritten by the next vector.
        rest = mask
        position[count] = origin + trailing_zeros(rest)
        rest &= rest - one
        position[count + one] = origin + trailing_zeros(rest)
        if set_bits > _U64(2):
            at = count + _U64(2)
            rest &= rest - one
            while rest:
                position[at] = origin + trailing_zeros(rest)
                rest &= rest - one
                at += one
        count += set_bits
    return count
