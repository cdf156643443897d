"""Whether placements fill their targets, each element once: the strict checks behind `Layout.validate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from deltafmt.addresses import Digits, Strided
from deltafmt.errors import LayoutError
from deltafmt.geometry import Box
from deltafmt.layout_windows import check_windows, clashing, map_of
from deltafmt.schema import Schema

if TYPE_CHECKING:
    from deltafmt.layout import Placement, TargetInfo

CASTS = {("bfloat16", "float32")}
"""(source dtype, target dtype) pairs that lose nothing and that a layout may declare."""


def check_placement(
    placement: Placement, schema: Schema, targets: Mapping[str, TargetInfo], casts: Mapping[str, str]
) -> None:
    """Raise `LayoutError` for a placement that does not fit its source and target."""
    where = f"{placement.source!r} -> {placement.target!r}"
    if placement.source not in schema:
        raise LayoutError("placement of a tensor that the schema lacks", kind="name-unknown", where=where)
    if placement.target not in targets:
        raise LayoutError(
            "placement into a local tensor that was not given", kind="name-unknown", where=where
        )
    spec, info = schema[placement.source], targets[placement.target]
    box = placement.source_box
    if not Box.full(spec.shape).contains(box) or len(placement.strides) != box.rank:
        raise LayoutError(
            "placement leaves its source",
            kind="placement-outside",
            where=where,
            expected=spec.shape,
            found=box,
        )
    if box.volume:
        last = placement.offset + sum((n - 1) * s for n, s in zip(box.shape, placement.strides, strict=True))
        if placement.offset < 0 or min(placement.strides, default=0) < 0 or last >= info.span:
            raise LayoutError(
                "placement leaves its target",
                kind="placement-outside",
                where=where,
                expected=f"elements 0 to {info.span - 1}",
                found=f"{placement.offset} to {last}",
            )
    declared = casts.get(placement.target, info.dtype)
    if spec.dtype != declared or (declared != info.dtype and (declared, info.dtype) not in CASTS):
        raise LayoutError(
            "source and target differ in dtype; bfloat16 goes into float32 where that is declared, by "
            "LayoutBuilder.cast or Layout(casts=...), and nothing else",
            kind="dtype-mismatch",
            where=where,
            expected=declared,
            found=spec.dtype,
        )


def check_target(
    name: str, info: TargetInfo, placements: list[Placement], untouched: list[Box], schema: Schema
) -> None:
    """Raise `LayoutError` unless every element of a target is placed once or declared untouched."""
    if 0 in info.shape:
        return
    if any(s < 0 for s in info.strides) or _overlaps_itself(info.shape, info.strides):
        raise LayoutError(
            "local tensor overlaps itself", kind="target-strides", where=repr(name), found=info.strides
        )
    if len(placements) == 1 and not untouched and _is_whole(placements[0], info):
        return
    unique = {(schema.resolve(p.source).name, p.source_box, p.offset, p.strides): p for p in placements}
    filled = list(unique.values())
    own = Strided(info.shape, info.strides, 0)
    idle = [own.part(box.start, box.shape) for box in untouched if box.volume]
    if not _fill_once(own, filled, idle, schema):
        check_windows(name, info, filled, idle, schema)


def find_clash(placements: Sequence[Placement], schema: Schema) -> Placement | None:
    """A placement that wants an address which another one, into the same memory, has for another element.

    One element may stand at one address for several placements, but only by one map from index to address:
    the segments then write it once.
    """
    unique = [p for p in dict.fromkeys(placements) if p.source_box.volume]
    digits = Digits.of([_place(p) for p in unique])
    pairs = None if digits is None else digits.meetings()
    if digits is not None and pairs is not None:
        owner = digits.owner.tolist()
        if all(_agree(unique[owner[a]], unique[owner[b]], schema) for a, b in pairs):
            return None
    return clashing(unique, schema)


def _fill_once(own: Strided, placements: list[Placement], idle: list[Strided], schema: Schema) -> bool:
    """Whether all is seen to be well without looking at elements."""
    digits = Digits.of([own, *map(_place, placements), *idle])
    if digits is None:
        return False
    filled, whole = digits.take(digits.owner > 0), digits.take(digits.owner == 0)
    pairs = filled.meetings()
    if pairs is None:
        return False
    owner = (filled.owner - 1).tolist()
    kept = np.ones(len(owner), bool)
    for a, b in pairs:
        if max(owner[a], owner[b]) >= len(placements):
            return False
        if not _agree(placements[owner[a]], placements[owner[b]], schema):
            return False
        if filled.contains(b, a):
            kept[a] = False
        elif filled.contains(a, b):
            kept[b] = False
        else:
            return False
    filled = filled.take(kept)
    volume = int(whole.volume.sum())
    return int(filled.volume.sum()) == volume == filled.shared_with(whole)


def _agree(p: Placement, q: Placement, schema: Schema) -> bool:
    """Whether wherever two placements meet they mean one element, by one map."""
    if p is q or schema.resolve(p.source) is not schema.resolve(q.source) or map_of(p) != map_of(q):
        return False
    start = map(min, p.source_box.start, q.source_box.start)
    stop = map(max, p.source_box.stop, q.source_box.stop)
    return not _overlaps_itself([b - a for a, b in zip(start, stop, strict=True)], p.strides)


def _place(placement: Placement) -> Strided:
    return Strided(placement.source_box.shape, placement.strides, placement.offset)


def _overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two indices of a strided tensor may share an address (a sufficient test by sorted strides)."""
    reach = 1
    for stride, extent in sorted(zip(strides, shape, strict=True)):
        if extent > 1:
            if stride < reach:
                return True
            reach = stride * (extent - 1) + reach
    return False


def _is_whole(placement: Placement, info: TargetInfo) -> bool:
    same = placement.source_box.shape == info.shape and placement.strides == info.strides
    return same and placement.offset == 0
