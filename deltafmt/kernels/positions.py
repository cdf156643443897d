"""Positions of changed elements as gap bytes, low bits and block counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from deltafmt.errors import FormatError

Positions = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.uint32]

_ESCAPE = 255
_DENSE_MEAN = 128
"""Below this mean distance no shift pays, and none is tried."""

_U64, _ONE = np.uint64, np.uint64(1)

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


def encode_positions(positions: Positions, starts: npt.NDArray[np.int64], shift: int) -> CodedPositions:
    """Code ascending positions, block by block."""
    entries = np.zeros(len(starts) - 1, np.uint32)
    elements = np.zeros(len(starts) - 1, np.uint32)
    # An entry of 255 goes on by 255 << shift elements, which bounds how many there can be.
    gap = np.empty(len(positions) + (int(starts[-1]) >> shift) // _ESCAPE + 1, np.uint8)
    low = np.zeros((len(positions) * shift + 7) // 8 + 3, np.uint8)
    gap = gap[: _encode(positions, starts, shift, gap, low, entries, elements)]
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
    planes = np.stack(fields).astype("<u4", copy=False).view(np.uint8).reshape(len(fields), -1, 4)
    return planes.transpose(0, 2, 1).reshape(-1)


def unpack_counts(column: Bytes, fields: int = 4) -> list[Counts]:
    """The fields of a `block` column."""
    planes = column.reshape(fields, 4, -1)
    return [np.ascontiguousarray(field.T).view("<u4").reshape(-1) for field in planes]


@njit(nogil=True, cache=True)
def _encode(positions: Any, starts: Any, shift: int, gap: Any, low: Any, entries: Any, elements: Any) -> Any:
    at, i = _U64(0), _U64(0)
    total = _U64(positions.size)
    for block in range(entries.size):
        end = starts[block + 1]
        previous = starts[block] - 1
        first_entry, first = at, i
        if shift == 0:
            while i < total and np.int64(positions[i]) < end:
                v = np.int64(positions[i]) - previous - 1
                previous += v + 1
                while v >= _ESCAPE:
                    gap[at] = _ESCAPE
                    at += _ONE
                    v -= _ESCAPE
                gap[at] = v
                at += _ONE
                i += _ONE
        else:
            while i < total and np.int64(positions[i]) < end:
                distance = np.int64(positions[i]) - previous - 1
                previous += distance + 1
                v = distance >> shift
                while v >= _ESCAPE:
                    gap[at] = _ESCAPE
                    at += _ONE
                    v -= _ESCAPE
                gap[at] = v
                at += _ONE
                append_low(low, i * _U64(shift), _U64(distance) & ((_ONE << _U64(shift)) - _ONE))
                i += _ONE
        entries[block] = at - first_entry
        elements[block] = i - first
    return at


@njit(nogil=True, cache=True, inline="always")
def append_low(low: Any, bit: Any, value: Any) -> None:
    """Put a value of at most 16 bits at a bit's place in zeroed bytes."""
    byte = bit >> _U64(3)
    value <<= bit & _U64(7)
    low[byte] |= value & _U64(255)
    low[byte + _ONE] |= (value >> _U64(8)) & _U64(255)
    low[byte + _U64(2)] |= value >> _U64(16)


@njit(nogil=True, cache=True)
def _decode(gap: Any, low: Any, entries: Any, elements: Any, starts: Any, shift: int, positions: Any) -> Any:
    at: Any = 0
    count: Any = 0
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
def _run(gap: Any, p: Any, positions: Any, count: Any) -> Any:
    out = positions[count:]
    n = _U64(0)
    for k in range(gap.size):
        g = gap[k]
        listed = _U64(g != _ESCAPE)
        p += np.int64(g) + np.int64(listed)
        out[n] = p
        n += listed
    return count + np.int64(n), p


@njit(nogil=True, cache=True)
def _shifted_run(gap: Any, low: Any, p: Any, shift: int, positions: Any, count: int) -> Any:
    mask = (1 << shift) - 1
    out = positions[count:]
    n = _U64(0)
    bit = _U64(count * shift)
    last = _U64(low.size - 3)
    for k in range(gap.size):
        g = np.int64(gap[k])
        if g == _ESCAPE:
            p += g << shift
            continue
        # More elements than the low bits were packed for would read on; the counts will not agree then.
        byte = min(bit >> _U64(3), last)
        word = np.int64(low[byte]) | np.int64(low[byte + _ONE]) << 8 | np.int64(low[byte + _U64(2)]) << 16
        p += 1 + ((g << shift) | ((word >> np.int64(bit & _U64(7))) & mask))
        out[n] = p
        n += _ONE
        bit += _U64(shift)
    return count + np.int64(n), p
