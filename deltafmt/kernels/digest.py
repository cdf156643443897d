"""The linear content digest: two 64-bit sums over the 32-bit words of a tensor.

    D_L = sum over words p of  A_L[p mod 512] * M_L(p div 512) * word_p   mod 2^64,   L = 0, 1

with `A_L[t] = (mix(G * (2 t + L + 1)) >> 32) | 1` and `M_L(q) = mix(S_L + G * (q + 1)) | 1`, where S is the
tensor's salt (`segments.tensor_salt`). Being linear, it is updated from differences and summed over parts.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from deltafmt.kernels.intrinsics import width_of

U64 = np.uint64
BLOCK_WORDS = 512
GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
_G = np.uint64(GOLDEN)
_ONE, _ZERO, _HALF, _LOW = np.uint64(1), np.uint64(0), np.uint64(32), np.uint64(0xFFFFFFFF)

Digest = npt.NDArray[np.uint64]
"""Array of two unsigned 64-bit lanes."""


@njit(nogil=True, cache=True, inline="always")
def mix(x: Any) -> Any:
    """Scramble 64 bits (two rounds of xor-shift and multiply)."""
    x ^= x >> _HALF
    x *= _MULTIPLIER
    x ^= x >> _HALF
    x *= _MULTIPLIER
    return x ^ (x >> _HALF)


@njit(nogil=True, cache=True)
def _table() -> Any:
    table = np.empty((2, BLOCK_WORDS), np.uint32)
    for lane in range(2):
        for t in range(BLOCK_WORDS):
            table[lane, t] = (mix(_G * U64(2 * t + lane + 1)) >> _HALF) | _ONE
    return table


@cache
def multipliers() -> npt.NDArray[np.uint32]:
    """A_0 and A_1 as rows; odd, hence invertible. Everybody gets the same array."""
    table: npt.NDArray[np.uint32] = _table()
    return table


def zero() -> Digest:
    """The digest of nothing."""
    return np.zeros(2, np.uint64)


@njit(nogil=True, cache=True, inline="always")
def block_multiplier(salt: Any, block: Any) -> Any:
    """M_L of a block of 512 words."""
    return mix(salt + _G * U64(block + 1)) | _ONE


@njit(nogil=True, cache=True)
def _block_sum(words: Any, a0: Any, a1: Any) -> Any:
    s0, s1 = _ZERO, _ZERO
    for i in range(words.size):
        word = U64(words[i])
        s0 += U64(a0[i]) * word
        s1 += U64(a1[i]) * word
    return s0, s1


@njit(nogil=True, cache=True)
def _scan_words(words: Any, first: int, s0: Any, s1: Any, table: Any, out: Any) -> None:
    """Add whole words, the first of which is word `first` of the tensor."""
    r0, r1 = _ZERO, _ZERO
    low = 0
    while low < words.size:
        word = first + low
        t = word & (BLOCK_WORDS - 1)
        high = min(words.size, low + BLOCK_WORDS - t)
        b0, b1 = _block_sum(words[low:high], table[0, t : t + high - low], table[1, t : t + high - low])
        block = word // BLOCK_WORDS
        r0 += b0 * block_multiplier(s0, block)
        r1 += b1 * block_multiplier(s1, block)
        low = high
    out[0] += r0
    out[1] += r1


@njit(nogil=True, cache=True, inline="always")
def add_element(flat: Any, old: Any, new: Any, width: int, s0: Any, s1: Any, table: Any, out: Any) -> None:
    """Add the change of one element, given as 64-bit values."""
    if width == 8:
        word = 2 * flat
        block, t = word // BLOCK_WORDS, word & (BLOCK_WORDS - 1)
        low = (new & _LOW) - (old & _LOW)
        high = (new >> _HALF) - (old >> _HALF)
        sum0 = U64(table[0, t]) * low + U64(table[0, t + 1]) * high
        sum1 = U64(table[1, t]) * low + U64(table[1, t + 1]) * high
    else:
        byte = flat * width
        word = byte >> 2
        block, t = word // BLOCK_WORDS, word & (BLOCK_WORDS - 1)
        change = (new - old) << U64(8 * (byte & 3))
        sum0, sum1 = U64(table[0, t]) * change, U64(table[1, t]) * change
    out[0] += sum0 * block_multiplier(s0, block)
    out[1] += sum1 * block_multiplier(s1, block)


@njit(nogil=True, cache=True)
def add_elements(bits: Any, first: int, s0: Any, s1: Any, table: Any, out: Any) -> None:
    """Add elements one by one, whatever their alignment; `first` is the flat index of the first."""
    for i in range(bits.size):
        add_element(first + i, _ZERO, U64(bits[i]), width_of(bits), s0, s1, table, out)


def digest_run(bits: npt.NDArray[Any], first: int, salt: tuple[int, int], out: Digest) -> None:
    """Add a run of elements that are neighbours in canonical order, from flat index `first` on, to `out`.

    `bits` is a contiguous unsigned array in memory order; a read of it is all that this costs.
    """
    s0, s1 = U64(salt[0]), U64(salt[1])
    width = bits.itemsize
    table = multipliers()
    # Elements narrower than a word: up to three of them stand in front of the first whole word.
    head = min(len(bits), -first * width % 4 // width) if width < 4 else 0
    body = (len(bits) - head) * width // 4 * 4 // width
    if head:
        add_elements(bits[:head], first, s0, s1, table, out)
    if body:
        words = bits[head : head + body].view(np.uint32)
        _scan_words(words, (first + head) * width // 4, s0, s1, table, out)
    if head + body < len(bits):
        add_elements(bits[head + body :], first + head + body, s0, s1, table, out)
