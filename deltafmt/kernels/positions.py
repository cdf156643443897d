"""Positions of changed elements as gap bytes, low bits and block counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from deltafmt.errors import FormatError
from deltafmt.kernels.intrinsics import load, store

Positions = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.uint32]

_ESCAPE = 255

_U64, _ONE = np.uint64, np.uint64(1)
_ESCAPE_U64 = np.uint64(_ESCAPE)
LOW_SLACK = 4
"""Bytes behind packed low bits, which no column has: they are read and written four at a time."""

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
    starts = np.empty(count_blocks(box_volume, block_log2) + 1, np.int64)
    _block_starts(box_position, box_volume, block_log2, starts)
    return starts


def count_blocks(box_volume: Any, block_log2: int) -> int:
    """Number of blocks that boxes of these volumes are cut into."""
    return int(_count_blocks(box_volume, block_log2))


@njit(nogil=True, cache=True)
def _count_blocks(box_volume: Any, block_log2: int) -> int:
    count = 0
    for volume in box_volume:
        count += (volume + (1 << block_log2) - 1) >> block_log2
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedPositions:
    """Gap bytes, packed low bits, and the entries and elements of each block."""

    gap: Bytes
    low: Bytes
    entries: Counts
    elements: Counts


def encode_positions(positions: Positions, starts: npt.NDArray[np.int64], shift: int) -> CodedPositions:
    """Code ascending positions, block by block."""
    listed, counts = len(positions), np.zeros((2, len(starts) - 1), np.uint32)
    gap = np.empty(gap_room(starts, shift, listed), np.uint8)
    low = np.empty(low_room(shift, listed), np.uint8)
    state, runs = new_state(starts)
    code_positions(positions, starts, shift, gap, low, counts, state, runs)
    return CodedPositions(
        gap=gap[: int(state[0])], low=low[:-LOW_SLACK], entries=counts[0], elements=counts[1]
    )


def gap_room(starts: npt.NDArray[np.int64], shift: int, listed: int) -> int:
    """Gap bytes that so many positions may take, and one that is written before it is known to count."""
    # An entry of 255 goes on by 255 << shift elements, which bounds how many there can be.
    return listed + (int(starts[-1]) >> shift) // _ESCAPE + 2


def low_room(shift: int, listed: int) -> int:
    """Bytes of packed low bits, and some behind them."""
    return (listed * shift + 7) // 8 + LOW_SLACK


def new_state(starts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`state` and `runs` of `code_positions` before the first position."""
    return np.array([0, 0, 0, starts[0] - 1], np.int64), np.empty((len(starts), 2), np.int64)


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
    padded = np.concatenate((low, np.zeros(LOW_SLACK, np.uint8))) if shift else low
    # One place per entry, although fewer are listed: the loop below writes before it knows.
    positions = np.empty(len(gap) + 1, np.uint32)
    status, block = _decode(gap, padded, entries, elements, starts, shift, listed, positions)
    if status == 0 and listed * shift % 8 and low[-1] >> (listed * shift % 8):
        status, block = 4, len(entries) - 1
    if status:
        place = where if block < 0 else f"{where}, block {block}"
        raise FormatError("positions cannot be decoded", kind=_REASONS[status], where=place)
    return positions[:listed]


def pack_counts(*fields: Counts) -> Bytes:
    """The `block` column: per field four byte planes, each one byte per block."""
    column = np.empty(4 * len(fields) * len(fields[0]), np.uint8)
    for number, field in enumerate(fields):
        _pack(field, column[4 * number * len(field) : 4 * (number + 1) * len(field)])
    return column


def unpack_counts(column: Bytes, fields: int = 4) -> Counts:
    """The fields of a `block` column, shape (fields, blocks)."""
    counts = np.empty((fields, len(column) // (4 * fields)), np.uint32)
    _unpack(column, counts)
    return counts


@njit(nogil=True, cache=True)
def _block_starts(box_position: Any, box_volume: Any, block_log2: int, starts: Any) -> None:
    at = 0
    for box in range(box_position.size):
        for first in range(0, box_volume[box], 1 << block_log2):
            starts[at] = box_position[box] + first
            at += 1
    starts[at] = box_position[-1] + box_volume[-1] if box_position.size else 0


@njit(nogil=True, cache=True)
def _pack(field: Any, planes: Any) -> None:
    for j in range(4):
        plane = planes[j * field.size : (j + 1) * field.size]
        for k in range(field.size):
            plane[k] = field[k] >> np.uint32(8 * j) & np.uint32(255)


@njit(nogil=True, cache=True)
def _unpack(column: Any, counts: Any) -> None:
    blocks = counts.shape[1]
    for field in range(counts.shape[0]):
        planes = column[4 * field * blocks : 4 * (field + 1) * blocks]
        for k in range(blocks):
            low = np.uint32(planes[k]) | np.uint32(planes[k + blocks]) << np.uint32(8)
            high = np.uint32(planes[k + 2 * blocks]) | np.uint32(planes[k + 3 * blocks]) << np.uint32(8)
            counts[field, k] = low | high << np.uint32(16)


@njit(nogil=True, cache=True)
def total(counts: Any) -> Any:
    """Sum that does not wrap."""
    result = np.int64(0)
    for k in range(counts.size):
        result += np.int64(counts[k])
    return result


@njit(nogil=True, cache=True)
def code_positions(
    positions: Any, starts: Any, shift: int, gap: Any, low: Any, counts: Any, state: Any, runs: Any
) -> int:
    """Code further positions, for a `CodedPositions` in the making.

    `state` holds entries and elements so far, the block, and the position that was listed last in it;
    entries and elements are added to the first two rows of `counts`. Puts (block, how many of them) into
    `runs`, one behind another, and returns how many such there are.
    """
    at, i = _U64(state[0]), _U64(state[1])
    block, previous = state[2], state[3]
    first = run = 0
    while first < positions.size:
        if positions[first] >= starts[block + 1]:
            block = np.searchsorted(starts, positions[first], "right") - 1
            previous = starts[block] - 1
        here = positions[first : first + np.searchsorted(positions[first:], starts[block + 1])]
        before = at
        if shift == 0:
            at = _gaps(here, previous, gap, at)
        else:
            at = _shifted_gaps(here, previous, shift, gap, at, low, i)
        previous = np.int64(here[here.size - 1])
        i += _U64(here.size)
        counts[0, block] += at - before
        counts[1, block] += here.size
        runs[run, 0], runs[run, 1] = block, here.size
        run += 1
        first += here.size
    state[0], state[1], state[2], state[3] = at, i, block, previous
    return run


@njit(nogil=True, cache=True)
def _gaps(positions: Any, previous: int, gap: Any, at: Any) -> Any:
    next_one = _U64(previous + 1)
    for k in range(positions.size):
        p = _U64(positions[k])
        distance = p - next_one
        next_one = p + _ONE
        # One entry of 255 is written whether it counts or not: whether it does is hard to predict.
        gap[at] = _ESCAPE_U64
        far = _U64(distance >= _ESCAPE_U64)
        at += far
        distance -= far * _ESCAPE_U64
        at = _append_gap(distance, gap, at)
    return at


@njit(nogil=True, cache=True)
def _shifted_gaps(positions: Any, previous: int, shift: int, gap: Any, at: Any, low: Any, i: Any) -> Any:
    mask = (_ONE << _U64(shift)) - _ONE
    next_one = _U64(previous + 1)
    word = np.empty(1, np.uint32)
    # Low bits that fill no four bytes yet, behind those of earlier calls in the byte that is begun.
    address, filled = (
        np.int64(low.ctypes.data) + np.int64(i * _U64(shift) >> _U64(3)),
        i * _U64(shift) & _U64(7),
    )
    waiting = _U64(low[i * _U64(shift) >> _U64(3)]) & ((_ONE << filled) - _ONE)
    for k in range(positions.size):
        p = _U64(positions[k])
        distance = p - next_one
        next_one = p + _ONE
        waiting |= (distance & mask) << filled
        filled += _U64(shift)
        if filled >= _U64(32):
            store(address, word, np.uint32(waiting & _U64(0xFFFFFFFF)))
            address += 4
            waiting >>= _U64(32)
            filled -= _U64(32)
        at = _append_gap(distance >> _U64(shift), gap, at)
    store(address, word, np.uint32(waiting))
    return at


@njit(nogil=True, cache=True, inline="always")
def _append_gap(distance: Any, gap: Any, at: Any) -> Any:
    while distance >= _ESCAPE_U64:
        gap[at] = _ESCAPE_U64
        at += _ONE
        distance -= _ESCAPE_U64
    gap[at] = distance
    return at + _ONE


@njit(nogil=True, cache=True)
def _decode(
    gap: Any, low: Any, entries: Any, elements: Any, starts: Any, shift: int, listed: int, positions: Any
) -> Any:
    if total(entries) != gap.size or total(elements) != listed:
        return 1, -1
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
    word = np.empty(1, np.uint32)
    n = _U64(0)
    bit = _U64(count * shift)
    last = _U64(low.size - LOW_SLACK)
    for k in range(gap.size):
        g = np.int64(gap[k])
        if g == _ESCAPE:
            p += g << shift
            continue
        # More elements than the low bits were packed for would read on; the counts will not agree then.
        address = np.int64(low.ctypes.data) + np.int64(min(bit >> _U64(3), last))
        below = np.int64(load(address, word)) >> np.int64(bit & _U64(7))
        p += 1 + ((g << shift) | (below & mask))
        out[n] = p
        n += _ONE
        bit += _U64(shift)
    return count + np.int64(n), p
