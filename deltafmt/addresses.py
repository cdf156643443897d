"""Sets of addresses that strided boxes fill: exact arithmetic on them, and their elements window by window.

Strides make a number system: with strides 1, 6 and 12 an address has a digit below 6, a digit below 2 and a
rest. A strided box is then an ordinary box of digits, or a few of them, and whether many boxes meet or leave a
hole is told without looking at any element.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltafmt.joins import self_meetings

Ints = npt.NDArray[np.int64]
Shape = tuple[int, ...]

_MAX_PARTS = 64
_MAX_PAIRS = 1 << 22


@dataclass(frozen=True, slots=True)
class Strided:
    """The addresses `offset + sum(c * strides)` of all c below `shape`; strides are not negative, none empty."""

    shape: Shape
    strides: Shape
    offset: int

    @property
    def last(self) -> int:
        """The highest address."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    def part(self, start: Shape, shape: Shape) -> Strided:
        """The addresses of a sub-box."""
        shift = sum(c * s for c, s in zip(start, self.strides, strict=True))
        return Strided(shape, self.strides, self.offset + shift)

    def addresses(self) -> Ints:
        """All addresses, in the order of their indices."""
        result = np.full((), self.offset, np.int64)
        for extent, stride in zip(self.shape, self.strides, strict=True):
            result = result[..., None] + np.arange(extent, dtype=np.int64) * stride
        return result.reshape(-1)

    def within(self, low: int, high: int) -> Iterator[tuple[Shape, Shape]]:
        """(start, shape) of sub-boxes that have the elements with addresses in `[low, high)`, each once."""
        if self.last < low or self.offset >= high:
            return
        if low <= self.offset and self.last < high:
            yield (0,) * len(self.shape), self.shape
            return
        # Along the dimension that reaches farthest, indices that lie inside in full, and those at the edges.
        d = max(range(len(self.shape)), key=lambda k: (self.shape[k] - 1) * self.strides[k])
        stride, extent = self.strides[d], self.shape[d]
        inner = self.last - self.offset - (extent - 1) * stride
        begin = max(0, -(-(low - inner - self.offset) // stride))
        end = min(extent, -(-(high - self.offset) // stride))
        full_begin = min(end, max(begin, -(-(low - self.offset) // stride)))
        full_end = min(end, max(full_begin, (high - 1 - inner - self.offset) // stride + 1))
        if full_begin < full_end:
            yield (
                _at(self.shape, d, full_begin),
                (*self.shape[:d], full_end - full_begin, *self.shape[d + 1 :]),
            )
        for index in itertools.chain(range(begin, full_begin), range(full_end, end)):
            edge = self.part(_at(self.shape, d, index), (*self.shape[:d], 1, *self.shape[d + 1 :]))
            for start, shape in edge.within(low, high):
                yield (*start[:d], index, *start[d + 1 :]), shape


def contiguous_strides(shape: Sequence[int]) -> Shape:
    """Strides in elements of a C-ordered tensor."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return tuple(strides)


def canonical(shape: Shape) -> Strided:
    """The flat indices of a C-ordered tensor."""
    return Strided(shape, contiguous_strides(shape), 0)


def _at(shape: Shape, d: int, index: int) -> Shape:
    return tuple(index if k == d else 0 for k in range(len(shape)))


@dataclass(frozen=True, slots=True)
class Digits:
    """Boxes of digits: box k belongs to set `owner[k]` and has the digits in `[start[k], stop[k])`.

    `steps` are the strides that the digits count, ascending.
    """

    steps: Ints
    owner: Ints
    start: Ints
    stop: Ints

    @classmethod
    def of(cls, sets: Sequence[Strided]) -> Digits | None:
        """The sets as boxes; None where one is no box of digits, nor a few of them."""
        steps = sorted(
            {1, *(s for each in sets for n, s in zip(each.shape, each.strides, strict=True) if n > 1)}
        )
        if steps[0] < 1:
            return None
        level = {step: k for k, step in enumerate(steps)}
        rows = []
        for owner, each in enumerate(sets):
            boxes = _boxes(each, steps, level)
            if boxes is None:
                return None
            rows += [(owner, *start, *stop) for start, stop in boxes]
        table = np.array(rows, np.int64).reshape(len(rows), 1 + 2 * len(steps))
        return cls(np.array(steps), table[:, 0], table[:, 1 : 1 + len(steps)], table[:, 1 + len(steps) :])

    @property
    def volume(self) -> Ints:
        """Addresses in each box."""
        volume: Ints = (self.stop - self.start).prod(axis=1)
        return volume

    def take(self, chosen: Any) -> Digits:
        """The chosen boxes (an index array or mask)."""
        return Digits(self.steps, self.owner[chosen], self.start[chosen], self.stop[chosen])

    def contains(self, box: int, other: int) -> bool:
        """Whether a box has all addresses of another one."""
        inside: Any = (self.start[box] <= self.start[other]) & (self.stop[other] <= self.stop[box])
        return bool(inside.all())

    def meetings(self) -> list[tuple[int, int]] | None:
        """Pairs of boxes that share an address; None where too many pairs would have to be looked at."""
        first = (self.start * self.steps).sum(axis=1)
        last = ((self.stop - 1) * self.steps).sum(axis=1)
        order = np.argsort(first, kind="stable")
        count, pairs = self_meetings(first[order], last[order])
        if count > _MAX_PAIRS:
            return None
        found: list[tuple[int, int]] = []
        for one, other in pairs:
            a, b = order[one], order[other]
            meet = (self.start[a] < self.stop[b]).all(axis=1) & (self.start[b] < self.stop[a]).all(axis=1)
            found += zip(a[meet].tolist(), b[meet].tolist(), strict=True)
        return found

    def shared_with(self, other: Digits) -> int:
        """Addresses that boxes here and there have in common, summed over all pairs."""
        total = 0
        for start, stop in zip(other.start, other.stop, strict=True):
            common = np.minimum(self.stop, stop) - np.maximum(self.start, start)
            total += int(np.maximum(common, 0).prod(axis=1).sum())
        return total


def _boxes(each: Strided, steps: list[int], level: dict[int, int]) -> list[tuple[Shape, Shape]] | None:
    """One set as boxes of digits, which together have each address as often as the set has it."""
    sizes: dict[int, int] = {}
    for extent, stride in zip(each.shape, each.strides, strict=True):
        if extent > 1:
            if level[stride] in sizes:
                return None
            sizes[level[stride]] = extent
    todo = [(each.offset, sizes)]
    done: list[tuple[Shape, Shape]] = []
    while todo:
        if len(todo) + len(done) > _MAX_PARTS:
            return None
        offset, sizes = todo.pop()
        start = _digits(offset, steps)
        reach = 0
        for k, (step, above) in enumerate(itertools.pairwise(steps)):
            size = sizes.get(k, 1)
            reach += (start[k] + size - 1) * step
            if reach < above:
                # No element carries into the next digit: greedy digits are unique, so these are its own.
                continue
            base, odd = divmod(above, step)
            if odd:
                return None
            if start[k] == 0 and size % base == 0:
                # All values of this digit, and a range of the next one.
                if sizes.get(k + 1, 1) > 1:
                    return None
                sizes = {**sizes, k: base, k + 1: size // base}
                reach += (base - size) * step
                continue
            cut = base - start[k] if start[k] else size - size % base
            todo += [(offset, {**sizes, k: cut}), (offset + cut * steps[k], {**sizes, k: size - cut})]
            break
        else:
            done.append((start, tuple(digit + sizes.get(k, 1) for k, digit in enumerate(start))))
    return done


def _digits(address: int, steps: list[int]) -> Shape:
    digits = []
    for step in reversed(steps):
        digit, address = divmod(address, step)
        digits.append(digit)
    return tuple(reversed(digits))
