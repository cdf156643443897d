"""Boxes: half-open hyper-rectangles of a tensor's index space."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import le, sub

from deltafmt.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Box:
    """The elements whose index lies in `[start, stop)` in every dimension.

    A scalar's box is `Box((), ())` and holds one element; a box with an empty range holds none.

    >>> Box((0, 2), (4, 4)).shape
    (4, 2)
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        start, stop = tuple(self.start), tuple(self.stop)
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "stop", stop)
        if len(start) != len(stop) or min(start, default=0) < 0 or not all(map(le, start, stop)):
            raise LayoutError("invalid box", kind="box-invalid", where=f"start {start}, stop {stop}")

    @classmethod
    def full(cls, shape: tuple[int, ...]) -> Box:
        """The box of a whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def rank(self) -> int:
        return len(self.start)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.stop, self.start))

    @property
    def volume(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None where the two share no element."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if self.rank != other.rank or any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)

    def contains(self, other: Box) -> bool:
        """Whether every index of `other` lies in this box."""
        return (
            self.rank == other.rank
            and all(map(le, self.start, other.start))
            and all(map(le, other.stop, self.stop))
        )

    def slices(self) -> tuple[slice, ...]:
        """The box as an index into a tensor or array."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))
