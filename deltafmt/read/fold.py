"""Several changes of one domain folded into one, so that live memory is touched once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltafmt.errors import FormatError
from deltafmt.format.constants import DENSE, SET
from deltafmt.kernels.fold import compose, overlay, without
from deltafmt.kernels.positions import Positions
from deltafmt.kernels.steps import add_step
from deltafmt.read.decode import Decoded

Changes = tuple[Positions, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """The outcome for one domain: all its elements, or set values and steps at disjoint positions."""

    order: int
    dense: npt.NDArray[Any] | None
    set: Changes | None
    step: Changes | None


def fold(links: Iterable[list[Decoded]], *, where: object) -> Folded:
    """Fold the chunks of one domain, link after link: later ones act on the results of earlier ones.

    Steps add up, and what cancels drops out; a step on a known value gives the computed value; later values
    replace. Raises `FormatError` where one link lists a position twice.
    """
    state = Folded(order=0, dense=None, set=None, step=None)
    for chunks in links:
        _check_disjoint(chunks, where)
        for chunk in chunks:
            state = _after(state, chunk)
    return state


def _after(state: Folded, chunk: Decoded) -> Folded:
    if chunk.positions is None:
        assert chunk.operation == DENSE
        return Folded(order=chunk.order, dense=chunk.values, set=None, step=None)
    changes = (chunk.positions, chunk.values)
    if state.dense is not None:
        # Decoded for this fold and nobody else's.
        dense = state.dense
        at = chunk.positions
        dense[at] = chunk.values if chunk.operation == SET else add_step(dense[at], chunk.values, chunk.order)
        return Folded(order=chunk.order, dense=dense, set=None, step=None)
    if chunk.operation == SET:
        step = None if state.step is None else without(state.step, chunk.positions)
        values = changes if state.set is None else overlay(state.set, changes)
        return Folded(order=chunk.order, dense=None, set=values, step=step)
    return _with_steps(state, chunk, changes)


def _with_steps(state: Folded, chunk: Decoded, changes: Changes) -> Folded:
    values = state.set
    if values is not None:
        _, known, moved = np.intersect1d(values[0], changes[0], assume_unique=True, return_indices=True)
        bits = values[1].copy()
        bits[known] = add_step(bits[known], changes[1][moved], chunk.order)
        changes = without(changes, values[0])
        values = (values[0], bits)
    step = changes if state.step is None else compose(state.step, changes)
    return Folded(order=chunk.order, dense=None, set=values, step=step)


def _check_disjoint(chunks: list[Decoded], where: object) -> None:
    if len(chunks) < 2:
        return
    first, second = (chunk.positions for chunk in chunks)
    if first is None or second is None or np.intersect1d(first, second, assume_unique=True).size:
        raise FormatError(
            "a position stands in both chunks of the domain", kind="position-twice", where=where
        )
