"""Memory that holds elements of canonical tensors, known as strided pieces."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from deltafmt.geometry import Box
from deltafmt.tracing.boxes import boxes_of, without
from deltafmt.tracing.meet import Axis, Budget, Common, Loop, Run, common, view_axes


class View(NamedTuple):
    """A strided window on memory, all in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements of one tensor, from its element `first` on, that stand from `offset` on.

    The loops go by descending strides, and no two of them could be one.
    """

    loops: tuple[Loop, ...]
    offset: int
    row: int
    first: int

    @classmethod
    def of(cls, loops: Iterable[Loop], offset: int, row: int, first: int) -> Piece:
        """A piece of loops in any order."""
        merged: list[Loop] = []
        for loop in sorted(loops, key=lambda loop: -loop.stride):
            if loop.times == 1:
                continue
            if merged:
                outer = merged[-1]
                if (outer.stride, outer.step) == (loop.times * loop.stride, loop.times * loop.step):
                    merged[-1] = Loop(outer.times * loop.times, loop.stride, loop.step)
                    continue
            merged.append(loop)
        return cls(loops=tuple(merged), offset=offset, row=row, first=first)

    @classmethod
    def whole(cls, count: int, row: int, first: int) -> Piece:
        """So many elements one behind another, from the beginning on."""
        return cls.of([Loop(count, 1, 1)], 0, row, first)

    @property
    def volume(self) -> int:
        volume = 1
        for loop in self.loops:
            volume *= loop.times
        return volume

    @property
    def reach(self) -> int:
        """How far the last element stands behind the first one."""
        return sum((loop.times - 1) * loop.stride for loop in self.loops)

    def without(self, view: View, budget: Budget) -> Iterator[Piece]:
        """What is left of the piece where a view is written over."""
        shape, strides = (tuple(loop[k] for loop in self.loops) for k in (0, 1))
        other = (Loop(axis.times, axis.stride, 0) for axis in view_axes(view.shape, view.strides))
        rest = [Box.full(shape)]
        own = view_axes(shape, strides)
        for found in common(own, self.offset - view.offset, tuple(other), len(shape), budget):
            for box in boxes_of(found):
                rest = without(rest, box)
        for box in rest:
            loops = [Loop(n, *loop[1:]) for n, loop in zip(box.shape, self.loops, strict=True)]
            at = [sum(a * loop[k] for a, loop in zip(box.start, self.loops, strict=True)) for k in (1, 2)]
            yield Piece.of(loops, self.offset + at[0], self.row, self.first + at[1])


class Memory:
    """The pieces that stand in one storage; no two of them share an address."""

    def __init__(self, budget: Budget, pieces: Iterable[Piece] = ()) -> None:
        self._budget = budget
        self._pieces = sorted(pieces, key=lambda piece: piece.offset)
        self._reach = max((piece.reach for piece in self._pieces), default=0)

    def read(self, view: View) -> Iterator[tuple[Piece, Common]]:
        """The pieces in a view, and which of the view's elements they are."""
        if 0 in view.shape or not self._pieces:
            return
        axes = view_axes(view.shape, view.strides)
        for piece in self._near(view):
            at = view.offset - piece.offset
            if piece.loops == ((piece.volume, 1, 1),) and 0 <= at <= piece.volume - 1 - _reach(axes):
                runs = tuple(Run(axis.times, axis.axis, axis.unit, axis.stride) for axis in axes)
                self._budget.spend()
                yield piece, Common(runs=runs, start=(0,) * len(view.shape), first=at)
                return
            for found in common(axes, at, piece.loops, len(view.shape), self._budget):
                yield piece, found

    def write(self, view: View, source: Memory | None, window: View) -> None:
        """Put what stands in another memory's window, of the view's shape, into the view; None is no tensor's."""
        found = [] if source is None else list(source.read(window))
        self._erase(view)
        for piece, part in found:
            loops = (Loop(r.times, r.unit * view.strides[r.axis], r.step) for r in part.runs)
            offset = view.offset + sum(a * s for a, s in zip(part.start, view.strides, strict=True))
            self._add(Piece.of(loops, offset, piece.row, piece.first + part.first))

    def gathered(self) -> Memory:
        """The same elements in as few pieces as are easily found."""
        pieces: Sequence[Piece] = self._pieces
        while len(pieces) > 1:
            fewer = _joined(pieces)
            if len(fewer) == len(pieces):
                break
            pieces = fewer
        return Memory(self._budget, pieces)

    def _near(self, view: View) -> list[Piece]:
        """Pieces that may share addresses with a view."""
        last = view.offset + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))
        low = bisect.bisect_left(self._pieces, view.offset - self._reach, key=_offset)
        high = bisect.bisect_right(self._pieces, last, key=_offset)
        return self._pieces[low:high]

    def _erase(self, view: View) -> None:
        if 0 in view.shape or not self._pieces:
            return
        axes = view_axes(view.shape, view.strides)
        for piece in self._near(view):
            shared = sum(
                found.volume
                for found in common(
                    axes, view.offset - piece.offset, piece.loops, len(view.shape), self._budget
                )
            )
            if shared:
                self._pieces.remove(piece)
            if 0 < shared < piece.volume:
                for part in piece.without(view, self._budget):
                    self._add(part)

    def _add(self, piece: Piece) -> None:
        bisect.insort(self._pieces, piece, key=_offset)
        self._reach = max(self._reach, piece.reach)


def _offset(piece: Piece) -> int:
    return piece.offset


def _reach(axes: Sequence[Axis]) -> int:
    return sum((axis.times - 1) * axis.stride for axis in axes)


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces of one form that stand in equal steps, of memory and of their tensor, as one."""
    alike: dict[tuple[int, tuple[Loop, ...]], list[Piece]] = {}
    for piece in sorted(pieces, key=_offset):
        alike.setdefault((piece.row, piece.loops), []).append(piece)
    result: list[Piece] = []
    for group in alike.values():
        rows = _rows(group, 3)
        result += rows if len(rows) < len(group) else _rows(group, 2)
    return result


def _rows(group: list[Piece], least: int) -> list[Piece]:
    steps = [(b.offset - a.offset, b.first - a.first) for a, b in pairwise(group)]
    result, at = [], 0
    while at < len(group):
        end = at + 1
        while end < len(group) and steps[end - 1] == steps[at]:
            end += 1
        if end - at < least:
            end = at + 1
            result.append(group[at])
        else:
            loop = Loop(end - at, *steps[at])
            joined = Piece.of((*group[at].loops, loop), group[at].offset, group[at].row, group[at].first)
            result.append(joined)
        at = end
    return result
