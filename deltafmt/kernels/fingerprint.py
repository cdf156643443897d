"""A sum over memory that tells by chance only once in about 2^60 that nothing has been written to it.

For a process's own use: it is stored nowhere, costs half as much as a content digest, and is summed over parts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from deltafmt.kernels.digest import BLOCK_WORDS, GOLDEN, mix

_U64 = np.uint64
_ONE, _HALF, _LOW, _G = _U64(1), _U64(32), _U64(0xFFFFFFFF), _U64(GOLDEN)


@njit(cache=True)
def _made() -> Any:
    keys = np.empty(BLOCK_WORDS, np.uint64)
    for k in range(BLOCK_WORDS):
        keys[k] = mix(_G * _U64(k + 1))
    return keys


_KEYS: npt.NDArray[np.uint64] = np.empty(0, np.uint64)


def keys() -> npt.NDArray[np.uint64]:
    """What the words of a block are mixed with."""
    global _KEYS  # noqa: PLW0603 (made once, when first needed)
    if not _KEYS.size:
        _KEYS = _made()
    return _KEYS


def fingerprint(bits: npt.NDArray[Any], first: int) -> int:
    """What contiguous elements add, the first of which is element `first`, a multiple of 4096.

    All but the last part of an array must have a multiple of 4096 elements.
    """
    data = bits.reshape(-1).view(np.uint8)
    whole = len(data) // 8 * 8
    words = data[:whole].view(np.uint64)
    block = first * bits.itemsize // 8 // BLOCK_WORDS
    total = int(_sum(words, keys(), block))
    if whole < len(data):
        rest = np.zeros(8, np.uint8)
        rest[: len(data) - whole] = data[whole:]
        # A block of its own, whose number no other part has.
        total += int(_sum(rest.view(np.uint64), keys(), -1))
    return total & (2**64 - 1)


@njit(nogil=True, cache=True, inline="always")
def product(word: Any, key: Any) -> Any:
    """What a word adds to its block."""
    mixed = word ^ key
    return (mixed & _LOW) * (mixed >> _HALF) + word


@njit(nogil=True, cache=True, inline="always")
def weight(block: Any) -> Any:
    """What a block's sum is multiplied with."""
    return mix(_G * _U64(block + 1)) | _ONE


@njit(nogil=True, cache=True)
def _sum(words: Any, table: Any, block: int) -> Any:
    total = _U64(0)
    for low in range(0, words.size, BLOCK_WORDS):
        part = words[low : low + BLOCK_WORDS]
        own = _U64(0)
        for k in range(part.size):
            own += product(part[k], table[k])
        total += own * weight(block + low // BLOCK_WORDS)
    return total
