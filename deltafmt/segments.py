"""Segments: a tiling seen through a layout, as flat tables that kernels walk.

A segment is the part of one box of a domain that one placement holds: a sub-box of the box, and two affine
maps from its coordinates, to the local tensor and to the canonical flat index.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from deltafmt.geometry import Box
from deltafmt.joins import expanded, meetings, row_major_strides, self_meetings, spans
from deltafmt.layout import Layout, Placement, TargetInfo
from deltafmt.schema import Schema
from deltafmt.tiling import Tiling

Ints = npt.NDArray[np.int64]

NO_CAST, BF16_TO_FP32 = 0, 1


@dataclass(frozen=True, kw_only=True)
class SegmentTable:
    """Domains -> boxes -> segments, as arrays; D domains, B boxes, S segments, T targets, R dimensions.

    `dims` are the extents of the whole box, neighbouring dimensions merged where both maps allow it;
    `[low, high)` is the sub-box that is held here. The element at box coordinates `c` (row-major number
    `r` inside the box, domain position `box_position + r`) stands at

        local element address   target_base + sum((c - low) * target_stride)
        canonical flat index    source_base + sum(c * source_stride)

    Leading dimensions that a segment does not need are `dims` 1, `[0, 1)`, strides 0.
    """

    domain_box: Ints
    """(D + 1,): boxes of domain d are rows `domain_box[d]:domain_box[d + 1]`."""
    box_position: Ints
    """(B,): domain position of the box's first element."""
    box_volume: Ints
    """(B,): elements of the box."""
    box_segment: Ints
    """(B + 1,): segments of a box; none where nobody here holds a part of it."""
    target: Ints
    """(S,): index into `target_names`."""
    source: Ints
    """(S,): row of the source tensor in the schema."""
    dims: Ints
    """(S, R)"""
    low: Ints
    """(S, R)"""
    high: Ints
    """(S, R)"""
    target_stride: Ints
    """(S, R), elements"""
    source_stride: Ints
    """(S, R), elements"""
    target_base: Ints
    """(S,), elements from the target's first one"""
    source_base: Ints
    """(S,), canonical flat index of the box's first element"""
    counted: npt.NDArray[np.bool_]
    """(S,): False for second copies, so that digests count each canonical element once."""
    target_names: tuple[str, ...]
    cast: npt.NDArray[np.uint8]
    """(T,): 0 none, 1 bfloat16 bits in the upper half of an FP32 element."""
    full: npt.NDArray[np.bool_]
    """(D,): every element of the domain is held here."""
    touched: npt.NDArray[np.bool_]
    """(D,): some element of the domain is held here."""
    source_names: tuple[str, ...]
    """Names of the schema's tensors, by row."""

    @cached_property
    def salt(self) -> npt.NDArray[np.uint64]:
        """(S, 2): digest salts of the source tensors."""
        rows, inverse = np.unique(self.source, return_inverse=True)
        salts = np.array([tensor_salt(self.source_names[row]) for row in rows.tolist()], np.uint64)
        return salts.reshape(-1, 2)[inverse]

    @cached_property
    def any_cast(self) -> bool:
        """Whether there is a cast at all."""
        return bool(self.cast.any())

    def segment_rows(self, domain: int) -> range:
        """Rows of all segments of a domain."""
        first, stop = self.domain_box[domain], self.domain_box[domain + 1]
        return range(int(self.box_segment[first]), int(self.box_segment[stop]))


def tensor_salt(name: str) -> tuple[int, int]:
    """The two salts of a tensor's digest: BLAKE2b-128 of its name as two little-endian integers."""
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def make_segments(
    schema: Schema, tiling: Tiling, layout: Layout, targets: Mapping[str, TargetInfo]
) -> SegmentTable:
    """Intersect every box of the tiling with every placement of its tensor.

    The layout must have been validated against the same schema and targets.
    """
    placed = Placed.of(schema, layout, tuple(targets), tiling.box_start.shape[1])
    cast = np.array([BF16_TO_FP32 if name in layout.casts else NO_CAST for name in targets], np.uint8)
    return segments_of(schema, tiling, placed, target_names=tuple(targets), cast=cast)


def segments_of(
    schema: Schema,
    tiling: Tiling,
    placed: Placed,
    *,
    target_names: tuple[str, ...],
    cast: npt.NDArray[np.uint8],
) -> SegmentTable:
    """`make_segments` of placements given as arrays."""
    box, row = _pairs(schema, tiling, placed)
    start = np.maximum(tiling.box_start[box], placed.start[row])
    stop = np.minimum(tiling.box_stop[box], placed.stop[row])
    box_start = tiling.box_start[box]
    source_stride = row_major_strides(schema.padded_shapes)[tiling.box_tensor[box]]
    target_stride = placed.strides[row]
    collapsed = _collapse(
        dims=tiling.box_stop[box] - box_start,
        low=start - box_start,
        high=stop - box_start,
        target_stride=target_stride,
        source_stride=source_stride,
    )
    held = np.zeros(len(tiling.box_tensor), np.int64)
    counted = placed.counted[row]
    np.add.at(held, box[counted], np.prod((stop - start)[counted], axis=1, dtype=np.int64))
    domain_held = np.zeros(len(tiling), np.int64)
    np.add.at(domain_held, tiling.domains_of_boxes(), held)
    return SegmentTable(
        domain_box=tiling.domain_box,
        box_position=tiling.box_position,
        box_volume=tiling.box_volume,
        box_segment=np.concatenate(([0], np.cumsum(np.bincount(box, minlength=len(held))))).astype(np.int64),
        target=placed.target[row],
        source=tiling.box_tensor[box],
        **collapsed,
        target_base=placed.offset[row] + ((start - placed.start[row]) * target_stride).sum(axis=1),
        source_base=(box_start * source_stride).sum(axis=1),
        counted=counted,
        target_names=target_names,
        cast=cast,
        full=domain_held == tiling.volume,
        touched=domain_held > 0,
        source_names=schema.names,
    )


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Placements as arrays; boxes and strides padded in front to one rank."""

    tensor: Ints
    start: Ints
    stop: Ints
    strides: Ints
    offset: Ints
    target: Ints
    counted: npt.NDArray[np.bool_]

    @classmethod
    def whole(cls, schema: Schema, rows: Ints) -> Placed:
        """Target k holds tensor `rows[k]` of the schema, whole and contiguous; a row of -1 means none.

        The fast path beside `of` with `Layout.identity`.
        """
        shapes = schema.padded_shapes
        target = np.flatnonzero(rows >= 0)
        target = target[(shapes[rows[target]] > 0).all(axis=1)]
        target = target[np.argsort(rows[target], kind="stable")]
        tensor = rows[target]
        counted = np.ones(len(tensor), bool)
        counted[1:] = tensor[1:] != tensor[:-1]
        return cls(
            tensor=tensor,
            start=np.zeros((len(tensor), shapes.shape[1]), np.int64),
            stop=shapes[tensor],
            strides=row_major_strides(shapes[tensor]),
            offset=np.zeros(len(tensor), np.int64),
            target=target,
            counted=counted,
        )

    @classmethod
    def of(cls, schema: Schema, layout: Layout, targets: tuple[str, ...], rank: int) -> Placed:
        """The placements of a layout; where they overlap in their source, cut so that none repeats a write."""
        owners = schema.owner_rows.tolist()
        rows = [owners[schema.index(p.source)] for p in layout.placements]
        shapes = schema.padded_shapes
        whole = cls._table(list(layout.placements), rows, [True] * len(rows), targets, rank)
        crossing = _crossing(whole, shapes)
        if not len(crossing):
            return whole
        by_source: dict[int, list[Placement]] = defaultdict(list)
        for k in crossing.tolist():
            by_source[rows[k]].append(layout.placements[k])
        cut = [
            (row, part, counted)
            for row, placements in by_source.items()
            for part, counted in _counted_once(placements)
        ]
        apart = np.setdiff1d(np.arange(len(rows)), crossing).tolist()
        every = [(rows[k], layout.placements[k], True) for k in apart] + cut
        every.sort(key=lambda item: item[0])
        return cls._table(
            [p for _, p, _ in every], [r for r, _, _ in every], [c for *_, c in every], targets, rank
        )

    @classmethod
    def _table(
        cls,
        placements: list[Placement],
        rows: list[int],
        counted: list[bool],
        targets: tuple[str, ...],
        rank: int,
    ) -> Placed:
        number = {name: k for k, name in enumerate(targets)}
        zeros, ones = [(0,) * k for k in range(rank + 1)], [(1,) * k for k in range(rank + 1)]
        pads = [rank - len(p.strides) for p in placements]
        starts = [zeros[pad] + p.source_box.start for pad, p in zip(pads, placements, strict=True)]
        stops = [ones[pad] + p.source_box.stop for pad, p in zip(pads, placements, strict=True)]
        strides = [zeros[pad] + p.strides for pad, p in zip(pads, placements, strict=True)]
        shape = (len(placements), rank)
        tensor = np.array(rows, np.int64)
        start, stop = (np.array(corner, np.int64).reshape(shape) for corner in (starts, stops))
        return cls(
            tensor=tensor,
            start=start,
            stop=stop,
            strides=np.array(strides, np.int64).reshape(shape),
            offset=np.array([p.offset for p in placements], np.int64),
            target=np.array([number[p.target] for p in placements], np.int64),
            counted=np.array(counted, bool),
        )


def _crossing(placed: Placed, shapes: Ints) -> Ints:
    """Rows of placements that share an element of their source with another one, in order."""
    crossing = np.zeros(len(placed.tensor), bool)
    if len(np.unique(placed.tensor)) == len(crossing):
        return np.flatnonzero(crossing)
    first, last = spans(shapes, placed.tensor, placed.start, placed.stop)
    order = np.argsort(first, kind="stable")
    for one, other in self_meetings(first[order], last[order])[1]:
        a, b = order[one], order[other]
        meet = placed.tensor[a] == placed.tensor[b]
        meet &= (placed.start[a] < placed.stop[b]).all(axis=1)
        meet &= (placed.start[b] < placed.stop[a]).all(axis=1)
        crossing[a[meet]] = True
        crossing[b[meet]] = True
    return np.flatnonzero(crossing)


def _counted_once(placements: list[Placement]) -> list[tuple[Placement, bool]]:
    """Placements of one source, cut so that none repeats a write and that counted ones do not overlap."""
    result: list[tuple[Placement, bool]] = []
    written: dict[str, list[Placement]] = defaultdict(list)
    seen: list[Box] = []
    for p in placements:
        same = [q.source_box for q in written[p.target] if _agree(p, q)]
        for box in _subtract(p.source_box, same):
            new = _subtract(box, seen)
            again = _subtract(box, new)
            result += [(_part(p, part), True) for part in new]
            result += [(_part(p, part), False) for part in again]
            seen += new
        written[p.target].append(p)
    return result


def _agree(p: Placement, q: Placement) -> bool:
    """Whether two placements into one target put the elements that both have at the same places."""
    common = p.source_box.intersect(q.source_box)
    if common is None:
        return False
    if any(n > 1 and a != b for n, a, b in zip(common.shape, p.strides, q.strides, strict=True)):
        return False
    return _part(p, common).offset == _part(q, common).offset


def _subtract(box: Box, others: list[Box]) -> list[Box]:
    """The part of a box that none of the others covers, as disjoint boxes."""
    left = [box]
    for other in others:
        if not any(part.intersect(other) for part in left):
            continue
        left = list(itertools.chain.from_iterable(_without(part, other) for part in left))
    return left


def _without(box: Box, other: Box) -> Iterator[Box]:
    common = box.intersect(other)
    if common is None:
        yield box
        return
    start, stop = list(box.start), list(box.stop)
    for d in range(box.rank):
        if start[d] < common.start[d]:
            yield Box(tuple(start), (*stop[:d], common.start[d], *stop[d + 1 :]))
        if common.stop[d] < stop[d]:
            yield Box((*start[:d], common.stop[d], *start[d + 1 :]), tuple(stop))
        start[d], stop[d] = common.start[d], common.stop[d]


def _part(placement: Placement, box: Box) -> Placement:
    if box == placement.source_box:
        return placement
    shift = sum(
        (a - b) * s for a, b, s in zip(box.start, placement.source_box.start, placement.strides, strict=True)
    )
    return Placement(placement.source, box, placement.target, placement.offset + shift, placement.strides)


def _pairs(schema: Schema, tiling: Tiling, placed: Placed) -> tuple[Ints, Ints]:
    """(box row, placement row) of every box with every placement that holds a part of it, boxes in order."""
    boxes, rows = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for box, row in _candidates(schema, tiling, placed):
        meet = (tiling.box_start[box] < placed.stop[row]).all(axis=1)
        meet &= (placed.start[row] < tiling.box_stop[box]).all(axis=1)
        boxes.append(box[meet])
        rows.append(row[meet])
    return np.concatenate(boxes), np.concatenate(rows)


def _candidates(schema: Schema, tiling: Tiling, placed: Placed) -> Iterator[tuple[Ints, Ints]]:
    """Boxes and placements of one tensor that may meet: all of them where that is little work."""
    count = np.bincount(placed.tensor, minlength=len(schema))
    per_box = count[tiling.box_tensor]
    if per_box.sum() <= 4 * len(per_box):
        order = np.argsort(placed.tensor, kind="stable")
        box, at = expanded((np.cumsum(count) - count)[tiling.box_tensor], per_box)
        yield box, order[at]
        return
    shapes = schema.padded_shapes
    first, last = spans(shapes, tiling.box_tensor, tiling.box_start, tiling.box_stop)
    placed_first, placed_last = spans(shapes, placed.tensor, placed.start, placed.stop)
    order = np.argsort(placed_first, kind="stable")
    for box, at in meetings(first, last, placed_first[order], placed_last[order]):
        row = order[at]
        own = tiling.box_tensor[box] == placed.tensor[row]
        yield box[own], row[own]


def _collapse(
    *, dims: Ints, low: Ints, high: Ints, target_stride: Ints, source_stride: Ints
) -> dict[str, Ints]:
    """Merge neighbouring dimensions of each segment, from the last one on, where both maps stay affine."""
    count, rank = dims.shape
    out: dict[str, Any] = {
        "dims": np.ones((count, rank), np.int64),
        "low": np.zeros((count, rank), np.int64),
        "high": np.ones((count, rank), np.int64),
        "target_stride": np.zeros((count, rank), np.int64),
        "source_stride": np.zeros((count, rank), np.int64),
    }
    given = {
        "dims": dims, "low": low, "high": high, "target_stride": target_stride, "source_stride": source_stride
    }  # fmt: skip
    rows = np.arange(count)
    head = np.full(count, rank - 1)
    for name, values in given.items():
        out[name][rows, head] = values[:, -1]
    for k in range(rank - 2, -1, -1):
        inner = {name: out[name][rows, head] for name in out}
        outer = {name: given[name][:, k] for name in given}
        whole = (inner["low"] == 0) & (inner["high"] == inner["dims"])
        affine = (outer["target_stride"] == inner["target_stride"] * inner["dims"]) & (
            outer["source_stride"] == inner["source_stride"] * inner["dims"]
        )
        skip = outer["dims"] == 1
        replace = ~skip & (inner["dims"] == 1)
        merge = ~skip & ~replace & whole & affine
        push = ~skip & ~replace & ~merge
        head[push] -= 1
        fresh = replace | push
        for name, values in out.items():
            values[rows[fresh], head[fresh]] = outer[name][fresh]
        size = inner["dims"][merge]
        for name in ("dims", "low", "high"):
            out[name][rows[merge], head[merge]] = outer[name][merge] * size
    used = rank - int(head.min()) if count else 1
    return {name: np.ascontiguousarray(values[:, rank - used :]) for name, values in out.items()}
