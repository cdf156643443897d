"""Tilings: the ordered domains into which a schema is cut, and the rule that cuts them."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from deltafmt.dtypes import dtype_of
from deltafmt.errors import FormatError
from deltafmt.geometry import Box
from deltafmt.schema import Schema

if TYPE_CHECKING:
    from deltafmt.layout import Layout

Ints = npt.NDArray[np.int64]

DOMAIN_ELEMENTS = 4 << 20
"""Elements that a domain aims at; packing stops between a quarter of it and all of it."""
MIN_CUT_ELEMENTS = 4096
"""Boxes with one set of readers join a domain with more readers, if there is one, below this many elements."""
_MAX_CELLS = 1 << 16
_MAX_DOMAIN = 2**31 - 1


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
        skip = self.box_start.shape[1] - len(schema.tensors[tensor].shape)
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
        rank = padded_rank(schema)
        flat = [pair for domain in domains for pair in domain]
        pad = [(rank - box.rank) for _, box in flat]
        start = [(0,) * p + box.start for p, (_, box) in zip(pad, flat, strict=True)]
        stop = [(1,) * p + box.stop for p, (_, box) in zip(pad, flat, strict=True)]
        counts = np.array([0, *map(len, domains)], np.int64)
        return cls(
            widths=np.array([schema.tensors[domain[0][0]].width for domain in domains], np.uint8),
            domain_box=np.cumsum(counts),
            box_tensor=np.array([tensor for tensor, _ in flat], np.int64),
            box_start=np.array(start, np.int64).reshape(len(flat), rank),
            box_stop=np.array(stop, np.int64).reshape(len(flat), rank),
        )

    def check(self, schema: Schema, *, where: object = "tiling") -> None:
        """Raise `FormatError` unless the boxes cover every owner's elements exactly once, and widths agree."""
        _check_boxes(self, schema, where)
        _check_cover(self, schema, where)


def padded_rank(schema: Schema) -> int:
    """Columns of a tiling's box arrays."""
    return max((len(spec.shape) for spec in schema), default=1) or 1


def padded_shapes(schema: Schema) -> Ints:
    """Shapes of all tensors, padded in front by ones to one rank; computed once per schema, read-only."""
    shapes: Ints | None = schema.__dict__.get("_padded_shapes")
    if shapes is None:
        rank = padded_rank(schema)
        rows = [(1,) * (rank - len(spec.shape)) + spec.shape for spec in schema]
        shapes = np.array(rows, np.int64).reshape(len(schema), rank)
        shapes.flags.writeable = False
        schema.__dict__["_padded_shapes"] = shapes
    return shapes


def row_major_strides(shapes: Ints) -> Ints:
    """Strides in elements of C-ordered arrays of the given shapes (one per row)."""
    tail = np.cumprod(shapes[:, ::-1], axis=1)[:, ::-1]
    return np.concatenate((tail[:, 1:], np.ones((len(shapes), 1), np.int64)), axis=1)


def make_tiling(
    schema: Schema, *, domain_elements: int = DOMAIN_ELEMENTS, layouts: Sequence[Layout] = ()
) -> Tiling:
    """Cut a schema into domains of about `domain_elements` elements.

    With `layouts` (one per receiving rank) tensors are also cut wherever a placement begins or ends, and
    boxes share a domain only if exactly the same ranks read them, so that a rank reads little but its own
    share. The same arguments always give the same tiling.
    """
    readers = _Readers(layouts)
    packs: dict[tuple[int, int, frozenset[int]], _Pack] = {}
    for row in schema.owners:
        spec = schema.tensors[row]
        if spec.volume == 0:
            continue
        for cell, ranks in readers.cells(spec.name, spec.shape):
            key = (spec.width, spec.element.order_id, ranks)
            pack = packs.setdefault(key, _Pack(domain_elements))
            for box in _pieces(cell, domain_elements):
                pack.add(row, box)
    domains = [domain for pack in _without_dwarfs(packs) for domain in pack.domains]
    return Tiling.of(domains, schema)


class _Pack:
    """Domains under construction for boxes of one width, order and set of readers."""

    def __init__(self, aim: int) -> None:
        self.aim = aim
        self.domains: list[list[tuple[int, Box]]] = []
        self.open_elements = 0
        self.elements = 0

    def add(self, tensor: int, box: Box) -> None:
        volume = box.volume
        full = self.open_elements + volume > self.aim and self.open_elements >= self.aim // 4
        if not self.domains or full or self.open_elements + volume > _MAX_DOMAIN:
            self.domains.append([])
            self.open_elements = 0
        self.domains[-1].append((tensor, box))
        self.open_elements += volume
        self.elements += volume


def _without_dwarfs(packs: dict[tuple[int, int, frozenset[int]], _Pack]) -> list[_Pack]:
    """Packs, those too small to stand alone moved to one that all their readers read anyway."""
    small = [key for key, pack in packs.items() if pack.elements < MIN_CUT_ELEMENTS]
    for key in sorted(small, key=lambda key: (packs[key].elements, sorted(key[2]))):
        homes = [other for other in packs if other[:2] == key[:2] and other[2] > key[2]]
        if not homes:
            # Any other home would make its readers read what they do not need, or these a whole domain.
            continue
        home = min(homes, key=lambda other: (len(other[2]), sorted(other[2])))
        for domain in packs.pop(key).domains:
            for tensor, box in domain:
                packs[home].add(tensor, box)
    return list(packs.values())


class _Readers:
    """Which layouts read which boxes of a tensor."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self.boxes: dict[str, list[tuple[int, Box]]] = defaultdict(list)
        for rank, layout in enumerate(layouts):
            for placement in layout.placements:
                self.boxes[placement.source].append((rank, placement.source_box))

    def cells(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[Box, frozenset[int]]]:
        """Boxes that cover the tensor, each with the set of layouts that read it."""
        full = Box.full(shape)
        read = [(rank, box) for rank, box in self.boxes.get(name, ()) if full.contains(box)]
        cuts = [
            sorted({0, extent, *(c for _, box in read for c in (box.start[d], box.stop[d]))})
            for d, extent in enumerate(shape)
        ]
        if math.prod(len(cut) - 1 for cut in cuts) > _MAX_CELLS:
            yield full, frozenset(rank for rank, _ in read)
            return
        yield from _merged(_grid(cuts), read)


def _grid(cuts: list[list[int]]) -> Iterator[Box]:
    for pairs in itertools.product(*(itertools.pairwise(cut) for cut in cuts)):
        yield Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


def _merged(cells: Iterable[Box], read: list[tuple[int, Box]]) -> list[tuple[Box, frozenset[int]]]:
    """Cells with their readers; neighbours with the same readers become one box, dimension by dimension."""
    labelled = [(cell, frozenset(rank for rank, box in read if box.contains(cell))) for cell in cells]
    rank = labelled[0][0].rank
    for d in reversed(range(rank)):
        labelled.sort(key=lambda item: (item[0].start[:d], item[0].start[d + 1 :], item[0].start[d]))
        joined: list[tuple[Box, frozenset[int]]] = []
        for cell, ranks in labelled:
            if joined and joined[-1][1] == ranks and _touch(joined[-1][0], cell, d):
                joined[-1] = (Box(joined[-1][0].start, cell.stop), ranks)
            else:
                joined.append((cell, ranks))
        labelled = joined
    return sorted(labelled, key=lambda item: item[0].start)


def _touch(left: Box, right: Box, d: int) -> bool:
    aligned = all(
        left.start[k] == right.start[k] and left.stop[k] == right.stop[k] for k in range(left.rank) if k != d
    )
    return aligned and left.stop[d] == right.start[d]


def _pieces(box: Box, aim: int) -> Iterator[Box]:
    """Cut a box along its first dimensions into nearly equal parts of at most `aim` elements."""
    if box.volume <= aim:
        yield box
        return
    d = next(k for k, extent in enumerate(box.shape) if extent > 1)
    extent = box.shape[d]
    parts = min(extent, -(-box.volume // aim))
    # A part takes whole indices of dimension d, so rounding up may need one part more.
    if -(-extent // parts) * (box.volume // extent) > aim:
        parts = min(extent, -(-extent // max(1, aim // (box.volume // extent))))
    borders = [box.start[d] + extent * k // parts for k in range(parts + 1)]
    for a, b in itertools.pairwise(borders):
        part = Box((*box.start[:d], a, *box.start[d + 1 :]), (*box.stop[:d], b, *box.stop[d + 1 :]))
        yield from _pieces(part, aim)


def _check_boxes(tiling: Tiling, schema: Schema, where: object) -> None:
    if len(tiling) and (np.diff(tiling.domain_box) < 1).any():
        raise FormatError("domain without boxes", kind="domain-empty", where=where)
    if ((tiling.box_tensor < 0) | (tiling.box_tensor >= len(schema))).any():
        raise FormatError("box of a tensor that the schema lacks", kind="box-tensor", where=where)
    owner = np.zeros(len(schema), bool)
    owner[list(schema.owners)] = True
    if not owner[tiling.box_tensor].all():
        raise FormatError("box of an alias", kind="box-tensor", where=where)
    shapes = padded_shapes(schema)[tiling.box_tensor]
    inside = (tiling.box_start >= 0) & (tiling.box_start < tiling.box_stop) & (tiling.box_stop <= shapes)
    _refuse(~inside.all(axis=1), "box is empty or leaves its tensor", "box-outside", where)
    # Volumes come from checked boxes only, so that no product can overflow unnoticed.
    exact = np.prod((tiling.box_stop - tiling.box_start).astype(np.float64), axis=1)
    _refuse(exact > _MAX_DOMAIN, "box is larger than a domain may be", "domain-too-large", where)
    sums = np.add.reduceat(exact, tiling.domain_box[:-1]) if len(tiling) else exact
    _refuse(sums > _MAX_DOMAIN, "domain is too large", "domain-too-large", where)
    width = {dtype: dtype_of(dtype).width for dtype in {spec.dtype for spec in schema}}
    widths = np.array([width[spec.dtype] for spec in schema], np.uint8)
    differ = widths[tiling.box_tensor] != tiling.widths[tiling.domains_of_boxes()]
    _refuse(differ, "box of another element width than its domain's", "width-mismatch", where)


def _refuse(bad: npt.NDArray[np.bool_], message: str, kind: str, where: object) -> None:
    if bad.any():
        raise FormatError(message, kind=kind, where=f"{where}, row {int(bad.argmax())}")


def _check_cover(tiling: Tiling, schema: Schema, where: object) -> None:
    owner = np.zeros(len(schema), bool)
    owner[list(schema.owners)] = True
    numel = np.where(owner, padded_shapes(schema).prod(axis=1), 0)
    covered = np.bincount(tiling.box_tensor, tiling.box_volume.astype(np.float64), minlength=len(schema))
    differ = covered != numel
    if differ.any():
        row = int(differ.argmax())
        kind = "tiling-overlap" if covered[row] > numel[row] else "tiling-hole"
        raise FormatError(
            "boxes do not cover the tensor exactly once",
            kind=kind,
            where=f"{where}, {schema.tensors[row].name!r}",
            expected=f"{numel[row]} elements",
            found=int(covered[row]),
        )
    # Sums are equal: what is left to show is that no two boxes of a tensor overlap.
    shapes = padded_shapes(schema)[tiling.box_tensor]
    extents = tiling.box_stop - tiling.box_start
    partial = extents != shapes
    # A box is one run of canonical order if nothing in front of its last partial dimension spans an index.
    last = np.where(partial.any(axis=1), shapes.shape[1] - 1 - partial[:, ::-1].argmax(axis=1), 0)
    dims = np.arange(shapes.shape[1])
    runs = ((extents == 1) | (dims >= last[:, None])).all(axis=1)
    first = (tiling.box_start * row_major_strides(shapes)).sum(axis=1)
    scattered = np.unique(tiling.box_tensor[~runs])
    simple = ~np.isin(tiling.box_tensor, scattered)
    order = np.lexsort((first[simple], tiling.box_tensor[simple]))
    tensor, begin = tiling.box_tensor[simple][order], first[simple][order]
    end = begin + tiling.box_volume[simple][order]
    clash = (tensor[1:] == tensor[:-1]) & (begin[1:] < end[:-1])
    if clash.any():
        _refuse_overlap(schema, int(tensor[1:][clash.argmax()]), where)
    for row in scattered.tolist():
        rows = tiling.box_tensor == row
        if _overlap(tiling.box_start[rows], tiling.box_stop[rows]):
            _refuse_overlap(schema, row, where)


def _refuse_overlap(schema: Schema, row: int, where: object) -> None:
    name = schema.tensors[row].name
    raise FormatError("boxes of the tensor overlap", kind="tiling-overlap", where=f"{where}, {name!r}")


def _overlap(start: Ints, stop: Ints) -> bool:
    """Whether two of the boxes share an element: a sweep along the dimension with the most borders."""
    d = max(range(start.shape[1]), key=lambda k: len(np.unique(start[:, k])))
    order = np.argsort(start[:, d], kind="stable")
    start, stop = start[order], stop[order]
    first, last = start[:, d], stop[:, d]
    for row in range(len(start) - 1):
        end = int(np.searchsorted(first, last[row], side="left"))
        others = slice(row + 1, end)
        meet: Any = (start[others] < stop[row]) & (start[row] < stop[others])
        if meet.all(axis=1).any():
            return True
    return False
