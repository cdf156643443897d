"""One bit per element: which ones may have changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from deltafmt.kernels.intrinsics import LANES, differs, ones, trailing_zeros

Bits = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
Positions = npt.NDArray[np.uint32]
Words = npt.NDArray[np.uint64]

_ONE, _SIX, _LOW = np.uint64(1), np.uint64(6), np.uint64(63)
_UPPER, _HALF, _ODD = np.uint32(16), np.uint32(0x7FFF), np.uint32(1)
_BLOCK = 1024


def words_for(elements: int) -> Words:
    """Marks of so many elements, none of them set."""
    return np.zeros((elements + LANES - 1) // LANES, np.uint64)


def count(words: Words) -> int:
    """How many marks are set."""
    return int(_count(words))


def mark_differing(old: Bits, new: Bits, words: Words) -> int:
    """Mark where two contiguous arrays of one unsigned type differ; returns in how many places."""
    return int(_mark_differing(old, new, words))


def mark_cast(copy: npt.NDArray[np.uint16], master: npt.NDArray[np.uint32], words: Words) -> int:
    """Mark where BF16 bits are not those that FP32 bits are rounded to; returns in how many places.

    A NaN is marked, whatever its bits: how one is cast is torch's affair.
    """
    return int(_mark_cast(copy, master, words))


def marked(words: Words, starts: Ints, places: Ints, length: int) -> Positions:
    """Positions of marked elements: run k has `length` elements from bit `starts[k]` and position `places[k]` on."""
    into = np.empty(int(_marked(words, starts, places, length, np.empty(0, np.uint32), False)), np.uint32)
    _marked(words, starts, places, length, into, True)
    return into


@njit(nogil=True, cache=True)
def _count(words: Any) -> Any:
    total = np.uint64(0)
    for word in words:
        total += ones(word)
    return total


@njit(nogil=True, cache=True)
def _mark_differing(old: Any, new: Any, words: Any) -> Any:
    total = np.uint64(0)
    vectors = old.size // LANES
    for v in range(vectors):
        mask = differs(old, new, v * LANES)
        words[v] |= mask
        total += ones(mask)
    for k in range(vectors * LANES, old.size):
        if old[k] != new[k]:
            words[vectors] |= _ONE << np.uint64(k - vectors * LANES)
            total += _ONE
    return total


@njit(nogil=True, cache=True)
def _mark_cast(copy: Any, master: Any, words: Any) -> Any:
    total = np.uint64(0)
    cast = np.empty(_BLOCK, np.uint16)
    for first in range(0, copy.size, _BLOCK):
        here, wide = copy[first : first + _BLOCK], master[first : first + _BLOCK]
        for k in range(wide.size):
            bits = wide[k]
            rounded = np.uint32(bits + _HALF + ((bits >> _UPPER) & _ODD)) >> _UPPER
            # A pattern that the copy does not have, so that a NaN differs.
            nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            cast[k] = np.uint16(~here[k]) if nan else np.uint16(rounded)
        total += _mark_differing(here, cast[: here.size], words[first // LANES :])
    return total


@njit(nogil=True, cache=True)
def _marked(words: Any, starts: Any, places: Any, length: int, into: Any, write: bool) -> Any:
    total = np.int64(0)
    for run in range(starts.size):
        low, high = np.uint64(starts[run]), np.uint64(starts[run] + length)
        shift = np.int64(places[run]) - np.int64(starts[run])
        word = low >> _SIX
        while word << _SIX < high:
            rest = words[word]
            base = word << _SIX
            if base < low:
                rest &= ~np.uint64(0) << (low - base)
            if high - base < np.uint64(LANES):
                rest &= (_ONE << (high - base)) - _ONE
            if write:
                while rest:
                    into[total] = np.int64(base + np.uint64(trailing_zeros(rest))) + shift
                    rest &= rest - _ONE
                    total += 1
            else:
                total += np.int64(ones(rest))
            word += _ONE
    return total
