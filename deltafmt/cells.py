"""Tensors cut where receivers' placements begin and end: boxes, each with the set of layouts that read it."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from deltafmt.errors import LayoutError
from deltafmt.joins import expanded
from deltafmt.schema import Schema

if TYPE_CHECKING:
    from deltafmt.layout import Layout

Ints = npt.NDArray[np.int64]
Shape = tuple[int, ...]
Read = tuple[int, Shape, Shape]
"""(number of the layout, start, stop) of a box that it reads."""

_MAX_CELLS = 1 << 16
_MAX_EXACT_CELLS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Boxes that cover a schema's owners once, tensor by tensor, none of them larger than the aim.

    `start` and `stop` are padded in front to one rank. `readers` is a row of `sets`, where bit k stands for
    layout k.
    """

    tensor: Ints
    start: Ints
    stop: Ints
    readers: Ints
    sets: list[int]


def cut(schema: Schema, layouts: Sequence[Layout], *, aim: int, rank: int, exact: bool = False) -> Pieces:
    """Cut every tensor at the layouts' borders and then into nearly equal parts of at most `aim` elements.

    A tensor with very many borders is not cut at them, or with `exact` refused (`LayoutError`).
    The layers of a model are alike: what one shape with one set of reads gives is computed once.
    """
    reads = _reads(schema, layouts)
    templates: dict[tuple[Shape, tuple[Read, ...]], int] = {}
    parts: list[tuple[Ints, Ints, Ints]] = []
    sets: dict[int, int] = {}
    rows, chosen = [], []
    for row in schema.owners:
        shape = schema.shapes[row]
        if 0 in shape:
            continue
        key = (shape, tuple(dict.fromkeys(reads.get(row, ()))))
        if key not in templates:
            templates[key] = len(parts)
            name = schema.tensors[row].name if exact else None
            parts.append(_template(*key, aim=aim, rank=rank, sets=sets, exact=name))
        rows.append(row)
        chosen.append(templates[key])
    if not rows:
        none = np.zeros(0, np.int64)
        return Pieces(
            tensor=none, start=none.reshape(0, rank), stop=none.reshape(0, rank), readers=none, sets=[]
        )
    counts = np.array([len(readers) for _, _, readers in parts])
    first = np.cumsum(counts) - counts
    of, piece = expanded(first[chosen], counts[chosen])
    start, stop, readers = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return Pieces(
        tensor=np.array(rows, np.int64)[of],
        start=start[piece],
        stop=stop[piece],
        readers=readers[piece],
        sets=list(sets),
    )


def _reads(schema: Schema, layouts: Sequence[Layout]) -> dict[int, list[Read]]:
    owners = dict(zip(schema.names, schema.owner_rows.tolist(), strict=True)) if layouts else {}
    reads: dict[int, list[Read]] = defaultdict(list)
    for number, layout in enumerate(layouts):
        for placement in layout.placements:
            # A hint may speak of tensors of another version's schema.
            if placement.source in owners:
                box = placement.source_box
                reads[owners[placement.source]].append((number, box.start, box.stop))
    return reads


def _template(
    shape: Shape, reads: tuple[Read, ...], *, aim: int, rank: int, sets: dict[int, int], exact: str | None
) -> tuple[Ints, Ints, Ints]:
    """(start, stop, readers) of one tensor's pieces; `sets` numbers the sets of readers and grows.

    `exact` names the tensor if it must be cut at all borders.
    """
    pieces = [
        (*piece, sets.setdefault(readers, len(sets)))
        for start, stop, readers in _cells(shape, reads, exact)
        for piece in _pieces(start, stop, aim)
    ]
    pad = rank - len(shape)
    start = np.array([(0,) * pad + start for start, _, _ in pieces], np.int64).reshape(-1, rank)
    stop = np.array([(1,) * pad + stop for _, stop, _ in pieces], np.int64).reshape(-1, rank)
    return start, stop, np.array([readers for _, _, readers in pieces], np.int64)


def _cells(shape: Shape, reads: tuple[Read, ...], exact: str | None) -> Iterator[tuple[Shape, Shape, int]]:
    """Boxes that cover the tensor, each with its readers, neighbours with the same readers joined."""
    reads = tuple(read for read in reads if _fits(shape, read))
    cuts = [
        sorted({0, extent, *(c for _, start, stop in reads for c in (start[d], stop[d]))})
        for d, extent in enumerate(shape)
    ]
    grid = tuple(len(borders) - 1 for borders in cuts)
    everyone = 0
    for number, _, _ in reads:
        everyone |= 1 << number
    if exact is not None and math.prod(grid) > _MAX_EXACT_CELLS:
        raise LayoutError(
            "the ranks' borders cut this tensor into too many parts; let fewer ranks publish it",
            kind="layout-too-fine",
            where=repr(exact),
            expected=f"at most {_MAX_EXACT_CELLS}",
            found=math.prod(grid),
        )
    if math.prod(grid) == 1 or (exact is None and math.prod(grid) > _MAX_CELLS):
        yield (0,) * len(shape), shape, everyone
        return
    index = [{border: k for k, border in enumerate(borders)} for borders in cuts]
    numbers = sorted({number for number, _, _ in reads})
    reader = {number: k for k, number in enumerate(numbers)}
    member = np.zeros((*grid, len(numbers)), bool)
    for number, start, stop in reads:
        cells = tuple(slice(i[a], i[b]) for i, a, b in zip(index, start, stop, strict=True))
        member[..., reader[number]][cells] = True
    flags, label = np.unique(member.reshape(-1, len(numbers)), axis=0, return_inverse=True)
    readers = [sum(1 << n for n, flag in zip(numbers, row, strict=True) if flag) for row in flags.tolist()]
    low = np.stack(np.meshgrid(*(c[:-1] for c in cuts), indexing="ij"), axis=-1).reshape(-1, len(shape))
    high = np.stack(np.meshgrid(*(c[1:] for c in cuts), indexing="ij"), axis=-1).reshape(-1, len(shape))
    label = label.reshape(-1)
    for d in reversed(range(len(shape))):
        low, high, label = _joined(low, high, label, d)
    order = np.lexsort(low.T[::-1])
    for start_row, stop_row, k in zip(
        low[order].tolist(), high[order].tolist(), label[order].tolist(), strict=True
    ):
        yield tuple(start_row), tuple(stop_row), readers[k]


def _fits(shape: Shape, read: Read) -> bool:
    _, start, stop = read
    return len(start) == len(shape) and all(a < b <= n for a, b, n in zip(start, stop, shape, strict=True))


def _joined(start: Ints, stop: Ints, label: Ints, d: int) -> tuple[Ints, Ints, Ints]:
    """Boxes with one label that touch along dimension `d` and agree in all others become one."""
    others = [k for k in range(start.shape[1]) if k != d]
    order = np.lexsort((start[:, d], *(start[:, k] for k in others)))
    start, stop, label = start[order], stop[order], label[order]
    joins = (label[1:] == label[:-1]) & (start[1:, d] == stop[:-1, d])
    joins &= (start[1:, others] == start[:-1, others]).all(axis=1)
    joins &= (stop[1:, others] == stop[:-1, others]).all(axis=1)
    heads = np.flatnonzero(np.concatenate(([True], ~joins)))
    tails = np.append(heads[1:], len(start)) - 1
    ends = stop[heads]
    ends[:, d] = stop[tails, d]
    return start[heads], ends, label[heads]


def _pieces(start: Shape, stop: Shape, aim: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut a box along its first dimensions into nearly equal parts of at most `aim` elements."""
    extents = [b - a for a, b in zip(start, stop, strict=True)]
    volume = math.prod(extents)
    if volume <= aim:
        yield start, stop
        return
    d = next(k for k, extent in enumerate(extents) if extent > 1)
    extent, inner = extents[d], volume // extents[d]
    parts = min(extent, -(-volume // aim))
    # A part takes whole indices of dimension d, so rounding up may need some parts more.
    if -(-extent // parts) * inner > aim:
        parts = min(extent, -(-extent // max(1, aim // inner)))
    borders = [start[d] + extent * k // parts for k in range(parts + 1)]
    for a, b in itertools.pairwise(borders):
        yield from _pieces((*start[:d], a, *start[d + 1 :]), (*stop[:d], b, *stop[d + 1 :]), aim)
