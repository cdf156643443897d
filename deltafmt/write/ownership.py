"""Who of several ranks stores what: from what each rank holds to a tiling and one owner for every domain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from deltafmt.errors import IncompleteError, LayoutError, SchemaError
from deltafmt.format.ranks import answer_of, holding_digest
from deltafmt.geometry import Box
from deltafmt.layout import Layout, Placement, TargetInfo
from deltafmt.schema import Schema, TensorSpec
from deltafmt.segments import make_segments
from deltafmt.tiling import Tiling, make_shared_tiling

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Holding:
    """What one rank holds: the tensors that it knows of, and (owner's name, box) of its parts of them.

    `is_whole` says that these are all of them, one by one.
    """

    schema: Schema
    boxes: tuple[tuple[str, Box], ...]
    is_whole: bool = False

    @cached_property
    def digest(self) -> bytes:
        """Names the holding: equal ones have equal digests."""
        return holding_digest(answer_of(self.schema, self.boxes, attempt=bytes(16), writer=0))

    @classmethod
    def whole(cls, schema: Schema, names: Iterable[str]) -> Holding:
        """Whole tensors by name."""
        owners = dict.fromkeys(schema.resolve(name).name for name in names)
        boxes = tuple((name, Box.full(schema[name].shape)) for name in owners)
        return cls(schema, boxes, is_whole=len(owners) == len(schema.owners))

    @classmethod
    def placed(cls, schema: Schema, layout: Layout) -> Holding:
        """What a layout places."""
        pairs = ((schema.resolve(p.source).name, p.source_box) for p in layout.placements)
        return cls(schema, tuple(dict.fromkeys(pairs)))

    def check(self, where: str) -> None:
        """Raise `LayoutError` for a box that is not of a tensor of the schema."""
        for name, box in self.boxes:
            if name not in self.schema or not Box.full(self.schema[name].shape).contains(box):
                raise LayoutError(
                    "a rank holds what its schema lacks",
                    kind="placement-outside",
                    where=f"{where}, {name!r}",
                    expected=self.schema[name].shape if name in self.schema else None,
                    found=box,
                )

    def layout(self) -> Layout:
        """The boxes as placements, of which only the sources mean something."""
        return Layout(Placement(name, box, "", 0, (0,) * box.rank) for name, box in self.boxes if box.volume)

    def domains(self, schema: Schema, tiling: Tiling) -> Ints:
        """The domains of a tiling, in which this holding's borders are cut, that it holds."""
        return np.flatnonzero(make_segments(schema, tiling, self.layout(), {"": TargetInfo("", (), ())}).full)


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """A schema and its tiling; the lowest rank that holds it owns a domain, `holders` ranks have it."""

    schema: Schema
    tiling: Tiling
    owner: Ints
    holders: Ints


def share_out(
    holdings: Sequence[Holding], *, domain_elements: int, layouts: Sequence[Layout] = ()
) -> Ownership:
    """Give every element of the ranks' common schema to the lowest rank that holds it.

    Pure and the same for the same arguments. `layouts` are those of receivers, as in `make_tiling`. Raises
    `SchemaError` where ranks know a tensor differently, `LayoutError` for parts that leave their tensors, and
    `IncompleteError` (`element-unowned`) for an element that no rank holds.
    """
    for rank, holding in enumerate(holdings):
        holding.check(f"rank {rank}")
    schema = common_schema([holding.schema for holding in holdings])
    writers = [holding.layout() for holding in holdings]
    tiling, sets = make_shared_tiling(
        schema, domain_elements=domain_elements, writers=writers, layouts=layouts
    )
    if 0 in sets:
        tensor, box = tiling.box(int(tiling.domain_box[sets.index(0)]), schema)
        raise IncompleteError(
            "no rank holds this part of a tensor, and a version needs all of it",
            kind="element-unowned",
            where=f"{schema.tensors[tensor].name!r} {box.start} to {box.stop}",
        )
    return Ownership(
        schema=schema,
        tiling=tiling,
        owner=np.array([(holders & -holders).bit_length() - 1 for holders in sets], np.int64),
        holders=np.array([holders.bit_count() for holders in sets], np.int64),
    )


def common_schema(schemas: Sequence[Schema]) -> Schema:
    """All tensors that some rank knows, in order of first mention; one name is one tensor to all of them."""
    if all(schema is schemas[0] or schema == schemas[0] for schema in schemas):
        return schemas[0]
    found: dict[str, tuple[int, TensorSpec]] = {}
    for rank, schema in enumerate(schemas):
        for spec in schema:
            first, known = found.setdefault(spec.name, (rank, spec))
            if known != spec:
                raise SchemaError(
                    "two ranks know one tensor differently",
                    kind="schema-differs",
                    where=f"{spec.name!r}, ranks {first} and {rank}",
                    expected=_shown(known),
                    found=_shown(spec),
                )
    return Schema(tuple(spec for _, spec in found.values()))


def _shown(spec: TensorSpec) -> str:
    tie = "" if spec.alias_of is None else f", tied to {spec.alias_of!r}"
    return f"{spec.dtype} {spec.shape}{tie}"
