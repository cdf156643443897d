"""The plain check of a layout: every element at its address, in windows of bounded size, right for any strides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from deltafmt.addresses import Strided, canonical
from deltafmt.errors import LayoutError
from deltafmt.schema import Schema

if TYPE_CHECKING:
    from deltafmt.layout import Placement, TargetInfo

Ints = npt.NDArray[np.int64]

WINDOW_ELEMENTS = 1 << 20
_FREE, _IDLE = -1, -2


@dataclass(frozen=True, slots=True)
class _Mark:
    """A placement: its addresses, the canonical numbers of its elements in the same order, and who it speaks of."""

    placement: Placement
    addresses: Strided
    elements: Strided
    source: int
    way: int


class _Window:
    """What stands at the addresses `[low, high)`."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self.source, self.element, self.way = (np.full(high - low, _FREE, np.int64) for _ in range(3))

    def places(self, addresses: Strided) -> Ints:
        """The addresses that lie inside, counted from `low`."""
        return self._inside(addresses, addresses) - self.low

    def mark(self, mark: _Mark) -> int | None:
        """Put a placement's elements down; the address of one that another element has taken, if there is one.

        One element at one address is written once if both placements say so by one map; by two maps nobody
        would notice, so that counts as another element.
        """
        at, element = self.places(mark.addresses), self._inside(mark.addresses, mark.elements)
        taken = self.source[at] != _FREE
        same = (self.source[at] == mark.source) & (self.element[at] == element) & (self.way[at] == mark.way)
        clash = taken & ~same
        if clash.any():
            return int(at[clash.argmax()]) + self.low
        self.source[at], self.element[at], self.way[at] = mark.source, element, mark.way
        # Where two of its own elements went to one address, one of them is not there any more.
        lost = self.element[at] != element
        return int(at[lost.argmax()]) + self.low if lost.any() else None

    def _inside(self, addresses: Strided, values: Strided) -> Ints:
        parts = [
            values.part(start, shape).addresses() for start, shape in addresses.within(self.low, self.high)
        ]
        return np.concatenate([np.zeros(0, np.int64), *parts])


def clashing(placements: Sequence[Placement], schema: Schema) -> Placement | None:
    """A placement that wants an address which another one, into the same memory, has for another element."""
    marks = _marks(placements, schema)
    for window, inside in _windows(marks, max((mark.addresses.last for mark in marks), default=-1) + 1):
        for mark in inside:
            if window.mark(mark) is not None:
                return mark.placement
    return None


def check_windows(
    name: str, info: TargetInfo, placements: Sequence[Placement], idle: Sequence[Strided], schema: Schema
) -> None:
    """Raise `LayoutError` unless placements and idle addresses have each of a target's elements once."""
    own = Strided(info.shape, info.strides, 0)
    for window, inside in _windows(_marks(placements, schema), info.span):
        for mark in inside:
            address = window.mark(mark)
            if address is not None:
                raise LayoutError(
                    "two different elements are placed at one address",
                    kind="placement-overlap",
                    where=f"{name!r}, element {address} from its first; one of them from {mark.placement.source!r}",
                )
        for addresses in idle:
            at = window.places(addresses)
            if (window.source[at] != _FREE).any():
                raise LayoutError(
                    "an element is both placed and declared untouched",
                    kind="placement-overlap",
                    where=repr(name),
                )
            window.source[at] = _IDLE
        _check_filled(name, info, window, window.places(own))


def _check_filled(name: str, info: TargetInfo, window: _Window, own: Ints) -> None:
    missing = window.source[own] == _FREE
    if missing.any():
        address = int(own[missing.argmax()]) + window.low
        raise LayoutError(
            "an element is neither placed nor declared untouched",
            kind="target-unfilled",
            where=f"{name!r}, index {_index(info, address)}",
        )
    window.source[own] = _FREE
    if (window.source != _FREE).any():
        raise LayoutError(
            "a placement fills memory between the target's elements",
            kind="placement-outside",
            where=repr(name),
        )


def _windows(marks: Sequence[_Mark], span: int) -> Iterator[tuple[_Window, list[_Mark]]]:
    """Each window below `span` with the placements that may have a part in it."""
    first = np.array([mark.addresses.offset for mark in marks], np.int64)
    last = np.array([mark.addresses.last for mark in marks], np.int64)
    for low in range(0, span, WINDOW_ELEMENTS):
        high = min(low + WINDOW_ELEMENTS, span)
        inside = np.flatnonzero((first < high) & (last >= low))
        yield _Window(low, high), [marks[k] for k in inside.tolist()]


def _marks(placements: Sequence[Placement], schema: Schema) -> list[_Mark]:
    ways: dict[tuple[object, ...], int] = {}
    marks = []
    for p in placements:
        if not p.source_box.volume:
            continue
        row = schema.index(p.source)
        marks.append(
            _Mark(
                placement=p,
                addresses=Strided(p.source_box.shape, p.strides, p.offset),
                elements=canonical(schema.shapes[row]).part(p.source_box.start, p.source_box.shape),
                source=int(schema.owner_rows[row]),
                way=ways.setdefault(map_of(p), len(ways)),
            )
        )
    return marks


def map_of(placement: Placement) -> tuple[object, ...]:
    """The affine map from canonical indices to addresses that a placement is a part of."""
    start = placement.source_box.start
    origin = placement.offset - sum(a * s for a, s in zip(start, placement.strides, strict=True))
    return origin, placement.strides


def _index(info: TargetInfo, address: int) -> tuple[int, ...]:
    """The index of a target's element at an address relative to its first element."""
    index = [0] * len(info.shape)
    for d in sorted(range(len(info.shape)), key=lambda d: -info.strides[d]):
        if info.strides[d] and info.shape[d] > 1:
            index[d], address = divmod(address, info.strides[d])
    return tuple(index)
