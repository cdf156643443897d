"""Maps from local elements to numbers of canonical ones, cut into regular parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltafmt.errors import LayoutError
from deltafmt.geometry import Box
from deltafmt.schema import Schema
from deltafmt.tracing.nests import MOST_PARTS, too_fine

Ints = npt.NDArray[np.int64]

NOTHING = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A box of a local tensor whose elements' numbers grow by one step along each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    first: int
    steps: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(self.start, tuple(a + n for a, n in zip(self.start, self.shape, strict=True)))


class Numbers:
    """The numbers of all canonical elements: those of each owner one behind another, with gaps between them.

    Tensors of bool come first: their elements carry few bits.
    """

    def __init__(self, schema: Schema) -> None:
        self.rows = sorted(schema.owners, key=lambda row: schema.tensors[row].dtype != "bool")
        self.schema = schema
        volumes = [schema.tensors[row].volume + 2 for row in self.rows]
        self.firsts = np.cumsum([2, *volumes])
        self.bits = max(1, int(self.firsts[-1]).bit_length())
        bools = sum(schema.tensors[row].dtype == "bool" for row in self.rows)
        self.bool_bits = int(self.firsts[bools]).bit_length() if bools else 0
        self._first = dict(zip(self.rows, self.firsts.tolist(), strict=False))

    def first_of(self, row: int) -> int:
        """The number of the first element of an owner."""
        return int(self._first[row])

    def row_of(self, low: int, high: int) -> int | None:
        """The tensor that has both numbers; None unless one has."""
        at = int(np.searchsorted(self.firsts, low, "right")) - 1
        if at < 0 or at >= len(self.rows):
            return None
        row = self.rows[at]
        return row if high < self.firsts[at] + self.schema.tensors[row].volume else None


def regular_parts(numbers: Ints, known: Numbers, where: str) -> Iterator[Part]:
    """Cut a map (in a local tensor's shape; `NOTHING` where no canonical element stands) into regular parts."""
    waiting: list[tuple[tuple[int, ...], Ints]] = [((0,) * numbers.ndim, numbers)]
    count = 0
    while waiting:
        start, here = waiting.pop()
        part = _regular(start, here, known)
        if part is None and here.size == 1:
            raise impure(where, "an element that is in no tensor of the schema")
        if part is None:
            waiting += [
                (tuple(a + b for a, b in zip(start, shift, strict=True)), piece)
                for shift, piece in _cut(here, known)
            ]
        else:
            yield part
        count += 1
        if count > MOST_PARTS:
            raise too_fine(where)


def impure(where: str, what: str) -> LayoutError:
    """The error for a loader that is more than one."""
    return LayoutError(
        f"the loader does something else than moving elements: {what}", kind="trace-impure", where=where
    )


def _regular(start: tuple[int, ...], numbers: Ints, known: Numbers) -> Part | None:
    first = int(numbers[(0,) * numbers.ndim])
    steps, low, high = [], first, first
    expected = np.array(first, np.int64)
    for axis, extent in enumerate(numbers.shape):
        index = [0] * numbers.ndim
        index[axis] = min(1, extent - 1)
        step = int(numbers[tuple(index)]) - first
        steps.append(step)
        low, high = low + min(0, step) * (extent - 1), high + max(0, step) * (extent - 1)
        along = np.arange(extent, dtype=np.int64) * step
        expected = expected + along.reshape([-1 if a == axis else 1 for a in range(numbers.ndim)])
    one = (first == NOTHING and low == high) or (low > NOTHING and known.row_of(low, high) is not None)
    if not one or (numbers != expected).any():
        return None
    return Part(start=start, shape=numbers.shape, first=first, steps=tuple(steps))


def _cut(numbers: Ints, known: Numbers) -> list[tuple[tuple[int, ...], Ints]]:
    """Parts along the axis that has the fewest of them; two halves where no axis tells where to cut.

    What comes from different tensors is taken apart first.
    """
    best = _fewest(_of_tensors(numbers, axis, known) for axis in range(numbers.ndim))
    if best is None:
        best = _fewest(_borders(numbers, axis) for axis in range(numbers.ndim))
    if best is None:
        axis = int(np.argmax(numbers.shape))
        best = axis, [numbers.shape[axis] // 2]
    axis, borders = best
    edges = [0, *borders, numbers.shape[axis]]
    parts = []
    for low, high in itertools.pairwise(edges):
        index = tuple(slice(low, high) if a == axis else slice(None) for a in range(numbers.ndim))
        parts.append((tuple(low if a == axis else 0 for a in range(numbers.ndim)), numbers[index]))
    return parts


def _fewest(found: Iterable[list[int]]) -> tuple[int, list[int]] | None:
    """The axis with the fewest borders, of those that have any."""
    some = [(len(borders), axis, borders) for axis, borders in enumerate(found) if borders]
    return min(some)[1:] if some else None


def _of_tensors(numbers: Ints, axis: int, known: Numbers) -> list[int]:
    """Where another tensor begins on the axis's first line."""
    line = numbers[tuple(slice(None) if a == axis else 0 for a in range(numbers.ndim))]
    tensor = np.searchsorted(known.firsts, line, "right")
    return (np.flatnonzero(tensor[1:] != tensor[:-1]) + 1).tolist()


def _borders(numbers: Ints, axis: int) -> list[int]:
    """Where the step from one slab to the next is another than before."""
    if numbers.shape[axis] < 2:
        return []
    slabs = np.moveaxis(numbers, axis, 0).reshape(numbers.shape[axis], -1)
    step = slabs[1:] - slabs[:-1]
    differs = (step[1:] != step[:-1]).any(axis=1)
    borders, j = [], 0
    breaks = np.flatnonzero(differs) + 1
    for at in breaks.tolist():
        if at < j:
            continue
        borders.append(at + 1)
        j = at + 2
    return [border for border in borders if border < numbers.shape[axis]]
