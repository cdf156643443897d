"""Boxes of a view: those that common elements fill, and what they leave."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

from deltafmt.geometry import Box
from deltafmt.tracing.meet import Common, Run, UnsureError

_MOST = 1 << 12


def boxes_of(found: Common) -> Iterator[Box]:
    """The boxes of a view that these elements are: as a rule one."""
    extents = [1] * len(found.start)
    apart: list[Run] = []
    for run in sorted(found.runs, key=lambda run: run.unit):
        if run.unit == extents[run.axis]:
            extents[run.axis] *= run.times
        else:
            apart.append(run)
    if math.prod(run.times for run in apart) > _MOST:
        raise UnsureError("elements stand in too many places")
    for steps in itertools.product(*(range(run.times) for run in apart)):
        start = list(found.start)
        for step, run in zip(steps, apart, strict=True):
            start[run.axis] += step * run.unit
        yield Box(tuple(start), tuple(a + n for a, n in zip(start, extents, strict=True)))


def without(boxes: Iterable[Box], taken: Box) -> list[Box]:
    """Boxes less another one."""
    left = []
    for box in boxes:
        if box.intersect(taken) is None:
            left.append(box)
            continue
        start, stop = list(box.start), list(box.stop)
        for d, (low, high) in enumerate(zip(taken.start, taken.stop, strict=True)):
            if start[d] < low:
                left.append(Box(tuple(start), (*stop[:d], low, *stop[d + 1 :])))
                start[d] = low
            if high < stop[d]:
                left.append(Box((*start[:d], high, *start[d + 1 :]), tuple(stop)))
                stop[d] = high
    if len(left) > _MOST:
        raise UnsureError("what is left is scattered")
    return left
