"""Loops over elements of a canonical tensor and of local memory, made into placements: boxes of the tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from deltafmt.addresses import contiguous_strides
from deltafmt.errors import LayoutError
from deltafmt.geometry import Box
from deltafmt.layout import Placement
from deltafmt.schema import TensorSpec

MOST_PARTS = 1 << 17

Nest = list[tuple[int, int, int]]
"""Loops: (count, step in canonical order, step in local memory)."""


def placements_of(nest: Nest, at: int, place: int, spec: TensorSpec, target: str) -> Iterator[Placement]:
    """The placements of loops from element `at` of a canonical tensor, and element `place` of a target, on."""
    for loop, index, offset in _boxed(nest, at, place, spec.shape, repr(target)):
        start = np.unravel_index(index, spec.shape) if spec.shape else ()
        low = tuple(int(c) for c in start)
        shape, to = [1] * len(spec.shape), [1] * len(spec.shape)
        for dimension, (n, stride) in loop.items():
            shape[dimension], to[dimension] = n, stride
        box = Box(low, tuple(a + n for a, n in zip(low, shape, strict=True)))
        yield Placement(spec.name, box, target, offset, tuple(to))


def too_fine(where: str) -> LayoutError:
    """The error for elements that are scattered."""
    return LayoutError(
        "the loader scatters this tensor's elements; no layout of reasonable size describes it",
        kind="layout-too-fine",
        where=where,
    )


def _boxed(
    nest: Nest, at: int, place: int, shape: tuple[int, ...], where: str
) -> Iterator[tuple[dict[int, tuple[int, int]], int, int]]:
    """Loops along dimensions of the source, from a canonical index and a local place on."""
    inside = contiguous_strides(shape)
    loops: dict[int, tuple[int, int]] = {}
    rest: Nest = []
    for number, (n, step, stride) in enumerate(nest):
        fits = [d for d, extent in enumerate(shape) if extent > 1 and inside[d] == step and d not in loops]
        if not fits:
            rest.append((n, step, stride))
            continue
        d = fits[0]
        room = shape[d] - at // inside[d] % shape[d]
        others = nest[:number] + nest[number + 1 :]
        if n <= room:
            loops[d] = (n, stride)
        elif room == shape[d] and n % room == 0:
            # A dimension that runs on over the next outer one.
            split = [(n // room, step * room, stride * room), (room, step, stride)]
            yield from _boxed(others + split, at, place, shape, where)
            return
        else:
            head = room if room < shape[d] else n // room * room
            yield from _boxed([*others, (head, step, stride)], at, place, shape, where)
            tail = [*others, (n - head, step, stride)]
            yield from _boxed(tail, at + head * step, place + head * stride, shape, where)
            return
    count = math.prod(n for n, _, _ in rest)
    if count > MOST_PARTS:
        raise too_fine(where)
    if not rest:
        yield loops, at, place
        return
    n, step, stride = rest[0]
    along = [(count_, s, t) for d, (count_, t) in loops.items() for s in (inside[d],)]
    for k in range(n):
        yield from _boxed(along + rest[1:], at + k * step, place + k * stride, shape, where)
