"""Writing changes into live tensors in CPU memory, and reading live elements, through segments.

Targets are given as memory addresses of their first elements, so that one call serves all tensors of a
domain. The caller keeps the tensors alive and has validated the layout: no bound is checked here.
Different domains hold different elements, so that calls for different domains may run side by side.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from deltafmt.kernels.digest import BLOCK_WORDS, U64, Digest, add_element, block_multiplier, multipliers
from deltafmt.kernels.intrinsics import load, prefetch_at, stepped, store, width_of
from deltafmt.kernels.positions import Positions
from deltafmt.kernels.steps import from_key, to_key
from deltafmt.segments import SegmentTable

Bits = npt.NDArray[Any]
Addresses = npt.NDArray[np.int64]
Sums = npt.NDArray[np.uint64]

_BATCH = 256
"""Elements that go through the stages of a write together; their scratch stays in the first-level cache."""
_RUN, _AHEAD = 32, 64
"""The same where elements are neighbours in memory, and how far ahead of writing their lines are asked for:
few and near enough that memory is never idle while a batch is computed, far enough that lines are there."""
_BLOCK_SHIFT, _BLOCK_MASK = U64(9), U64(BLOCK_WORDS - 1)
_ZERO, _ONE, _HALF_WORD, _LOW_HALF = U64(0), U64(1), U64(16), U64(0xFFFF)
_SET, _STEP = 0, 1


class DomainView:
    """One domain's rows of a segment table, as the kernels take them."""

    __slots__ = ("arguments", "width")

    def __init__(self, table: SegmentTable, domain: int, addresses: Addresses, width: int) -> None:
        first, stop = table.domain_box[domain : domain + 2].tolist()
        segment = table.box_segment[first : stop + 1]
        rows = slice(int(segment[0]), int(segment[-1]))
        target = table.target[rows]
        cast = table.cast[target]
        stride, base = table.target_stride[rows], table.target_base[rows]
        if table.any_cast:
            element_bytes = np.where(cast == 1, 4, width)
            stride, base = stride * element_bytes[:, None], base * element_bytes
        else:
            stride, base = stride * width, base * width
        self.width = width
        self.arguments: tuple[npt.NDArray[Any], ...] = (
            table.box_position[first:stop],
            table.box_volume[first:stop],
            segment - rows.start,
            table.dims[rows],
            table.low[rows],
            table.high[rows],
            stride,
            table.source_stride[rows],
            addresses[target] + base,
            table.source_base[rows],
            table.counted[rows],
            cast,
            table.salt[rows],
        )

    def restricted(self, chosen: npt.NDArray[np.bool_]) -> DomainView:
        """The view without the segments that are not chosen."""
        view = object.__new__(DomainView)
        view.width = self.width
        before = np.concatenate(([0], np.cumsum(chosen)))
        box_position, box_volume, box_segment, *columns = self.arguments
        view.arguments = (box_position, box_volume, before[box_segment], *(c[chosen] for c in columns))
        return view


def apply_set(view: DomainView, positions: Positions, bits: Bits, old: Bits | None, digest: Digest) -> None:
    """Write new bits at ascending positions.

    `old`, an array like `bits` or None, receives the bits that stood there (entries that nobody here holds
    are left as they are); the change is added to `digest`.
    """
    undo = old if old is not None else bits[:0]
    _apply(_SET, 0, positions, bits, undo, old is not None, digest, multipliers(), *view.arguments)


def apply_step(
    view: DomainView, positions: Positions, step: Bits, order: int, old: Bits | None, digest: Digest
) -> None:
    """Add steps at ascending positions; `old` and `digest` as in `apply_set`."""
    undo = old if old is not None else step[:0]
    _apply(_STEP, order, positions, step, undo, old is not None, digest, multipliers(), *view.arguments)


def apply_dense(view: DomainView, bits: Bits) -> None:
    """Write all elements of a domain, given in order of position."""
    _move(True, bits, *view.arguments)


def gather_dense(view: DomainView, bits: Bits) -> None:
    """Read all elements of a domain that are held here into an array of its volume."""
    _move(False, bits, *view.arguments)


def scan(view: DomainView, like: Bits) -> Sums:
    """Digest of each segment's elements, shape (segments, 2); segments that are not counted have zero.

    `like` is an array of the domain's element type.
    """
    sums = np.zeros((len(view.arguments[-1]), 2), np.uint64)
    _scan(sums, like, multipliers(), *view.arguments)
    return sums


def cast_exact(view: DomainView, like: Bits) -> bool:
    """Whether every live element behind a cast still is an image of its narrow source."""
    cast = view.arguments[11]
    return not cast.any() or bool(_cast_exact(like, *view.arguments))


@njit(nogil=True, cache=True)
def _find(positions: Any, low: int, high: int, value: int) -> int:
    while low < high:
        middle = (low + high) >> 1
        if np.int64(positions[middle]) < value:
            low = middle + 1
        else:
            high = middle
    return low


@njit(nogil=True, cache=True)
def _is_line(dims: Any) -> bool:
    """Whether all dimensions but the last are trivial, so that a sub-box is one interval of positions."""
    longer = 0
    for d in range(dims.size - 1):
        longer += dims[d] != 1
    return longer == 0


@njit(nogil=True, cache=True)
def _place(
    positions: Any, start: int, stop: int, origin: int, dims: Any, low: Any, high: Any,
    t_stride: Any, s_stride: Any, t_base: int, s_base: int, entry: Any, address: Any, flat: Any,
) -> int:  # fmt: skip
    """Fill addresses and canonical indices of the entries that lie in the sub-box; returns how many do."""
    count = 0
    rank = dims.size
    if _is_line(dims):
        ts, ss, shift = t_stride[rank - 1], s_stride[rank - 1], low[rank - 1]
        for i in range(start, stop):
            r = np.int64(positions[i]) - origin
            entry[count] = i
            address[count] = t_base + (r - shift) * ts
            flat[count] = s_base + r * ss
            count += 1
        return count
    last = rank - 1
    # Positions ascend, so that most entries stay in the row of the one before: no division for them.
    row, row_end, row_address, row_flat, inside = np.int64(-1), np.int64(-1), t_base, s_base, False
    for i in range(start, stop):
        r = np.int64(positions[i]) - origin
        if r >= row_end:
            row = r // dims[last]
            row_end = (row + 1) * dims[last]
            rest, row_address, row_flat, inside = row, t_base, s_base, True
            for d in range(last - 1, -1, -1):
                c = rest % dims[d]
                rest //= dims[d]
                inside = inside and low[d] <= c < high[d]
                row_address += (c - low[d]) * t_stride[d]
                row_flat += c * s_stride[d]
        c = r - row * dims[last]
        if inside and low[last] <= c < high[last]:
            entry[count] = i
            address[count] = row_address + (c - low[last]) * t_stride[last]
            flat[count] = row_flat + c * s_stride[last]
            count += 1
    return count


@njit(nogil=True, cache=True)
def _write(
    operation: int, order: int, values: Any, undo: Any, keep: bool, cast: bool, count: int,
    entry: Any, address: Any, before: Any, after: Any, wide: Any,
) -> None:  # fmt: skip
    width = width_of(values)
    sign = _ONE << U64(8 * width - 1)
    mask = (sign - _ONE) | sign
    # Reads first, all of them: cache misses then overlap instead of waiting for one another.
    if cast:
        for k in range(count):
            before[k] = U64(load(address[k], wide)) >> _HALF_WORD
    else:
        for k in range(count):
            before[k] = U64(load(address[k], values))
    if operation == _STEP:
        for k in range(count):
            key = (to_key(before[k], sign, mask, order) + U64(values[entry[k]])) & mask
            after[k] = from_key(key, sign, mask, order)
    else:
        for k in range(count):
            after[k] = U64(values[entry[k]])
    if cast:
        for k in range(count):
            store(address[k], wide, np.uint32(after[k] << _HALF_WORD))
    else:
        for k in range(count):
            store(address[k], values, values.dtype.type(after[k]))
    if keep:
        for k in range(count):
            undo[entry[k]] = before[k]


@njit(nogil=True, cache=True)
def _update(
    count: int, flat: Any, before: Any, after: Any, width: int, salt: Any, table: Any, digest: Any
) -> None:
    s0, s1 = salt[0], salt[1]
    if width == 8:
        for k in range(count):
            add_element(flat[k], before[k], after[k], 8, s0, s1, table, digest)
        return
    current = np.int64(-1)
    sum0, sum1, r0, r1 = _ZERO, _ZERO, _ZERO, _ZERO
    for k in range(count):
        byte = flat[k] * width
        word = byte >> 2
        block = word // BLOCK_WORDS
        if block != current:
            if current >= 0:
                r0 += sum0 * block_multiplier(s0, current)
                r1 += sum1 * block_multiplier(s1, current)
            current, sum0, sum1 = block, _ZERO, _ZERO
        t = word & (BLOCK_WORDS - 1)
        change = (after[k] - before[k]) << U64(8 * (byte & 3))
        sum0 += U64(table[0, t]) * change
        sum1 += U64(table[1, t]) * change
    if current >= 0:
        r0 += sum0 * block_multiplier(s0, current)
        r1 += sum1 * block_multiplier(s1, current)
    digest[0] += r0
    digest[1] += r1


@njit(nogil=True, cache=True)
def _apply_run(
    operation: int, order: int, positions: Any, start: int, stop: int, values: Any, undo: Any, keep: bool,
    place: int, counted: bool, shift: int, s0: Any, s1: Any, table: Any, digest: Any, old: Any, new: Any,
) -> None:  # fmt: skip
    """`_write` and `_update` where addresses are `place` and canonical indices `shift` behind the positions.

    For widths 1, 2 and 4. `old` and `new` are scratch for a batch.
    """
    width = width_of(values)
    size, stored = U64(width), U64(positions.size)
    current = ~_ZERO
    sum0, sum1, r0, r1 = _ZERO, _ZERO, _ZERO, _ZERO
    first, end = U64(start), U64(stop)
    while first < end:
        count = min(U64(_RUN), end - first)
        # Reads first, all of them: cache misses then overlap instead of waiting for one another.
        for k in range(count):
            old[k] = load(place + np.int64(positions[first + k]) * width, values)
        if operation == _SET:
            for k in range(count):
                new[k] = values[first + k]
        elif order == 0:
            for k in range(count):
                new[k] = old[k] + values[first + k]
        else:
            for k in range(count):
                new[k] = stepped(old[k], values[first + k])
        ahead = first + U64(_AHEAD)
        if ahead + count <= stored:
            for k in range(count):
                prefetch_at(place + np.int64(positions[ahead + k]) * width)
                store(place + np.int64(positions[first + k]) * width, values, new[k])
        else:
            for k in range(count):
                store(place + np.int64(positions[first + k]) * width, values, new[k])
        if keep:
            for k in range(count):
                undo[first + k] = old[k]
        if counted:
            for k in range(count):
                byte = U64(np.int64(positions[first + k]) + shift) * size
                word = byte >> U64(2)
                block = word >> _BLOCK_SHIFT
                if block != current:
                    # The sums are still zero at the first block, whatever the multiplier.
                    r0 += sum0 * block_multiplier(s0, current)
                    r1 += sum1 * block_multiplier(s1, current)
                    current, sum0, sum1 = block, _ZERO, _ZERO
                t = word & _BLOCK_MASK
                change = (U64(new[k]) - U64(old[k])) << (U64(8) * (byte & U64(3)))
                sum0 += U64(table[_ZERO, t]) * change
                sum1 += U64(table[_ONE, t]) * change
        first += count
    digest[0] += r0 + sum0 * block_multiplier(s0, current)
    digest[1] += r1 + sum1 * block_multiplier(s1, current)


@njit(nogil=True, cache=True)
def _apply(
    operation: int, order: int, positions: Any, values: Any, undo: Any, keep: bool, digest: Any, table: Any,
    box_position: Any, box_volume: Any, box_segment: Any, dims: Any, low: Any, high: Any, t_stride: Any,
    s_stride: Any, t_base: Any, s_base: Any, counted: Any, cast: Any, salt: Any,
) -> None:  # fmt: skip
    entry, address = np.empty(_BATCH, np.int64), np.empty(_BATCH, np.int64)
    flat = np.empty(_BATCH, np.int64)
    before, after = np.empty(_BATCH, np.uint64), np.empty(_BATCH, np.uint64)
    wide = np.empty(1, np.uint32)
    run_old, run_new = np.empty(_RUN, values.dtype), np.empty(_RUN, values.dtype)
    width = width_of(values)
    last = dims.shape[1] - 1
    at = 0
    for box in range(box_position.size):
        origin = box_position[box]
        end = _find(positions, at, positions.size, origin + box_volume[box])
        for s in range(box_segment[box], box_segment[box + 1]):
            first, stop = at, end
            flattened = _is_line(dims[s])
            if flattened:
                first = _find(positions, at, end, origin + low[s, last])
                stop = _find(positions, first, end, origin + high[s, last])
            if (
                flattened
                and width < 8
                and cast[s] == 0
                and t_stride[s, last] == width
                and s_stride[s, last] == 1
            ):
                place = t_base[s] - (origin + low[s, last]) * width
                flat_shift = s_base[s] - origin
                _apply_run(
                    operation, order, positions, first, stop, values, undo, keep, place, counted[s],
                    flat_shift, salt[s, 0], salt[s, 1], table, digest, run_old, run_new,
                )  # fmt: skip
                continue
            for start in range(first, stop, _BATCH):
                count = _place(
                    positions, start, min(stop, start + _BATCH), origin, dims[s], low[s], high[s],
                    t_stride[s], s_stride[s], t_base[s], s_base[s], entry, address, flat,
                )  # fmt: skip
                _write(
                    operation,
                    order,
                    values,
                    undo,
                    keep,
                    cast[s] == 1,
                    count,
                    entry,
                    address,
                    before,
                    after,
                    wide,
                )
                if counted[s]:
                    _update(count, flat, before, after, width_of(values), salt[s], table, digest)
        at = end


@njit(nogil=True, cache=True)
def _runs(dims: Any, low: Any, high: Any) -> int:
    """Number of runs along the last dimension in a sub-box."""
    count = 1
    for d in range(dims.size - 1):
        count *= high[d] - low[d]
    return count


@njit(nogil=True, cache=True)
def _run_start(run: int, dims: Any, low: Any, high: Any, t_stride: Any, s_stride: Any) -> Any:
    """(number in the box, address, canonical index) of the run's first element, relative to the bases."""
    last = dims.size - 1
    number, address, flat, place = low[last], np.int64(0), low[last] * s_stride[last], dims[last]
    for d in range(last - 1, -1, -1):
        extent = high[d] - low[d]
        c = low[d] + run % extent
        run //= extent
        number += c * place
        place *= dims[d]
        address += (c - low[d]) * t_stride[d]
        flat += c * s_stride[d]
    return number, address, flat


@njit(nogil=True, cache=True)
def _move(
    write: bool, bits: Any, box_position: Any, box_volume: Any, box_segment: Any, dims: Any, low: Any,
    high: Any, t_stride: Any, s_stride: Any, t_base: Any, s_base: Any, counted: Any, cast: Any, salt: Any,
) -> None:  # fmt: skip
    wide = np.empty(1, np.uint32)
    last = dims.shape[1] - 1
    for box in range(box_position.size):
        for s in range(box_segment[box], box_segment[box + 1]):
            length, stride = high[s, last] - low[s, last], t_stride[s, last]
            for run in range(_runs(dims[s], low[s], high[s])):
                number, shift, _ = _run_start(run, dims[s], low[s], high[s], t_stride[s], s_stride[s])
                here = bits[box_position[box] + number : box_position[box] + number + length]
                address = t_base[s] + shift
                if cast[s] == 1:
                    for i in range(length):
                        if write:
                            store(address + i * stride, wide, np.uint32(np.uint32(here[i]) << np.uint32(16)))
                        else:
                            here[i] = load(address + i * stride, wide) >> np.uint32(16)
                elif write:
                    for i in range(length):
                        store(address + i * stride, bits, here[i])
                else:
                    for i in range(length):
                        here[i] = load(address + i * stride, bits)


@njit(nogil=True, cache=True)
def _word_sum(address: int, a0: Any, a1: Any, wide: Any) -> Any:
    sum0, sum1 = _ZERO, _ZERO
    for i in range(a0.size):
        word = U64(load(address + 4 * i, wide))
        sum0 += U64(a0[i]) * word
        sum1 += U64(a1[i]) * word
    return sum0, sum1


@njit(nogil=True, cache=True)
def _scan_run(
    address: int, flat: int, length: int, like: Any, wide: Any, salt: Any, table: Any, digest: Any
) -> None:
    """`_scan` of elements that are neighbours in memory and in canonical order: whole words at a time."""
    width = width_of(like)
    s0, s1 = salt[0], salt[1]
    head = min(length, -flat * width % 4 // width)
    words = (length - head) * width // 4
    tail = head + words * 4 // width
    for i in range(head):
        add_element(flat + i, _ZERO, U64(load(address + i * width, like)), width, s0, s1, table, digest)
    for i in range(tail, length):
        add_element(flat + i, _ZERO, U64(load(address + i * width, like)), width, s0, s1, table, digest)
    start, first = address + head * width, (flat + head) * width // 4
    low = 0
    while low < words:
        block, t = (first + low) // BLOCK_WORDS, (first + low) & (BLOCK_WORDS - 1)
        count = min(words - low, BLOCK_WORDS - t)
        sum0, sum1 = _word_sum(start + 4 * low, table[0, t : t + count], table[1, t : t + count], wide)
        digest[0] += sum0 * block_multiplier(s0, block)
        digest[1] += sum1 * block_multiplier(s1, block)
        low += count


@njit(nogil=True, cache=True)
def _scan(
    sums: Any, like: Any, table: Any, box_position: Any, box_volume: Any, box_segment: Any, dims: Any,
    low: Any, high: Any, t_stride: Any, s_stride: Any, t_base: Any, s_base: Any, counted: Any, cast: Any,
    salt: Any,
) -> None:  # fmt: skip
    wide = np.empty(1, np.uint32)
    last = dims.shape[1] - 1
    flat = np.empty(_BATCH, np.int64)
    before, after = np.zeros(_BATCH, np.uint64), np.empty(_BATCH, np.uint64)
    for s in range(dims.shape[0]):
        if not counted[s]:
            continue
        digest = sums[s]
        length, stride = high[s, last] - low[s, last], t_stride[s, last]
        for run in range(_runs(dims[s], low[s], high[s])):
            _, shift, start = _run_start(run, dims[s], low[s], high[s], t_stride[s], s_stride[s])
            address = t_base[s] + shift
            if cast[s] == 0 and stride == width_of(like) and s_stride[s, last] == 1:
                _scan_run(address, s_base[s] + start, length, like, wide, salt[s], table, digest)
                continue
            for first in range(0, length, _BATCH):
                count = min(_BATCH, length - first)
                for k in range(count):
                    i = first + k
                    flat[k] = s_base[s] + start + i * s_stride[s, last]
                    if cast[s] == 1:
                        after[k] = U64(load(address + i * stride, wide)) >> U64(16)
                    else:
                        after[k] = U64(load(address + i * stride, like))
                _update(count, flat, before, after, width_of(like), salt[s], table, digest)


@njit(nogil=True, cache=True)
def _cast_exact(
    like: Any, box_position: Any, box_volume: Any, box_segment: Any, dims: Any, low: Any, high: Any,
    t_stride: Any, s_stride: Any, t_base: Any, s_base: Any, counted: Any, cast: Any, salt: Any,
) -> bool:  # fmt: skip
    wide = np.empty(1, np.uint32)
    last = dims.shape[1] - 1
    for s in range(dims.shape[0]):
        if cast[s] != 1:
            continue
        length, stride = high[s, last] - low[s, last], t_stride[s, last]
        for run in range(_runs(dims[s], low[s], high[s])):
            _, shift, _ = _run_start(run, dims[s], low[s], high[s], t_stride[s], s_stride[s])
            for i in range(length):
                if U64(load(t_base[s] + shift + i * stride, wide)) & _LOW_HALF:
                    return False
    return True
