"""Which elements of two equally long runs differ, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from deltafmt.kernels.intrinsics import LANES, differs, ones, prefetch, trailing_zeros, width_of

Bits = npt.NDArray[Any]
Positions = npt.NDArray[np.uint32]

_U64 = np.uint64
_ONE, _TWO = np.uint64(1), np.uint64(2)
_TOP = np.uint64(1 << 63)
_ROOM_BYTES = 4 << 20
_BLOCK = 1 << 14
"""Elements compared between two looks at the room that is left."""
_AHEAD_BYTES = 8 << 10
"""How far ahead of the comparison both runs are fetched into the cache."""
_LINE_BYTES = 64


class DiffScratch:
    """Positions, old bits and new bits of what differs: reusable buffers of one thread."""

    def __init__(self) -> None:
        self._buffers: dict[np.dtype[Any], tuple[Positions, Bits, Bits]] = {}

    def buffers(self, dtype: np.dtype[Any], room: int = 0) -> tuple[Positions, Bits, Bits]:
        """Buffers for at least `room` changes; those of some megabytes where that is less."""
        size = max(room, _ROOM_BYTES // (4 + 2 * dtype.itemsize)) + _BLOCK + LANES
        if dtype not in self._buffers or len(self._buffers[dtype][0]) < size:
            self._buffers[dtype] = (np.empty(size, np.uint32), np.empty(size, dtype), np.empty(size, dtype))
        return self._buffers[dtype]


def find(
    old: Bits, new: Bits, low: int, first: int, into: tuple[Positions, Bits, Bits], count: int
) -> tuple[int, int]:
    """Look for differences from element `low` on, to the end or until the buffers are full.

    `old` and `new` are contiguous unsigned arrays of one type and length; position `first` belongs to their
    first element. What is found is put into the buffers behind the `count` that they hold. Returns the
    element from which to go on, and the new count. A buffer that holds nothing is never full.
    """
    position, before, after = into
    low, count = _find(old, new, low, first, position, before, after, count)
    return int(low), int(count)


def diff(old: Bits, new: Bits, first: int, scratch: DiffScratch) -> list[tuple[Positions, Bits, Bits]]:
    """Positions, old bits and new bits of what differs, piece by piece, in ascending order.

    The pieces own their memory.
    """
    buffers = scratch.buffers(old.dtype)
    position, before, after = buffers
    pieces, low = [], 0
    while low < len(old):
        low, count = find(old, new, low, first, buffers, 0)
        if count:
            pieces.append((position[:count].copy(), before[:count].copy(), after[:count].copy()))
    return pieces


@njit(nogil=True, cache=True)
def _find(
    old: Any, new: Any, low: int, first: int, position: Any, before: Any, after: Any, count: int
) -> Any:
    total = _U64(count)
    most = _U64(position.size - _BLOCK - LANES)
    while low < old.size and total <= most:
        a, b = old[low : low + _BLOCK], new[low : low + _BLOCK]
        total = _find_block(a, b, _U64(first + low), position, before, after, total)
        low += a.size
    return low, total


@njit(nogil=True, cache=True)
def _find_block(old: Any, new: Any, first: Any, position: Any, before: Any, after: Any, total: Any) -> Any:
    vectors = old.size // LANES
    ahead, line = _AHEAD_BYTES // width_of(old), _LINE_BYTES // width_of(old)
    for v in range(vectors):
        for k in range(width_of(old)):
            prefetch(old, v * LANES + ahead + k * line)
            prefetch(new, v * LANES + ahead + k * line)
        mask = differs(old, new, v * LANES)
        start = _U64(v * LANES)
        # Two are taken whatever the mask says: at the densities of training that spares a branch that no
        # processor can predict. What is too much is overwritten by the next vector.
        rest = mask
        for k in range(2):
            i = start + trailing_zeros(rest | _TOP)
            at = total + _U64(k)
            position[at] = first + i
            before[at] = old[i]
            after[at] = new[i]
            rest &= rest - _ONE
        at = total + _TWO
        while rest:
            i = start + trailing_zeros(rest)
            position[at] = first + i
            before[at] = old[i]
            after[at] = new[i]
            rest &= rest - _ONE
            at += _ONE
        total += ones(mask)
    for k in range(vectors * LANES, old.size):
        if old[k] != new[k]:
            position[total] = first + _U64(k)
            before[total] = old[k]
            after[total] = new[k]
            total += _ONE
    return total
