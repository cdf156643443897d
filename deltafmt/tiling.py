"""Tilings: the ordered domains into which a schema is cut, and the rule that cuts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from deltafmt.cells import cut
from deltafmt.geometry import Box
from deltafmt.packing import pack
from deltafmt.schema import Schema
from deltafmt.tiling_check import check_boxes, check_cover

if TYPE_CHECKING:
    from deltafmt.layout import Layout

Ints = npt.NDArray[np.int64]

DOMAIN_ELEMENTS = 4 << 20
"""Elements that a domain aims at; packing stops between a quarter of it and all of it."""
_MAX_AIM = 1 << 30
"""A domain may be half as large again, and must stay below 2^31 elements."""


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Domains as columns.

    Boxes of domain `d` are the rows `domain_box[d]:domain_box[d + 1]` of the box arrays. `box_start` and
    `box_stop` have shape (boxes, rank of the schema's widest tensor, at least 1); tensors of lower rank are
    padded in front by `[0, 1)`, which changes neither volume nor row-major order.
    """

    widths: npt.NDArray[np.uint8]
    domain_box: Ints
    box_tensor: Ints
    box_start: Ints
    box_stop: Ints
    box_volume: Ints = field(init=False)
    box_position: Ints = field(init=False)
    volume: Ints = field(init=False)

    def __post_init__(self) -> None:
        box_volume = np.prod(self.box_stop - self.box_start, axis=1, dtype=np.int64)
        before = np.concatenate(([0], np.cumsum(box_volume)))
        first = before[self.domain_box]
        counts = np.diff(self.domain_box)
        object.__setattr__(self, "box_volume", box_volume)
        object.__setattr__(self, "volume", np.diff(first))
        object.__setattr__(self, "box_position", before[:-1] - np.repeat(first[:-1], counts))

    def __len__(self) -> int:
        return len(self.widths)

    def box_rows(self, domain: int) -> range:
        """Rows of the domain's boxes."""
        return range(int(self.domain_box[domain]), int(self.domain_box[domain + 1]))

    def box(self, row: int, schema: Schema) -> tuple[int, Box]:
        """(row of the tensor, box) of one box row."""
        tensor = int(self.box_tensor[row])
        skip = self.box_start.shape[1] - len(schema.shapes[tensor])
        return tensor, Box(
            tuple(self.box_start[row, skip:].tolist()), tuple(self.box_stop[row, skip:].tolist())
        )

    def boxes(self, domain: int, schema: Schema) -> list[tuple[int, Box]]:
        """The domain's boxes in order of position."""
        return [self.box(row, schema) for row in self.box_rows(domain)]

    def domains_of_boxes(self) -> Ints:
        """The domain of each box row."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.domain_box))

    @classmethod
    def of(cls, domains: Sequence[Sequence[tuple[int, Box]]], schema: Schema) -> Tiling:
        """A tiling from explicit lists of (tensor row, box), not checked."""
        rank = schema.padded_shapes.shape[1]
        flat = [pair for domain in domains for pair in domain]
        pad = [(rank - box.rank) for _, box in flat]
        start = [(0,) * p + box.start for p, (_, box) in zip(pad, flat, strict=True)]
        stop = [(1,) * p + box.stop for p, (_, box) in zip(pad, flat, strict=True)]
        counts = np.array([0, *map(len, domains)], np.int64)
        return cls(
            widths=schema.widths[[domain[0][0] for domain in domains]],
            domain_box=np.cumsum(counts),
            box_tensor=np.array([tensor for tensor, _ in flat], np.int64),
            box_start=np.array(start, np.int64).reshape(len(flat), rank),
            box_stop=np.array(stop, np.int64).reshape(len(flat), rank),
        )

    def check(self, schema: Schema, *, where: object = "tiling") -> None:
        """Raise `FormatError` unless the boxes cover every owner's elements exactly once, and widths agree."""
        check_boxes(self, schema, where)
        check_cover(self, schema, where)


def make_tiling(
    schema: Schema, *, domain_elements: int = DOMAIN_ELEMENTS, layouts: Sequence[Layout] = ()
) -> Tiling:
    """Cut a schema into domains of about `domain_elements` elements.

    With `layouts` (one per receiving rank) tensors are also cut wherever a placement begins or ends, and
    boxes share a domain only if exactly the same ranks read them, so that a rank reads little but its own
    share. The same arguments always give the same tiling.

    >>> from deltafmt.schema import TensorSpec
    >>> schema = Schema((TensorSpec("w", "bfloat16", (100, 64)), TensorSpec("b", "bfloat16", (64,))))
    >>> make_tiling(schema, domain_elements=3200).volume.tolist()
    [3200, 3264]
    """
    return make_shared_tiling(schema, domain_elements=domain_elements, writers=(), layouts=layouts)[0]


def make_shared_tiling(
    schema: Schema, *, domain_elements: int, writers: Sequence[Layout], layouts: Sequence[Layout]
) -> tuple[Tiling, list[int]]:
    """`make_tiling`, also cut wherever what one of the `writers` holds begins or ends, however small that is.

    The list says for each domain who holds all of it: bit k stands for writer k; no other holds a part.
    """
    aim = max(1, min(domain_elements, _MAX_AIM))
    both = [*writers, *layouts]
    pieces = cut(schema, both, aim=aim, rank=schema.padded_shapes.shape[1], exact=bool(writers))
    keys = schema.of_dtypes(lambda dtype: 2 * dtype.width + dtype.order_id)
    volume = np.prod(pieces.stop - pieces.start, axis=1, dtype=np.int64)
    everyone = (1 << len(writers)) - 1
    number: dict[int, int] = {}
    held = [number.setdefault(readers & everyone, len(number)) for readers in pieces.sets]
    holders = np.array(held, np.int64)[pieces.readers]
    # Writers never share a domain with others than its holders; who reads along is a matter of bytes.
    apart = keys[pieces.tensor] * max(1, len(number)) + holders
    reading = replace(pieces, sets=[readers >> len(writers) for readers in pieces.sets])
    order, domain_box = pack(reading, volume, apart, aim=aim)
    tensor = pieces.tensor[order]
    tiling = Tiling(
        widths=schema.widths[tensor[domain_box[:-1]]],
        domain_box=domain_box,
        box_tensor=tensor,
        box_start=pieces.start[order],
        box_stop=pieces.stop[order],
    )
    sets = list(number)
    return tiling, [sets[k] for k in holders[order][domain_box[:-1]].tolist()]
