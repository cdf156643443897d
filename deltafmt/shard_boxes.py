"""Which canonical boxes one part of a tensor is made of, when it was cut as torch's sharded objects are cut."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from deltafmt.geometry import Box

Runs = list[tuple[int, int]]
"""(first canonical index, length) along one dimension, in the order in which they stand in the local tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """One cut of a dimension into `parts`, of which part `index` is held.

    The dimension is first cut into `factor` stretches, and each of these into `parts`; a rank holds its part
    of every stretch, one behind another. Parts are rounded up, so that the last ones may be short or empty.
    """

    dim: int
    parts: int
    index: int
    factor: int = 1


def held_boxes(shape: Sequence[int], slicings: Iterable[Slicing]) -> list[tuple[Box, tuple[int, ...]]]:
    """(canonical box, index in the local tensor where it begins) of what is left after all slicings, in order.

    >>> held_boxes((5, 3), [Slicing(dim=0, parts=4, index=2)])
    [(Box(start=(4, 0), stop=(5, 3)), (0, 0))]
    """
    found = []
    for corner in itertools.product(*(_placed(runs) for runs in _runs(shape, slicings))):
        start, length, place = ([axis[k] for axis in corner] for k in range(3))
        stop = (a + n for a, n in zip(start, length, strict=True))
        found.append((Box(tuple(start), tuple(stop)), tuple(place)))
    return found


def held_shape(shape: Sequence[int], slicings: Iterable[Slicing]) -> tuple[int, ...]:
    """Shape of the local tensor that the slicings leave."""
    return tuple(sum(length for _, length in runs) for runs in _runs(shape, slicings))


def _runs(shape: Sequence[int], slicings: Iterable[Slicing]) -> list[Runs]:
    along: list[Runs] = [[(0, size)] if size else [] for size in shape]
    for slicing in slicings:
        runs = along[slicing.dim]
        stretches = [_part(runs, slicing.factor, k) for k in range(slicing.factor)]
        parts = [_part(stretch, slicing.parts, slicing.index) for stretch in stretches]
        along[slicing.dim] = _joined(itertools.chain.from_iterable(parts))
    return along


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that elements `[start, stop)` of a tensor in row-major order are made of, in that order.

    >>> [box.shape for box in flat_boxes((4, 3), 2, 10)]
    [(1, 1), (2, 3), (1, 1)]
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        yield from _in_row(shape, last, start, stop)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield Box((first, *(0,) * (len(shape) - 1)), (last, *shape[1:]))
    if last * row < stop:
        yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Box]:
    row = math.prod(shape[1:])
    for box in flat_boxes(shape[1:], start - index * row, stop - index * row):
        yield Box((index, *box.start), (index + 1, *box.stop))


def _part(runs: Runs, parts: int, index: int) -> Runs:
    """One of several parts, rounded up, of runs laid end to end."""
    total = sum(length for _, length in runs)
    size = -(-total // parts)
    low, high = min(index * size, total), min((index + 1) * size, total)
    found, before = [], 0
    for start, length in runs:
        a, b = max(low - before, 0), min(high - before, length)
        if a < b:
            found.append((start + a, b - a))
        before += length
    return found


def _joined(runs: Iterable[tuple[int, int]]) -> Runs:
    found: Runs = []
    for start, length in runs:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((start, length))
    return found


def _placed(runs: Runs) -> Iterator[tuple[int, int, int]]:
    place = 0
    for start, length in runs:
        yield start, length, place
        place += length
