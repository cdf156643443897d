"""Composing changes of one domain without the base that they start from."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from deltafmt.kernels.positions import Positions

Bits = npt.NDArray[Any]


def compose(first: tuple[Positions, Bits], second: tuple[Positions, Bits]) -> tuple[Positions, Bits]:
    """The steps that do what two sets of steps do one after the other; steps that cancel drop out.

    Positions ascend strictly on both sides and in the result.
    """
    size = len(first[0]) + len(second[0])
    positions, steps = np.empty(size, np.uint32), np.empty(size, first[1].dtype)
    count = _merge(*first, *second, positions, steps)
    return positions[:count], steps[:count]


@njit(nogil=True, cache=True)
def _merge(pa: Any, da: Any, pb: Any, db: Any, positions: Any, steps: Any) -> int:
    i = j = count = 0
    while i < pa.size and j < pb.size:
        if pa[i] < pb[j]:
            positions[count], steps[count] = pa[i], da[i]
            i += 1
            count += 1
        elif pa[i] > pb[j]:
            positions[count], steps[count] = pb[j], db[j]
            j += 1
            count += 1
        else:
            positions[count] = pa[i]
            steps[count] = da[i] + db[j]
            count += steps[count] != 0
            i += 1
            j += 1
    while i < pa.size:
        positions[count], steps[count] = pa[i], da[i]
        i += 1
        count += 1
    while j < pb.size:
        positions[count], steps[count] = pb[j], db[j]
        j += 1
        count += 1
    return count


def overlay(first: tuple[Positions, Bits], second: tuple[Positions, Bits]) -> tuple[Positions, Bits]:
    """Set values, those of `second` where both set one."""
    kept = ~np.isin(first[0], second[0], assume_unique=True)
    positions = np.concatenate((first[0][kept], second[0]))
    order = np.argsort(positions, kind="stable")
    return positions[order], np.concatenate((first[1][kept], second[1]))[order]


def without(changes: tuple[Positions, Bits], positions: Positions) -> tuple[Positions, Bits]:
    """The changes at other positions than the given ones."""
    kept = ~np.isin(changes[0], positions, assume_unique=True)
    return changes[0][kept], changes[1][kept]
