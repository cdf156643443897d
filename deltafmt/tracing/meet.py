"""Where a strided view of memory meets a strided piece of it: exact, and without looking at elements.

A view is some loops over addresses, a piece is others; which elements of the view lie in the piece, and
at which of its elements, is again a few sets of loops wherever the strides of both fit into one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Loop(NamedTuple):
    """A loop of a piece: how often, by how far in memory, by how many elements of the source."""

    times: int
    stride: int
    step: int


class Axis(NamedTuple):
    """A loop of a view: how often, by how far in memory, by `unit` along dimension `axis` of the view."""

    times: int
    stride: int
    axis: int
    unit: int


class Run(NamedTuple):
    """A loop that a view and a piece have in common."""

    times: int
    axis: int
    unit: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Elements that a view and a piece share.

    They begin at index `start` of the view, and at element `first` of the source counted from the piece's
    own first one.
    """

    runs: tuple[Run, ...]
    start: tuple[int, ...]
    first: int

    @property
    def volume(self) -> int:
        volume = 1
        for run in self.runs:
            volume *= run.times
        return volume


class UnsureError(Exception):
    """What a loader does cannot be followed by this means; another one is asked."""


class Budget:
    """How much work a trace may be, over all of it."""

    def __init__(self, left: int) -> None:
        self.left = left

    def spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise UnsureError("too many regular parts")


def view_axes(shape: Sequence[int], strides: Sequence[int]) -> tuple[Axis, ...]:
    """The loops of a view, those by the farthest strides first."""
    axes = [Axis(n, m, d, 1) for d, (n, m) in enumerate(zip(shape, strides, strict=True)) if n > 1]
    return tuple(sorted(axes, key=lambda axis: -axis.stride))


def common(
    view: tuple[Axis, ...], at: int, piece: tuple[Loop, ...], dimensions: int, budget: Budget
) -> Iterator[Common]:
    """What a view (of so many dimensions) shares with a piece that begins `at` elements before it.

    Both have their loops by descending strides, and none of the piece's is 0. Raises `UnsureError` where the
    budget runs out.
    """
    repeated = tuple(Run(a.times, a.axis, a.unit, 0) for a in view if a.stride == 0)
    start = (0,) * dimensions
    for runs, shift, first in _meet(tuple(a for a in view if a.stride), at, piece, budget):
        index = list(start)
        for axis, units in shift:
            index[axis] += units
        yield Common(runs=(*runs, *repeated), start=tuple(index), first=first)


Met = tuple[tuple[Run, ...], tuple[tuple[int, int], ...], int]


def _meet(view: tuple[Axis, ...], at: int, piece: tuple[Loop, ...], budget: Budget) -> Iterator[Met]:
    budget.spend()
    if at > _reach(piece) or at + _reach(view) < 0:
        return
    if not view and not piece:
        if at == 0:
            yield (), (), 0
    elif not piece or (view and view[0].stride > piece[0].stride):
        yield from _view_first(view, at, piece, budget)
    elif not view or piece[0].stride > view[0].stride:
        yield from _piece_first(view, at, piece, budget)
    else:
        yield from _both(view, at, piece, budget)


def _reach(loops: Sequence[Loop | Axis]) -> int:
    return sum((loop.times - 1) * loop.stride for loop in loops)


def _both(view: tuple[Axis, ...], at: int, piece: tuple[Loop, ...], budget: Budget) -> Iterator[Met]:
    """The outermost strides are the same: block i of the view lies in block i + q of the piece."""
    (n, stride, axis, unit), (count, _, step) = view[0], piece[0]
    inner, room = _reach(view[1:]), _reach(piece[1:])
    for q in range(-(-(at - room) // stride), (at + inner) // stride + 1):
        low, high = max(0, -q), min(n, count - q)
        if low >= high:
            continue
        for runs, shift, first in _meet(view[1:], at - q * stride, piece[1:], budget):
            run = (Run(high - low, axis, unit, step),) if high - low > 1 else ()
            yield (*run, *runs), ((axis, low * unit), *shift), first + (low + q) * step


def _view_first(view: tuple[Axis, ...], at: int, piece: tuple[Loop, ...], budget: Budget) -> Iterator[Met]:
    """The view's outermost stride is the farther one: the piece is cut into blocks of it, or the view opened."""
    n, stride, axis, unit = view[0]
    if piece and stride % piece[0].stride == 0 and piece[0].times > stride // piece[0].stride:
        count, small, step = piece[0]
        block = stride // small
        for low, part in _blocks(count, at // small % block, block):
            loops = tuple(Loop(c, s * small, s * step) for c, s in part if c > 1)
            for runs, shift, first in _meet(view, at - low * small, (*loops, *piece[1:]), budget):
                yield runs, shift, first + low * step
        return
    for i in range(
        max(0, -(-(-_reach(view[1:]) - at) // stride)), min(n, (_reach(piece) - at) // stride + 1)
    ):
        for runs, shift, first in _meet(view[1:], at + i * stride, piece, budget):
            yield runs, ((axis, i * unit), *shift), first


def _piece_first(view: tuple[Axis, ...], at: int, piece: tuple[Loop, ...], budget: Budget) -> Iterator[Met]:
    """The piece's outermost stride is the farther one."""
    count, stride, step = piece[0]
    if view and stride % view[0].stride == 0 and view[0].times > stride // view[0].stride:
        n, small, axis, unit = view[0]
        block = stride // small
        for low, part in _blocks(n, -(at // small) % block, block):
            axes = tuple(Axis(c, s * small, axis, s * unit) for c, s in part if c > 1)
            for runs, shift, first in _meet((*axes, *view[1:]), at + low * small, piece, budget):
                yield runs, ((axis, low * unit), *shift), first
        return
    inner = _reach(piece[1:])
    for k in range(max(0, -(-(at - inner) // stride)), min(count, (at + _reach(view)) // stride + 1)):
        for runs, shift, first in _meet(view, at - k * stride, piece[1:], budget):
            yield runs, shift, first + k * step


def _blocks(count: int, head: int, block: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """`count` things as those before the first whole block, whole blocks, and the rest: (first, loops)."""
    head = min(head, count)
    whole = (count - head) // block
    if head:
        yield 0, [(head, 1)]
    if whole:
        yield head, [(whole, block), (block, 1)]
    if count - head - whole * block:
        yield head + whole * block, [(count - head - whole * block, 1)]
