"""Changes into the columns of a chunk, as they come, part by part."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from deltafmt.kernels.intrinsics import LANES, nonzero, trailing_zeros, width_of
from deltafmt.kernels.positions import (
    code_positions,
    gap_room,
    low_room,
    new_state,
    pack_counts,
)
from deltafmt.kernels.steps import between, sign_bit

Bits = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Positions = npt.NDArray[np.uint32]

_U64 = np.uint64
_ONE, _TWO, _ZERO = np.uint64(1), np.uint64(2), np.uint64(0)
_ESCAPE = np.uint64(255)
_BLOCK_VECTORS = 64
"""Vectors of changes that go through all loops together, so that they stay in cache."""


_SAMPLED, _IN_A_ROW = 2048, 64
"""Gaps that are looked at before a shift is chosen, so many next to each other."""
_FEW = 256
"""Gaps that tell too little of how gaps are distributed."""
_TABLE_BITS = 5.0
"""What a symbol takes in the table of a Huffman code, about."""
_GAIN = 0.003
"""Share that must be saved for a smaller shift, which is slower to decode."""


class Scratch:
    """Reusable arrays of one thread, by name; they grow and never shrink."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, Any], Bits] = {}

    def take(self, name: str, size: int, dtype: Any = np.uint8) -> Bits:
        """An array of at least `size` elements with any content; it is the same one at the next call."""
        array = self._arrays.get((name, dtype))
        if array is None or array.size < size:
            array = self._arrays[name, dtype] = np.empty(size, dtype)
        return array


class PositionCoder:
    """Codes positions that come in ascending order, in parts, into columns that lie in `scratch`.

    `starts` are the blocks' first positions and behind them the volume; at most `listed` positions may
    come, and exactly so many where there is a shift.
    """

    def __init__(self, starts: Ints, shift: int, *, listed: int, scratch: Scratch) -> None:
        self._starts, self._shift = starts, shift
        self._gap = scratch.take("gap", gap_room(starts, shift, listed))
        self._low = scratch.take("low", low_room(shift, listed))
        self._counts = np.zeros((4, len(starts) - 1), np.uint32)
        self._state, self._runs = new_state(starts)

    @property
    def listed(self) -> int:
        """Positions so far."""
        return int(self._state[1])

    def add(self, positions: Positions) -> Ints:
        """Code further positions; returns (block, how many of them) one behind another."""
        count = code_positions(
            positions, self._starts, self._shift, self._gap, self._low, self._counts, self._state, self._runs
        )
        return self._runs[:count]

    def columns(self) -> tuple[Bytes, Bytes, Bytes]:
        """Gaps, low bits and counts; valid until the scratch is used again."""
        return (
            self._gap[: int(self._state[0])],
            self._low[: (self.listed * self._shift + 7) // 8],
            pack_counts(*self._counts),
        )


class StepCoder:
    """Codes changes that come in ascending order, in parts; see `PositionCoder`."""

    def __init__(
        self, starts: Ints, shift: int, order: int, dtype: np.dtype[Any], *, listed: int, scratch: Scratch
    ) -> None:
        self._positions = PositionCoder(starts, shift, listed=listed, scratch=scratch)
        self._order, self._dtype, self._scratch = order, dtype, scratch
        # Room for one more, since writes come before the decision to keep.
        self._kind = scratch.take("kind", listed + 4)
        self._magnitude = scratch.take("magnitude", listed + 1)
        self._escape = scratch.take("escape", listed + 1, dtype)
        self._state = np.zeros(2, np.int64)

    @property
    def listed(self) -> int:
        """Changes so far."""
        return self._positions.listed

    @property
    def escapes(self) -> int:
        """Changes by more than 256 steps so far."""
        return int(self._state[1])

    def add(self, positions: Positions, old: Bits, new: Bits) -> None:
        """Code further changes."""
        first = self.listed
        runs = self._positions.add(positions)
        step = self._scratch.take("step", _BLOCK_VECTORS * LANES, self._dtype)
        size = self._scratch.take("size", _BLOCK_VECTORS * LANES, self._dtype)
        columns = (self._kind[first:], self._magnitude, self._escape)
        _steps(old, new, self._order, step, size, runs, *columns, self._positions._counts, self._state)

    def columns(self) -> tuple[Bytes, Bytes, Bytes, Bytes, Bytes, Bytes]:
        """Gaps, low bits, counts, codes, magnitudes and escapes; valid until the scratch is used again."""
        magnitudes, escapes = self._state.tolist()
        code = self._scratch.take("code", (self.listed + 3) // 4)[: (self.listed + 3) // 4]
        _pack_kinds(self._kind, self.listed, code)
        escape = self._escape[:escapes].view(np.uint8)
        return (*self._positions.columns(), code, self._magnitude[:magnitudes], escape)


@njit(nogil=True, cache=True)
def best_shift(positions: Any, largest: int) -> int:
    """The shift, `largest` at most, under which ascending positions take the fewest bits, about.

    Estimated from the entropy of a sample's entries. Where gaps are spread evenly, low bits are noise and
    `largest` is best; where changes stand in clusters, smaller ones are.
    """
    count = min(_SAMPLED, positions.size - 1)
    if count < _FEW:
        return largest
    best, least = largest, _entry_bits(positions, count, largest)
    for shift in range(largest - 1, -1, -1):
        bits = _entry_bits(positions, count, shift)
        if bits > least * (1 - _GAIN):
            break
        best, least = shift, bits
    return best


@njit(nogil=True, cache=True)
def _entry_bits(positions: Any, sampled: int, shift: int) -> float:
    """Bits that the gaps of so many positions, spread over all, take under a shift."""
    entries = np.zeros(256, np.int64)
    runs = (sampled + _IN_A_ROW - 1) // _IN_A_ROW
    gaps = 0
    for run in range(runs):
        first = run * (positions.size - 1) // runs
        stop = min(first + _IN_A_ROW, positions.size - 1)
        for k in range(first, stop):
            entry: Any = (np.int64(positions[k + 1]) - np.int64(positions[k]) - 1) >> shift
            entries[255] += entry // 255
            entries[entry % 255] += 1
        gaps += stop - first
    total = entries.sum()
    bits = float(gaps * shift)
    for count in entries:
        if count:
            bits += count * math.log2(total / count) + _TABLE_BITS
    return bits


@njit(nogil=True, cache=True)
def _steps(
    old: Any, new: Any, order: int, step: Any, size: Any, runs: Any,
    kind: Any, magnitude: Any, escape: Any, counts: Any, state: Any,
) -> None:  # fmt: skip
    m, e = _U64(state[0]), _U64(state[1])
    masks = np.empty(_BLOCK_VECTORS, np.uint64)
    first = 0
    for run in range(runs.shape[0]):
        block, stop = runs[run, 0], first + runs[run, 1]
        before_m, before_e = m, e
        for low in range(first, stop, _BLOCK_VECTORS * LANES):
            high = min(stop, low + _BLOCK_VECTORS * LANES)
            part = step[: high - low]
            between(old[low:high], new[low:high], order, part)
            _classify(part, kind[low:high], size[: high - low])
            m, e = _magnitudes(part, size[: high - low], masks, magnitude, m, escape, e)
        counts[2, block] += m - before_m
        counts[3, block] += e - before_e
        first = stop
    state[0], state[1] = m, e


@njit(nogil=True, cache=True)
def _classify(step: Any, kind: Any, size: Any) -> None:
    """Kind: bit 0 downwards, bit 1 by more than one. Size: how many more than one."""
    sign = sign_bit(width_of(step))
    mask = (sign - _ONE) | sign
    # Two loops, each of which the compiler makes of many elements at once.
    for k in range(step.size):
        d = _U64(step[k])
        kind[k] = _U64(d & sign != _ZERO) | _U64((d + _ONE) & mask > _TWO) << _ONE
    for k in range(step.size):
        d = _U64(step[k])
        down = d >> _U64(8 * width_of(step) - 1)
        size[k] = (d ^ (_ZERO - down)) + down - _ONE


@njit(nogil=True, cache=True)
def _magnitudes(step: Any, size: Any, masks: Any, magnitude: Any, m: Any, escape: Any, e: Any) -> Any:
    """Keep the sizes that are not zero, few as they are."""
    vectors = size.size // LANES
    for v in range(vectors):
        masks[v] = nonzero(size, v * LANES)
    for v in range(vectors):
        rest = masks[v]
        while rest:
            i = _U64(v * LANES) + trailing_zeros(rest)
            rest &= rest - _ONE
            magnitude[m] = min(_U64(size[i]) - _ONE, _ESCAPE)
            m += _ONE
            if _U64(size[i]) > _ESCAPE:
                escape[e] = step[i]
                e += _ONE
    for i in range(vectors * LANES, size.size):
        if size[i]:
            magnitude[m] = min(_U64(size[i]) - _ONE, _ESCAPE)
            m += _ONE
            if _U64(size[i]) > _ESCAPE:
                escape[e] = step[i]
                e += _ONE
    return m, e


@njit(nogil=True, cache=True)
def _pack_kinds(kind: Any, listed: int, code: Any) -> None:
    for k in range(listed, (listed + 3) // 4 * 4):
        kind[k] = 0
    for k in range(code.size):
        code[k] = kind[4 * k] | kind[4 * k + 1] << 2 | kind[4 * k + 2] << 4 | kind[4 * k + 3] << 6
