"""Operations that pick slices along a dimension by their indices, on elements that are known as strided pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from deltafmt.tracing.meet import UnsureError
from deltafmt.tracing.pieces import Pieces
from deltafmt.tracing.recorder import Held

_MOST_RUNS = 1 << 15


def flip(on: Pieces, source: Held, dims: Sequence[int]) -> Held:
    for dim in dims:
        source = _chosen(on, source, dim, list(range(source.tensor.shape[dim] - 1, -1, -1)))
    return source


def roll(on: Pieces, source: Held, shifts: Sequence[int], dims: Sequence[int] = ()) -> Held:
    if not dims:
        raise UnsureError("all dimensions are rolled as one")
    for shift, dim in zip(shifts, dims, strict=True):
        size = source.tensor.shape[dim]
        source = _chosen(on, source, dim, [(i - shift) % size for i in range(size)])
    return source


def index_select(on: Pieces, source: Held, dim: int, index: Any) -> Held:
    return _chosen(on, source, dim, _positions(index, source.tensor.shape[dim]))


def index(on: Pieces, source: Held, indices: Sequence[Any]) -> Held:
    dim, chosen = _only(indices)
    shape = source.tensor.shape
    made = _chosen(on, source, dim, _positions(chosen, shape[dim]))
    if chosen.dtype == torch.bool:
        return made
    return made.with_tensor(made.tensor.reshape(*shape[:dim], *chosen.shape, *shape[dim + 1 :]))


def index_copy_(on: Pieces, to: Held, dim: int, index: Any, source: Any) -> None:
    _put(on, to, dim, _positions(index, to.tensor.shape[dim]), source)


def index_put_(on: Pieces, to: Held, indices: Sequence[Any], values: Any, accumulate: bool = False) -> None:
    dim, chosen = _only(indices)
    if accumulate or chosen.ndim != 1:
        raise UnsureError("elements are put into places that are given one by one")
    _put(on, to, dim, _positions(chosen, to.tensor.shape[dim]), values)


def _put(on: Pieces, to: Held, dim: int, order: list[int], source: Any) -> None:
    if isinstance(source, Held):
        shape = list(to.tensor.shape)
        shape[dim] = len(order)
        source = source.with_tensor(source.tensor.expand(shape))
    for at, count, begin, step in _runs(order):
        if step < 1:
            raise UnsureError("several elements are put into one place")
        part = source
        if isinstance(source, Held):
            part = source.with_tensor(source.tensor.narrow(dim, at, count))
        on.write(_slice(to.tensor, dim, begin, count, step), part)


def _chosen(on: Pieces, source: Held, dim: int, order: list[int]) -> Held:
    shape = list(source.tensor.shape)
    shape[dim] = len(order)
    made = on.empty(shape, source.dtype)
    for at, count, begin, step in _runs(order):
        if step:
            part = _slice(source.tensor, dim, begin, count, step)
        else:
            part = source.tensor.narrow(dim, begin, 1)
        on.write(made.narrow(dim, at, count), source.with_tensor(part))
    return source.with_tensor(made)


def _slice(tensor: torch.Tensor, dim: int, begin: int, count: int, step: int) -> torch.Tensor:
    dim %= tensor.ndim
    return tensor[(slice(None),) * dim + (slice(begin, begin + (count - 1) * step + 1, step),)]


def _only(indices: Sequence[Any]) -> tuple[int, torch.Tensor]:
    """The one dimension that is indexed, and by what."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1 or (given[0][1].dtype == torch.bool and given[0][1].ndim != 1):
        raise UnsureError("several dimensions are indexed at once")
    return given[0]


def _positions(index: Any, size: int) -> list[int]:
    if isinstance(index, Held):
        raise UnsureError("elements are chosen by elements")
    if index.dtype == torch.bool:
        index = index.nonzero()
    return [int(i) % size for i in index.reshape(-1).tolist()]


def _runs(order: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """Positions as (place in the order, count, first, step), steps from 0 on; a count of 1 has step 1."""
    at, runs = 0, 0
    while at < len(order):
        end = at + 1
        step = order[end] - order[at] if end < len(order) and order[end] >= order[at] else 1
        while end < len(order) and order[end] - order[end - 1] == step:
            end += 1
        yield at, end - at, order[at], step
        at = end
        runs += 1
        if runs > _MOST_RUNS:
            raise UnsureError("an order without regular parts")
