"""Which elements of two equally long runs differ, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from deltafmt.kernels.intrinsics import LANES, differs, trailing_zeros

Bits = npt.NDArray[Any]

_U64 = np.uint64
_PIECE = 1 << 19


class DiffScratch:
    """Reusable buffers of one thread for `diff`."""

    def __init__(self) -> None:
        self._buffers: dict[np.dtype[Any], tuple[npt.NDArray[np.uint32], Bits, Bits]] = {}

    def buffers(self, dtype: np.dtype[Any]) -> tuple[npt.NDArray[np.uint32], Bits, Bits]:
        if dtype not in self._buffers:
            self._buffers[dtype] = (
                np.empty(_PIECE, np.uint32),
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
def _diff(old: Any, new: Any, first: int, position: Any, before: Any, after: Any) -> int:
    count = 0
    vectors = old.size // LANES
    for v in range(vectors):
        mask = differs(old, new, v * LANES)
        while mask != _U64(0):
            k = v * LANES + trailing_zeros(mask)
            mask &= mask - _U64(1)
            position[count] = first + k
            before[count] = old[k]
            after[count] = new[k]
            count += 1
    for k in range(vectors * LANES, old.size):
        if old[k] != new[k]:
            position[count] = first + k
            before[count] = old[k]
            after[count] = new[k]
            count += 1
    return count
