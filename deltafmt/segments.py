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
from deltafmt.layout import Layout, Placement, TargetInfo
from deltafmt.schema import Schema
from deltafmt.tiling import Tiling, padded_shapes, row_major_strides

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
    box, row = _pairs(tiling.box_tensor, placed.tensor, len(schema))
    start = np.maximum(tiling.box_start[box], placed.start[row])
    stop = np.minimum(tiling.box_stop[box], placed.stop[row])
    kept = (start < stop).all(axis=1)
    box, row, start, stop = box[kept], row[kept], start[kept], stop[kept]
    box_start = tiling.box_start[box]
    source_stride = row_major_strides(padded_shapes(schema))[tiling.box_tensor[box]]
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
    """Placements as arrays, sorted by source row; boxes and strides padded in front to one rank."""

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
        shapes = padded_shapes(schema)
        target = np.flatnonzero((rows >= 0) & (shapes[rows] > 0).all(axis=1))
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
        number = {name: k for k, name in enumerate(targets)}
        by_source: dict[int, list[Placement]] = defaultdict(list)
        for p in layout.placements:
            row = schema.index(p.source)
            owner = schema.tensors[row].alias_of
            by_source[row if owner is None else schema.index(owner)].append(p)
        rows = [
            (row, p, counted)
            for row, placements in sorted(by_source.items())
            for p, counted in _counted_once(placements)
        ]
        pads = [rank - len(p.strides) for _, p, _ in rows]
        starts = [(0,) * pad + p.source_box.start for pad, (_, p, _) in zip(pads, rows, strict=True)]
        stops = [(1,) * pad + p.source_box.stop for pad, (_, p, _) in zip(pads, rows, strict=True)]
        strides = [(0,) * pad + p.strides for pad, (_, p, _) in zip(pads, rows, strict=True)]
        shape = (len(rows), rank)
        return cls(
            tensor=np.array([row for row, _, _ in rows], np.int64),
            start=np.array(starts, np.int64).reshape(shape),
            stop=np.array(stops, np.int64).reshape(shape),
            strides=np.array(strides, np.int64).reshape(shape),
            offset=np.array([p.offset for _, p, _ in rows], np.int64),
            target=np.array([number[p.target] for _, p, _ in rows], np.int64),
            counted=np.array([counted for _, _, counted in rows], bool),
        )


def _counted_once(placements: list[Placement]) -> list[tuple[Placement, bool]]:
    """Placements of one source, cut so that none repeats a write and that counted ones do not overlap."""
    if len(placements) == 1:
        return [(placements[0], True)]
    result: list[tuple[Placement, bool]] = []
    written: dict[tuple[object, ...], list[Box]] = defaultdict(list)
    seen: list[Box] = []
    for p in placements:
        origin = p.offset - sum(a * s for a, s in zip(p.source_box.start, p.strides, strict=True))
        writes = written[(p.target, origin, p.strides)]
        for box in _subtract(p.source_box, writes):
            new = _subtract(box, seen)
            again = _subtract(box, new)
            result += [(_part(p, part), True) for part in new]
            result += [(_part(p, part), False) for part in again]
            seen += new
        writes.append(p.source_box)
    return result


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


def _pairs(box_tensor: Ints, placed_tensor: Ints, tensors: int) -> tuple[Ints, Ints]:
    """(box row, placement row) of every box with every placement of its tensor, boxes in order."""
    count = np.bincount(placed_tensor, minlength=tensors)
    first = np.concatenate(([0], np.cumsum(count)))[:-1]
    per_box = count[box_tensor]
    box = np.repeat(np.arange(len(box_tensor)), per_box)
    within = np.arange(len(box)) - np.repeat(np.cumsum(per_box) - per_box, per_box)
    return box, first[box_tensor][box] + within


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
