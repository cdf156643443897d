"""Which BF16 values an AdamW step has changed, found from the parameters and the optimizer's state after it.

The bound on the rounding errors, and why nothing is missed, is derived in `spec/decisions/0010`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from deltafmt.kernels.intrinsics import LANES, float_of, nonzero, trailing_zeros

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint64]

P_BAND, Q_BAND = 4 * 2.0**-23, 8 * 2.0**-23
"""The guard band: shares of the parameter and of the update by which the value before may be off."""
_LEAST = 2.0**-146
_BLOCK = 1024
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
    changed, unsure = _mark(p, p.view(_I32), m, v, *quick, *exact, words)
    return int(changed), int(unsure)


@njit(nogil=True, cache=True, error_model="numpy")
def _mark(
    p: Any, bits: Any, m: Any, v: Any, reach: Any, slip: Any, least: Any,
    size: Any, root: Any, eps: Any, decay: Any, words: Any,
) -> Any:  # fmt: skip
    flag = np.zeros(_BLOCK, np.uint8)
    place = np.empty(_BLOCK, np.int64)
    some_p, some_m, some_v = (
        np.empty(_BLOCK, np.float32),
        np.empty(_BLOCK, np.float32),
        np.empty(_BLOCK, np.float32),
    )
    low, high = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
    sure, marked = np.empty(_BLOCK, np.uint8), np.empty(_BLOCK, np.uint8)
    changed = unsure = 0
    for first in range(0, p.size, _BLOCK):
        stop = min(first + _BLOCK, p.size)
        flag[stop - first :] = 0
        _near(bits[first:stop], m[first:stop], v[first:stop], reach, slip, least, flag)
        count = 0
        for lane in range(0, stop - first, LANES):
            rest = nonzero(flag, lane)
            while rest:
                place[count] = lane + np.int64(trailing_zeros(rest))
                rest &= rest - _ONE
                count += 1
        for k in range(count):
            at = first + place[k]
            some_p[k], some_m[k], some_v[k] = p[at], m[at], v[at]
        _compare(some_p[:count], some_m, some_v, size, root, eps, decay, low, high, sure, marked)
        for k in range(count):
            at = np.uint64(first + place[k])
            words[at >> np.uint64(6)] |= np.uint64(marked[k]) << (at & np.uint64(63))
            changed += sure[k]
            unsure += marked[k] - sure[k]
    return changed, unsure


@njit(nogil=True, cache=True, error_model="numpy")
def _near(bits: Any, m: Any, v: Any, reach: Any, slip: Any, least: Any, flag: Any) -> None:
    """Flag what may have come over a border between BF16 values, by a bound without division and root.

    Not flagged is only what stays: reach |m| / sqrt(v + least) + slip |p| < the way to the nearest border.
    """
    for k in range(bits.size):
        power = float_of(_I32(bits[k] & _I32(0x7F800000)))
        size = float_of(_I32(bits[k] & _I32(0x7FFFFFFF)))
        inside = _I32(bits[k] & _I32(0xFFFF))
        above, below = _I32(abs(_I32(inside - _I32(0x8000)))), _I32(inside + _I32(0x4000))
        nearest = min(above, below)
        way = _F32(nearest) * (power * _F32(2.0**-23)) - slip * size - _F32(2.0**-140)
        # What is infinite or NaN compares as false, and is flagged.
        way = way if way > _F32(0) else _F32(0)  # noqa: FURB136 (no NaN either)
        far = reach * m[k]
        flag[k] = not (far * far + _F32(2.0**-140) < way * (way * (v[k] + least)))


@njit(nogil=True, cache=True, error_model="numpy")
def _compare(
    p: Any, m: Any, v: Any, size: Any, root: Any, eps: Any, decay: Any,
    low: Any, high: Any, sure: Any, marked: Any,
) -> None:  # fmt: skip
    """Flags of what has certainly changed, and of what may have; `low` and `high` are scratch."""
    p_band, q_band, least = _F32(P_BAND), _F32(Q_BAND), _F32(_LEAST)
    for k in range(p.size):
        update = size * (m[k] / (np.sqrt(v[k]) * root + eps))
        before = (p[k] + update) * decay
        largest = max(abs(p[k]), abs(before))
        band = p_band * largest + q_band * abs(update) + least
        low[k] = before - band
        high[k] = before + band
    bits, moment = p.view(np.uint32), m.view(np.uint32)
    lows, highs = low.view(np.uint32), high.view(np.uint32)
    for k in range(p.size):
        now, below, above = _rounded(bits[k]), _rounded(lows[k]), _rounded(highs[k])
        finite = _finite(bits[k]) & _finite(lows[k]) & _finite(highs[k])
        # A zero that a moment of exactly zero has left alone was that zero.
        moved = ((bits[k] & np.uint32(0x7FFFFFFF)) | moment[k]) != 0
        marked[k] = (((now != below) | (now != above)) & moved) | (not finite)
        sure[k] = (now != below) & (below == above) & moved & finite


@njit(nogil=True, cache=True, inline="always")
def _rounded(bits: Any) -> Any:
    """The BF16 bits that FP32 bits are rounded to, to nearest, ties to even; not for NaN."""
    return np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@njit(nogil=True, cache=True, inline="always")
def _finite(bits: Any) -> Any:
    return (bits & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
