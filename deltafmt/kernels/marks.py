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

_ONE, _SIX = np.uint64(1), np.uint64(6)


def words_for(elements: int) -> Words:
    """Marks of so many elements, none of them set."""
    return np.zeros((elements + LANES - 1) // LANES, np.uint64)


def count(words: Words) -> int:
    """How many marks are set."""
    return int(_count(words))


def mark_differing(old: Bits, new: Bits, words: Words) -> int:
    """Mark where two contiguous arrays of one unsigned type differ; returns in how many places."""
    return int(_mark_differing(old, new, words))


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
