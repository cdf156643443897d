"""Layouts: where canonical elements stand in somebody's local tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deltafmt.addresses import contiguous_strides
from deltafmt.errors import LayoutError
from deltafmt.geometry import Box
from deltafmt.layout_check import check_placement, check_target
from deltafmt.schema import Schema, TensorSpec


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
                    "no stored tensor fills this local tensor; give a layout, or its stored name",
                    kind="target-unfilled",
                    where=repr(name),
                    expected=_some_of(schema.names),
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
                check_placement(p, schema, targets, self.casts)
                fine.add(like)
            by_target[p.target].append(p)
        untouched: dict[str, list[Box]] = defaultdict(list)
        for name, box in self.untouched:
            if name not in targets or not Box.full(targets[name].shape).contains(box):
                raise LayoutError(
                    "untouched box leaves its target", kind="placement-outside", where=f"{name!r} {box}"
                )
            untouched[name].append(box)
        for name in self.casts.keys() - targets.keys():
            raise LayoutError(
                "cast of a local tensor that was not given", kind="name-unknown", where=repr(name)
            )
        for name, info in targets.items():
            check_target(name, info, by_target[name], untouched[name], schema)


def _some_of(names: tuple[str, ...]) -> str:
    """The first of some names, by which another prefix or another model is seen at a glance."""
    more = "" if len(names) <= 3 else f" and {len(names) - 3:,} more"
    return f"one of {', '.join(map(repr, names[:3]))}{more}"
