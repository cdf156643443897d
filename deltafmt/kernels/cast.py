"""FP32 values cast to BF16, compared with what is published and summed, in one pass over memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from deltafmt.kernels.digest import BLOCK_WORDS
from deltafmt.kernels.fingerprint import fingerprint, keys, product, weight
from deltafmt.kernels.intrinsics import LANES, differs
from deltafmt.kernels.marks import mark_differing

Bits = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint64]

_BLOCK = BLOCK_WORDS * 4
"""Elements of a block of the fingerprint: a block and its cast stay in the nearest cache."""
_I32, _U64 = np.int32, np.uint64
_ONE = np.uint64(1)


def narrow(wide: Floats, into: Bits, first: int) -> int:
    """Write the BF16 bits of contiguous FP32 values, to nearest, ties to even; returns their fingerprint.

    `first` is as `fingerprint` has it. NaN becomes any bits: always the same of the same.
    """
    _narrow(wide.view(_I32), into)
    return fingerprint(into, first)


def mark_overwritten(old: Bits, wide: Floats, words: Words, first: int) -> tuple[int, int]:
    """Mark where the cast of `wide` differs from `old`; returns both their fingerprints.

    Both are contiguous and equally long, `first` is as `fingerprint` has it. Bit `i` of `words` stands for
    element `i`; bits are only ever set. NaN is always marked.
    """
    whole = old.size // _BLOCK * _BLOCK
    before, after = _overwritten(old[:whole], wide.view(_I32)[:whole], words, keys(), first // _BLOCK)
    before, after = int(before), int(after)
    if whole < old.size:
        cast, rest = np.empty(old.size - whole, np.uint16), wide.view(_I32)[whole:]
        if _narrow(rest, cast):
            _mark_nan(rest, words[whole // LANES :])
        mark_differing(old[whole:], cast, words[whole // LANES :])
        before += fingerprint(old[whole:], first + whole)
        after += fingerprint(cast, first + whole)
    return before & (2**64 - 1), after & (2**64 - 1)


@njit(nogil=True, cache=True, inline="always")
def rounded(bits: Any) -> Any:
    """32-bit patterns whose upper half is BF16, to nearest, ties to even; the lower half is of no account."""
    odd = _I32(_I32(bits >> _I32(16)) & _I32(1))
    return _I32(_I32(bits + _I32(0x7FFF)) + odd)


@njit(nogil=True, cache=True)
def _narrow(wide: Any, into: Any) -> Any:
    """Cast; returns whether there is NaN."""
    largest = _I32(0)
    for k in range(wide.size):
        value = wide[k]
        largest = max(largest, _I32(value & _I32(0x7FFFFFFF)))
        into[k] = np.uint16(rounded(value) >> _I32(16))
    return largest > _I32(0x7F800000)


@njit(nogil=True, cache=True)
def _mark_nan(wide: Any, words: Any) -> None:
    for k in range(wide.size):
        if (wide[k] & _I32(0x7FFFFFFF)) > _I32(0x7F800000):
            words[k // LANES] |= _ONE << _U64(k % LANES)


@njit(nogil=True, cache=True)
def _overwritten(old: Any, wide: Any, words: Any, table: Any, block: int) -> Any:
    cast = np.empty(BLOCK_WORDS, np.uint64)
    bits, before_words = cast.view(np.uint16), old.view(np.uint64)
    before = after = _U64(0)
    for low in range(0, old.size, _BLOCK):
        part = wide[low : low + _BLOCK]
        if _narrow(part, bits):
            _mark_nan(part, words[low // LANES :])
        here = old[low : low + _BLOCK]
        for lane in range(0, _BLOCK, LANES):
            words[(low + lane) // LANES] |= differs(here, bits, lane)
        was = before_words[low // 4 : low // 4 + BLOCK_WORDS]
        left = right = _U64(0)
        for k in range(BLOCK_WORDS):
            left += product(was[k], table[k])
            right += product(cast[k], table[k])
        scale = weight(block + low // _BLOCK)
        before += left * scale
        after += right * scale
    return before, after
