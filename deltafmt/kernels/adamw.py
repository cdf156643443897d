"""Which BF16 values an AdamW step has changed, found from the parameters and the optimizer's state after it.

The bound on the rounding errors, and why nothing is missed, is derived in `spec/decisions/0010`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from deltafmt.kernels.cast import rounded
from deltafmt.kernels.intrinsics import LANES, float_of, nonzero, prefetch, trailing_zeros

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint64]

P_BAND, Q_BAND = 4 * 2.0**-23, 8 * 2.0**-23
"""The guard band: shares of the parameter and of the update by which the value before may be off."""
_LEAST = 2.0**-146
_BLOCK = 2048
_PAGE = 1024
"""Elements of 4 KiB."""
_MARGIN = 1.001
"""For roundings of the quick bound itself."""
_I32, _F32 = np.int32, np.float32
_ONE = np.uint64(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one optimizer step did to one parameter: the scalars that it used.

    `lr` and `weight_decay` (0 unless decoupled from the gradient) as they were in the step, `correction1` and
    `correction2` the bias corrections 1 - beta^step. `lr * weight_decay` is at most 1/4.
    """

    lr: float
    correction1: float
    correction2: float
    eps: float
    weight_decay: float

    @property
    def size(self) -> float:
        """Step size: lr / bias correction 1."""
        return self.lr / self.correction1

    @property
    def root(self) -> float:
        """1 / sqrt(bias correction 2)."""
        return float(self.correction2**-0.5)

    @property
    def decay(self) -> float:
        """1 / decay factor."""
        return 1 / (1 - self.lr * self.weight_decay)


def mark(p: Floats, m: Floats, v: Floats, step: Step, words: Words) -> tuple[int, int]:
    """Mark what a step changed in `p` as BF16; `m` and `v` are the moments that the update used.

    All are contiguous and equally long. Bit `i` of `words` stands for element `i`; bits are only ever set.
    Returns (elements that have certainly changed, elements marked to be safe).
    """
    size, root, decay = step.size, step.root, step.decay
    # The update is size * m / (sqrt(v) * root + eps), at most size / root * m / sqrt(v + (eps / root)^2).
    reach = abs(size) / root * (decay * (1 + P_BAND) + Q_BAND) * _MARGIN
    slip = (abs(decay - 1) + P_BAND * decay) * _MARGIN
    quick = _F32(reach), _F32(slip), _F32((step.eps / root) ** 2 / _MARGIN)
    exact = _F32(size), _F32(root), _F32(step.eps), _F32(decay)
    changed, safe = _mark(p, p.view(_I32), m, v, *quick, *exact, words)
    return int(changed), int(safe)


@njit(nogil=True, cache=True, error_model="numpy")
def _mark(
    p: Any, bits: Any, m: Any, v: Any, reach: Any, slip: Any, least: Any,
    size: Any, root: Any, eps: Any, decay: Any, words: Any,
) -> Any:  # fmt: skip
    flag = np.zeros(_BLOCK, np.uint8)
    place = np.empty(_BLOCK, np.int64)
    # Whole vectors of these are computed on: what lies behind the last flagged element is never used.
    some_p, some_m, some_v = (
        np.zeros(_BLOCK, np.float32),
        np.zeros(_BLOCK, np.float32),
        np.zeros(_BLOCK, np.float32),
    )
    some_bits, moments = some_p.view(_I32), some_m.view(_I32)
    sure, marked = np.empty(_BLOCK, np.uint8), np.empty(_BLOCK, np.uint8)
    changed = total = np.int64(0)
    for first in range(0, p.size, _BLOCK):
        stop = min(first + _BLOCK, p.size)
        flag[stop - first :] = 0
        _near(p[first:stop], bits[first:stop], m[first:stop], v[first:stop], reach, slip, least, flag)
        count = 0
        for lane in range(0, stop - first, LANES):
            rest = nonzero(flag, lane)
            while rest:
                at = lane + np.int64(trailing_zeros(rest))
                rest &= rest - _ONE
                place[count] = at
                some_p[count], some_m[count], some_v[count] = p[first + at], m[first + at], v[first + at]
                count += 1
        for page in range(first + _BLOCK, first + 2 * _BLOCK, _PAGE):
            # What fetches ahead stops at the end of a page.
            prefetch(p, page)
            prefetch(m, page)
            prefetch(v, page)
        whole = (count + 7) & ~7
        _compare(some_p[:whole], some_bits, some_m, moments, some_v, size, root, eps, decay, sure, marked)
        for k in range(count):
            flag[place[k]] = marked[k]
            changed += sure[k]
            total += marked[k]
        for lane in range(0, stop - first, LANES):
            words[(first + lane) // LANES] |= nonzero(flag, lane)
    return changed, total - changed


@njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _near(p: Any, bits: Any, m: Any, v: Any, reach: Any, slip: Any, least: Any, flag: Any) -> None:
    """Flag what may have come over a border between BF16 values, by a bound without division and root.

    Not flagged is only what stays: reach |m| / sqrt(v + least) + slip |p| < the way to the nearest border.
    That is the border between the two BF16 values around p, and at least a quarter of their distance any other.
    """
    for k in range(bits.size):
        border = float_of(_I32(_I32(bits[k] & _I32(-0x10000)) | _I32(0x8000)))
        size = abs(p[k])
        way = abs(p[k] - border) - slip * size
        # A way that is NaN stays: `min` leaves its first argument unless the second is less.
        way = min(way, size * (_F32(2.0**-10) - slip))
        far = reach * m[k]
        # What is infinite, NaN, or has no way left, compares as false; 2^-140 is for underflow of the squares.
        flag[k] = not (far * far + _F32(2.0**-140) < way * (abs(way) * (v[k] + least)))


@njit(nogil=True, cache=True, error_model="numpy")
def _compare(
    p: Any, bits: Any, m: Any, moments: Any, v: Any, size: Any, root: Any, eps: Any, decay: Any,
    sure: Any, marked: Any,
) -> None:  # fmt: skip
    """Flags of what has certainly changed, and of what may have, by the borders of p's BF16 value."""
    p_band, q_band, least = _F32(P_BAND), _F32(Q_BAND), _F32(_LEAST)
    for k in range(p.size):
        update = size * (m[k] / (np.sqrt(v[k]) * root + eps))
        before = (p[k] + update) * decay
        now, then = abs(p[k]), abs(before)
        band = p_band * max(then, now) + q_band * abs(update) + least
        magnitude = _I32(bits[k] & _I32(0x7FFFFFFF))
        # The borders of zero and of infinity are NaN, which compares as false.
        value = rounded(magnitude) & _I32(-0x10000)
        inner, outer = float_of(_I32(value - _I32(0x8000))), float_of(_I32(value + _I32(0x8000)))
        along = before if bits[k] >= 0 else -before
        low, high = along - band, along + band
        # A zero that a moment of exactly zero has left alone was that zero.
        moved = _I32(magnitude | moments[k]) != 0
        marked[k] = (not ((low > inner) & (high < outer))) & moved
        sure[k] = ((high < inner) | (low > outer)) & moved
