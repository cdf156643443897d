"""Positions of changed elements as gap bytes, low bits and block counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from deltafmt.errors import FormatError
from deltafmt.format.constants import MAX_SHIFT

Positions = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.uint32]

_ESCAPE = 255

# What a decoder found, by status; the order is that of the checks.
_REASONS = {
    1: "block-counts",
    2: "gap-trailing",
    3: "position-outside",
    4: "padding-nonzero",
}


def block_starts(box_position: Any, box_volume: Any, block_log2: int) -> npt.NDArray[np.int64]:
    """First position of every block, and behind them the domain's volume.

    Each box is cut into blocks of `2^block_log2` elements, the last one shorter.
    """
    size = 1 << block_log2
    counts = (box_volume + (size - 1)) >> block_log2
    first = np.repeat(box_position, counts)
    within = np.arange(len(first)) - np.repeat(np.cumsum(counts) - counts, counts)
    volume = int(box_position[-1] + box_volume[-1]) if len(box_volume) else 0
    return np.concatenate((first + within * size, [volume])).astype(np.int64)


def count_blocks(box_volume: Any, block_log2: int) -> int:
    """Number of blocks that boxes of these volumes are cut into."""
    return int(((box_volume + ((1 << block_log2) - 1)) >> block_log2).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedPositions:
    """Gap bytes, packed low bits, and the entries and elements of each block."""

    gap: Bytes
    low: Bytes
    entries: Counts
    elements: Counts


def choose_shift(positions: Positions, starts: npt.NDArray[np.int64]) -> int:
    """The shift whose gap bytes (at their entropy) and low bits take the fewest bits."""
    mean = max(1.0, float(starts[-1]) / max(1, len(positions)))
    guess = max(0, int(np.log2(mean / 128)))
    candidates = sorted({max(0, guess - 1), guess, min(MAX_SHIFT, guess + 1), min(MAX_SHIFT, guess + 2)})
    costs = []
    for shift in candidates:
        counts = _histogram(positions, starts, shift)
        total = counts.sum()
        used = counts[counts > 0]
        costs.append(float(-(used * np.log2(used / total)).sum()) + shift * len(positions))
    return candidates[int(np.argmin(costs))]


def encode_positions(positions: Positions, starts: npt.NDArray[np.int64], shift: int) -> CodedPositions:
    """Code ascending positions, block by block."""
    entries = np.zeros(len(starts) - 1, np.uint32)
    elements = np.zeros(len(starts) - 1, np.uint32)
    total = _count(positions, starts, shift, entries, elements)
    gap = np.empty(total, np.uint8)
    low = np.zeros((len(positions) * shift + 7) // 8 + 3, np.uint8)
    _encode(positions, starts, shift, gap, low)
    return CodedPositions(gap=gap, low=low[:-3], entries=entries, elements=elements)


def decode_positions(
    gap: Bytes,
    low: Bytes,
    entries: Counts,
    elements: Counts,
    *,
    starts: npt.NDArray[np.int64],
    shift: int,
    listed: int,
    where: object,
) -> Positions:
    """Positions of a chunk, strictly ascending; `FormatError` where anything does not fit."""
    if int(entries.sum(dtype=np.int64)) != len(gap) or int(elements.sum(dtype=np.int64)) != listed:
        raise FormatError("block counts disagree with the columns", kind="block-counts", where=where)
    padded = np.concatenate((low, np.zeros(3, np.uint8)))
    # One place per entry, although fewer are listed: the loop below writes before it knows.
    positions = np.empty(len(gap) + 1, np.uint32)
    status, block = _decode(gap, padded, entries, elements, starts, shift, positions)
    if status == 0 and listed * shift % 8 and low[-1] >> (listed * shift % 8):
        status, block = 4, len(entries) - 1
    if status:
        raise FormatError(
            "positions cannot be decoded", kind=_REASONS[status], where=f"{where}, block {block}"
        )
    return positions[:listed]


def pack_counts(*fields: Counts) -> Bytes:
    """The `block` column: per field four byte planes, each one byte per block."""
    planes = [field.astype("<u4").view(np.uint8).reshape(-1, 4).T for field in fields]
    return np.ascontiguousarray(np.concatenate(planes)).reshape(-1)


def unpack_counts(column: Bytes, fields: int = 4) -> list[Counts]:
    """The fields of a `block` column."""
    planes = column.reshape(fields, 4, -1)
    return [np.ascontiguousarray(field.T).view("<u4").reshape(-1) for field in planes]


@njit(nogil=True, cache=True)
def _histogram(positions: Any, starts: Any, shift: int) -> Any:
    counts = np.zeros(256, np.int64)
    block, end, previous = 0, starts[1], starts[0] - 1
    for i in range(positions.size):
        p = np.int64(positions[i])
        if p >= end:
            while p >= starts[block + 1]:
                block += 1
            previous, end = starts[block] - 1, starts[block + 1]
        v = (p - previous - 1) >> shift
        previous = p
        while v >= _ESCAPE:
            counts[_ESCAPE] += 1
            v -= _ESCAPE
        counts[v] += 1
    return counts


@njit(nogil=True, cache=True)
def _count(positions: Any, starts: Any, shift: int, entries: Any, elements: Any) -> int:
    block, end, previous, total = 0, starts[1], starts[0] - 1, 0
    for i in range(positions.size):
        p = np.int64(positions[i])
        if p >= end:
            while p >= starts[block + 1]:
                block += 1
            previous, end = starts[block] - 1, starts[block + 1]
        count = ((p - previous - 1) >> shift) // _ESCAPE + 1
        previous = p
        entries[block] += count
        elements[block] += 1
        total += count
    return total


@njit(nogil=True, cache=True)
def _encode(positions: Any, starts: Any, shift: int, gap: Any, low: Any) -> None:
    block, end, previous, at, bit = 0, starts[1], starts[0] - 1, 0, 0
    mask = (1 << shift) - 1
    for i in range(positions.size):
        p = np.int64(positions[i])
        if p >= end:
            while p >= starts[block + 1]:
                block += 1
            previous, end = starts[block] - 1, starts[block + 1]
        distance = p - previous - 1
        previous = p
        v = distance >> shift
        while v >= _ESCAPE:
            gap[at] = _ESCAPE
            at += 1
            v -= _ESCAPE
        gap[at] = v
        at += 1
        if shift:
            value = (distance & mask) << (bit & 7)
            byte = bit >> 3
            low[byte] |= value & 255
            low[byte + 1] |= (value >> 8) & 255
            low[byte + 2] |= (value >> 16) & 255
            bit += shift


@njit(nogil=True, cache=True)
def _decode(gap: Any, low: Any, entries: Any, elements: Any, starts: Any, shift: int, positions: Any) -> Any:
    at = count = 0
    for block in range(entries.size):
        stop = at + np.int64(entries[block])
        first = count
        p = starts[block] - 1
        if stop > at:
            if shift == 0:
                count, p = _run(gap[at:stop], p, positions, count)
            else:
                count, p = _shifted_run(gap[at:stop], low, p, shift, positions, count)
            if gap[stop - 1] == _ESCAPE:
                return 2, block
            if p >= starts[block + 1]:
                return 3, block
        if count - first != np.int64(elements[block]):
            return 1, block
        at = stop
    return 0, 0


@njit(nogil=True, cache=True)
def _run(gap: Any, p: int, positions: Any, count: int) -> Any:
    for k in range(gap.size):
        g = np.int64(gap[k])
        listed = np.int64(g != _ESCAPE)
        p += g + listed
        positions[count] = p
        count += listed
    return count, p


@njit(nogil=True, cache=True)
def _shifted_run(gap: Any, low: Any, p: int, shift: int, positions: Any, count: int) -> Any:
    mask = (1 << shift) - 1
    for k in range(gap.size):
        g = np.int64(gap[k])
        if g == _ESCAPE:
            p += g << shift
            continue
        bit = count * shift
        byte = bit >> 3
        if byte + 2 >= low.size:
            # More elements than the low bits were packed for: the counts will not agree.
            count += 1
            continue
        word = np.int64(low[byte]) | np.int64(low[byte + 1]) << 8 | np.int64(low[byte + 2]) << 16
        p += 1 + ((g << shift) | ((word >> (bit & 7)) & mask))
        positions[count] = p
        count += 1
    return count, p
