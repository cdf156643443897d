"""Digests of single elements and of runs that lie apart, for writers that read boxes of a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from deltafmt.kernels.digest import (
    BLOCK_WORDS,
    U64,
    Digest,
    add_element,
    block_multiplier,
    multipliers,
)
from deltafmt.kernels.intrinsics import prefetch, width_of

Bits = npt.NDArray[Any]

_ZERO = U64(0)
_BLOCK_LOG2 = U64(BLOCK_WORDS.bit_length() - 1)
_AHEAD = 24
"""Elements ahead of a write whose places are fetched into the cache."""


def digest_changes(
    flat: npt.NDArray[Any], old: Bits, new: Bits, salt: tuple[int, int], out: Digest, first: int = 0
) -> None:
    """Add to `out` what changing the elements at canonical indices `first + flat` from `old` to `new` adds."""
    _changes(flat, first, old, new, U64(salt[0]), U64(salt[1]), multipliers(), out)


def digest_rows(
    bits: Bits, starts: npt.NDArray[np.int64], length: int, salt: tuple[int, int], out: Digest
) -> None:
    """Add runs of `length` elements; run r stands at canonical index `starts[r]` and on, in `bits` back to back."""
    _rows(bits, starts, length, U64(salt[0]), U64(salt[1]), multipliers(), out)


@njit(nogil=True, cache=True)
def scatter(target: Bits, at: npt.NDArray[Any], first: int, values: Bits) -> None:
    """`target[first + at] = values`, without holding the interpreter."""
    for k in range(at.size):
        if k + _AHEAD < at.size:
            prefetch(target, np.int64(at[k + _AHEAD]) + first)
        target[np.uint64(np.int64(at[k]) + first)] = values[k]


@njit(nogil=True, cache=True)
def _changes(flat: Any, first: int, old: Any, new: Any, s0: Any, s1: Any, table: Any, out: Any) -> None:
    width = width_of(old)
    if width == 8:
        for k in range(flat.size):
            add_element(np.int64(flat[k]) + first, U64(old[k]), U64(new[k]), 8, s0, s1, table, out)
        return
    current, sum0, sum1 = np.int64(-1), _ZERO, _ZERO
    table0, table1 = table[0], table[1]
    start = U64(first)
    for k in range(flat.size):
        # Unsigned: no division that rounds down, no index that counts from the end.
        byte = (U64(flat[k]) + start) * U64(width)
        word = byte >> U64(2)
        block = np.int64(word >> _BLOCK_LOG2)
        if block != current:
            if current >= 0:
                out[0] += sum0 * block_multiplier(s0, current)
                out[1] += sum1 * block_multiplier(s1, current)
            current, sum0, sum1 = block, _ZERO, _ZERO
        t = word & U64(BLOCK_WORDS - 1)
        change = (U64(new[k]) - U64(old[k])) << (U64(8) * (byte & U64(3)))
        sum0 += U64(table0[t]) * change
        sum1 += U64(table1[t]) * change
    if current >= 0:
        out[0] += sum0 * block_multiplier(s0, current)
        out[1] += sum1 * block_multiplier(s1, current)


@njit(nogil=True, cache=True)
def _rows(bits: Any, starts: Any, length: int, s0: Any, s1: Any, table: Any, out: Any) -> None:
    width = width_of(bits)
    current, sum0, sum1 = np.int64(-1), _ZERO, _ZERO
    for row in range(starts.size):
        here = bits[row * length : (row + 1) * length]
        first = starts[row]
        if width == 8:
            for i in range(length):
                add_element(first + i, _ZERO, U64(here[i]), 8, s0, s1, table, out)
            continue
        for i in range(length):
            byte = (first + i) * width
            word = byte >> 2
            block = word // BLOCK_WORDS
            if block != current:
                if current >= 0:
                    out[0] += sum0 * block_multiplier(s0, current)
                    out[1] += sum1 * block_multiplier(s1, current)
                current, sum0, sum1 = block, _ZERO, _ZERO
            t = word & (BLOCK_WORDS - 1)
            value = U64(here[i]) << U64(8 * (byte & 3))
            sum0 += U64(table[0, t]) * value
            sum1 += U64(table[1, t]) * value
    if current >= 0:
        out[0] += sum0 * block_multiplier(s0, current)
        out[1] += sum1 * block_multiplier(s1, current)
