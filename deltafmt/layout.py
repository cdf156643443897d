"""Layouts: where canonical elements stand in somebody's local tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltafmt.errors import LayoutError
from deltafmt.geometry import Box
from deltafmt.schema import Schema, TensorSpec

CASTS = {("bfloat16", "float32")}
"""(source dtype, target dtype) pairs that lose nothing and that a layout may declare."""

_BITMAP_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """Dtype (torch's name), shape and strides (in elements) of a local tensor."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> TargetInfo:
        """Of a torch tensor or numpy array; a `TargetInfo` is returned as it is."""
        if isinstance(tensor, TargetInfo):
            return tensor
        dtype = str(tensor.dtype).removeprefix("torch.")
        if hasattr(tensor, "stride"):
            strides = tuple(tensor.stride())
        else:
            strides = tuple(step // tensor.itemsize for step in tensor.strides)
        return cls(dtype, tuple(int(n) for n in tensor.shape), strides)

    @property
    def span(self) -> int:
        """Elements from the first to the last one in memory, both counted; 0 for an empty tensor."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True, slots=True)
class Placement:
    """One canonical box and where it stands in a local tensor.

    Element `source_box.start + c` of tensor `source` is found `offset + sum(c * strides)` elements behind
    the first element of local tensor `target`; there is one stride per dimension of the source.
    """

    source: str
    source_box: Box
    target: str
    offset: int
    strides: tuple[int, ...]


class Layout:
    """Placements of canonical boxes in local tensors.

    `untouched` lists (target, box of the target) whose elements nothing fills, such as padding. `casts`
    maps targets to the dtype of their source where that differs; only bfloat16 to float32 is lossless.
    What a layout says is checked by `validate` against a schema and the local tensors.
    """

    def __init__(
        self,
        placements: Iterable[Placement],
        *,
        untouched: Iterable[tuple[str, Box]] = (),
        casts: Mapping[str, str] | None = None,
    ) -> None:
        self.placements: tuple[Placement, ...] = tuple(placements)
        self.untouched: tuple[tuple[str, Box], ...] = tuple(untouched)
        self.casts: dict[str, str] = dict(casts or {})

    def __repr__(self) -> str:
        targets = len({placement.target for placement in self.placements})
        return f"Layout({len(self.placements)} placements into {targets} tensors)"

    @classmethod
    def identity(cls, schema: Schema, names: Iterable[str] | None = None) -> Layout:
        """Every tensor of the schema (or those named) in a contiguous local tensor of the same name."""
        specs: Iterable[TensorSpec] = schema if names is None else [schema[name] for name in names]
        # A model has few different shapes.
        places: dict[tuple[int, ...], tuple[Box, tuple[int, ...]]] = {}
        placements = []
        for spec in specs:
            if spec.shape not in places:
                places[spec.shape] = Box.full(spec.shape), contiguous_strides(spec.shape)
            box, strides = places[spec.shape]
            if 0 not in spec.shape:
                placements.append(Placement(spec.name, box, spec.name, 0, strides))
        return cls(placements)

    @classmethod
    def by_name(cls, schema: Schema, targets: Mapping[str, TargetInfo]) -> Layout:
        """Every local tensor filled by the stored tensor of its name, whatever its strides.

        Raises `LayoutError` for a local tensor that no stored name can fill.
        """
        placements = []
        for name, info in targets.items():
            if name not in schema:
                raise LayoutError(
                    "no stored tensor fills this local tensor; give a layout",
                    kind="target-unfilled",
                    where=repr(name),
                )
            if schema[name].volume:
                placements.append(Placement(name, Box.full(schema[name].shape), name, 0, info.strides))
        return cls(placements)

    def validate(self, schema: Schema, targets: Mapping[str, TargetInfo]) -> None:
        """Raise `LayoutError` unless every element of every target is placed once or declared untouched."""
        by_target: dict[str, list[Placement]] = defaultdict(list)
        # The layers of a model are alike: what differs in names only is checked once.
        fine: set[tuple[object, ...]] = set()
        for p in self.placements:
            like: tuple[object, ...] = ()
            if p.source in schema and p.target in targets:
                spec, info = schema[p.source], targets[p.target]
                like = (
                    spec.dtype,
                    spec.shape,
                    info,
                    self.casts.get(p.target),
                    p.source_box,
                    p.offset,
                    p.strides,
                )
            if like not in fine:
                _check_placement(p, schema, targets, self.casts)
                fine.add(like)
            by_target[p.target].append(p)
        untouched: dict[str, list[Box]] = defaultdict(list)
        for name, box in self.untouched:
            if name not in targets or not Box.full(targets[name].shape).contains(box):
                raise LayoutError(
                    "untouched box leaves its target", kind="placement-outside", where=f"{name!r} {box}"
                )
            untouched[name].append(box)
        for name, info in targets.items():
            _check_target(name, info, by_target[name], untouched[name], schema)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a C-ordered tensor."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return tuple(strides)


def _check_placement(
    placement: Placement, schema: Schema, targets: Mapping[str, TargetInfo], casts: Mapping[str, str]
) -> None:
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
            "source and target differ in dtype; only a declared cast of bfloat16 to float32 is allowed",
            kind="dtype-mismatch",
            where=where,
            expected=declared,
            found=spec.dtype,
        )


def _check_target(
    name: str, info: TargetInfo, placements: list[Placement], untouched: list[Box], schema: Schema
) -> None:
    if 0 in info.shape:
        return
    if any(s < 0 for s in info.strides) or _overlaps_itself(info):
        raise LayoutError(
            "local tensor overlaps itself", kind="target-strides", where=repr(name), found=info.strides
        )
    if len(placements) == 1 and not untouched and _is_whole(placements[0], info):
        return
    unique = {(schema.resolve(p.source).name, p.source_box, p.offset, p.strides): p for p in placements}
    boxes = [_target_box(p.source_box.shape, p.offset, p.strides, info) for p in unique.values()]
    filled = [box for box in boxes if box is not None] + untouched
    if None in boxes or not _tile(filled, info.shape):
        _check_by_bitmap(name, info, list(unique.values()), untouched, schema)


def _overlaps_itself(info: TargetInfo) -> bool:
    """Whether two indices of a strided tensor may share an address (a sufficient test by sorted strides)."""
    reach = 1
    for stride, extent in sorted(zip(info.strides, info.shape, strict=True)):
        if extent > 1:
            if stride < reach:
                return True
            reach = stride * (extent - 1) + reach
    return False


def _is_whole(placement: Placement, info: TargetInfo) -> bool:
    same = placement.source_box.shape == info.shape and placement.strides == info.strides
    return same and placement.offset == 0


def _target_box(
    shape: tuple[int, ...], offset: int, strides: tuple[int, ...], info: TargetInfo
) -> Box | None:
    """The box of the target that a placement fills; None where it is no box, or not seen to be one."""
    start, stop = [0] * len(info.shape), [1] * len(info.shape)
    dims = sorted(range(len(info.shape)), key=lambda d: -info.strides[d])
    rest = offset
    for d in dims:
        start[d] = min(rest // info.strides[d], info.shape[d] - 1) if info.strides[d] else 0
        rest -= start[d] * info.strides[d]
        stop[d] = start[d] + 1
    if rest:
        return None
    taken: set[int] = set()
    for extent, stride in zip(shape, strides, strict=True):
        if extent == 1:
            continue
        found = [d for d in dims if info.strides[d] == stride and info.shape[d] > 1 and d not in taken]
        if not found or start[found[0]] + extent > info.shape[found[0]]:
            return None
        taken.add(found[0])
        stop[found[0]] = start[found[0]] + extent
    return Box(tuple(start), tuple(stop))


def _tile(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    """Whether the boxes cover the shape exactly once (False also where that is not cheap to tell)."""
    if sum(box.volume for box in boxes) != Box.full(shape).volume or len(boxes) > 4096:
        return False
    start = np.array([box.start for box in boxes], np.int64).reshape(len(boxes), -1)
    stop = np.array([box.stop for box in boxes], np.int64).reshape(len(boxes), -1)
    for row in range(len(boxes) - 1):
        meet = ((start[row + 1 :] < stop[row]) & (start[row] < stop[row + 1 :])).all(axis=1)
        if meet.any():
            return False
    return True


def _check_by_bitmap(
    name: str, info: TargetInfo, placements: list[Placement], untouched: list[Box], schema: Schema
) -> None:
    """Mark every address; exact for any strides, and memory bounded by going over the target in windows."""
    own = _addresses(info.shape, info.strides, 0)
    blocks = [_addresses(p.source_box.shape, p.strides, p.offset) for p in placements]
    idle = [
        _addresses(box.shape, info.strides, sum(a * s for a, s in zip(box.start, info.strides, strict=True)))
        for box in untouched
    ]
    identities: list[npt.NDArray[np.int64]] = []
    for p in placements:
        shape = schema[p.source].shape
        strides = contiguous_strides(shape)
        first = sum(a * s for a, s in zip(p.source_box.start, strides, strict=True))
        identities.append(_addresses(p.source_box.shape, strides, first))
    owner = {spec.name: row for row, spec in enumerate(schema)}
    ways: dict[tuple[object, ...], int] = {}
    for low in range(0, info.span, _BITMAP_ELEMENTS):
        size = min(_BITMAP_ELEMENTS, info.span - low)
        source = np.full(size, -1, np.int64)
        flat = np.full(size, -1, np.int64)
        mapped = np.full(size, -1, np.int64)
        for p, addresses, identity in zip(placements, blocks, identities, strict=True):
            here = (addresses >= low) & (addresses < low + size)
            at, row = addresses[here] - low, owner[schema.resolve(p.source).name]
            if len(np.unique(at)) != len(at):
                raise LayoutError(
                    "a placement puts two elements at one address",
                    kind="placement-overlap",
                    where=f"{p.source!r} -> {name!r}",
                )
            # One element at one address is written once if both placements say so by one map; by two maps
            # nobody would notice.
            way = ways.setdefault(_map_of(p), len(ways))
            same = (source[at] == row) & (flat[at] == identity[here]) & (mapped[at] == way)
            clash = (source[at] >= 0) & ~same
            if clash.any():
                address = int(at[clash.argmax()]) + low
                raise LayoutError(
                    "two different elements are placed at one address",
                    kind="placement-overlap",
                    where=f"{name!r}, element {address} from its first; one of them from {p.source!r}",
                )
            source[at], flat[at], mapped[at] = row, identity[here], way
        for addresses in idle:
            at = addresses[(addresses >= low) & (addresses < low + size)] - low
            if (source[at] >= 0).any():
                raise LayoutError(
                    "an element is both placed and declared untouched",
                    kind="placement-overlap",
                    where=repr(name),
                )
            source[at] = len(schema)
        needed = own[(own >= low) & (own < low + size)] - low
        missing = source[needed] < 0
        if missing.any():
            address = int(needed[missing.argmax()]) + low
            raise LayoutError(
                "an element is neither placed nor declared untouched",
                kind="target-unfilled",
                where=f"{name!r}, index {_index(info, address)}",
            )
        source[needed] = -1
        if (source >= 0).any():
            raise LayoutError(
                "a placement fills memory between the target's elements",
                kind="placement-outside",
                where=repr(name),
            )


def _map_of(placement: Placement) -> tuple[object, ...]:
    """The affine map from canonical indices to addresses that a placement is a part of."""
    start = placement.source_box.start
    origin = placement.offset - sum(a * s for a, s in zip(start, placement.strides, strict=True))
    return origin, placement.strides


def _addresses(shape: Sequence[int], strides: Sequence[int], offset: int) -> npt.NDArray[np.int64]:
    result = np.full((1,) * 0, offset, np.int64)
    for extent, stride in zip(shape, strides, strict=True):
        result = result[..., None] + np.arange(extent, dtype=np.int64) * stride
    return result.reshape(-1)


def _index(info: TargetInfo, address: int) -> tuple[int, ...]:
    """The index of a target's element at an address relative to its first element."""
    index = [0] * len(info.shape)
    for d in sorted(range(len(info.shape)), key=lambda d: -info.strides[d]):
        if info.strides[d] and info.shape[d] > 1:
            index[d], address = divmod(address, info.strides[d])
    return tuple(index)
