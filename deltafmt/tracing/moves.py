"""Moves as copies between views: what torch's operations do to elements that are known as strided pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deltafmt.tracing import picks
from deltafmt.tracing.meet import UnsureError
from deltafmt.tracing.operations import operations
from deltafmt.tracing.pieces import Pieces
from deltafmt.tracing.recorder import Held


def copy_(on: Pieces, to: Held, source: Any, _non_blocking: bool = False) -> None:
    on.write(to.tensor, source)


def fill_(on: Pieces, to: Held, value: Any = 0) -> None:
    if isinstance(value, Held):
        raise UnsureError("an element fills a tensor")
    on.write(to.tensor, None)


def equal(on: Pieces, one: Any, other: Any) -> bool:
    """Whether two tensors hold the same elements, which are then equal whatever they are."""
    if not isinstance(one, Held) or not isinstance(other, Held) or one.dtype != other.dtype:
        raise UnsureError("elements are compared with others")
    if one.tensor.shape != other.tensor.shape or on.elements(one.tensor) != on.elements(other.tensor):
        raise UnsureError("elements are compared with others")
    return True


def clone(on: Pieces, source: Held, memory_format: Any = None) -> Held:
    made = on.like(source.tensor, source.dtype, memory_format)
    on.write(made, source)
    return source.with_tensor(made)


def to_copy(
    on: Pieces,
    source: Held,
    dtype: torch.dtype | None = None,
    device: Any = None,
    memory_format: Any = None,
    **_options: Any,
) -> Held:
    made = on.like(source.tensor, dtype or source.dtype, memory_format)
    on.write(made, source)
    return source.with_tensor(made, device)


def empty_like(
    on: Pieces, source: Held, *given: Any, dtype: Any = None, device: Any = None, **_: Any
) -> Held:
    """A new tensor that holds nothing known, of the shape given or else the source's."""
    shape = given[0] if given and isinstance(given[0], (list, tuple)) else source.tensor.shape
    return source.with_tensor(on.empty(shape, dtype or source.dtype), device)


def cat(on: Pieces, parts: Sequence[Any], dim: int = 0) -> Held:
    sized = [part for part in parts if _shape(part) != (0,)]
    shape = list(_shape(sized[0]))
    shape[dim] = sum(_shape(part)[dim] for part in sized)
    made, at = on.empty(shape, _one_dtype(parts)), 0
    for part in sized:
        size = _shape(part)[dim]
        on.write(made.narrow(dim, at, size), part)
        at += size
    return _first(parts).with_tensor(made)


def stack(on: Pieces, parts: Sequence[Any], dim: int = 0) -> Held:
    shape = list(_shape(parts[0]))
    dim %= len(shape) + 1
    made = on.empty((*shape[:dim], len(parts), *shape[dim:]), _one_dtype(parts))
    for at, part in enumerate(parts):
        on.write(made.select(dim, at), part)
    return _first(parts).with_tensor(made)


def pad(on: Pieces, source: Held, widths: Sequence[int], _value: Any = 0) -> Held:
    inner, shape = source.tensor, list(source.tensor.shape)
    window = []
    for k in range(len(widths) // 2):
        d = len(shape) - 1 - k
        before, after = widths[2 * k : 2 * k + 2]
        inner = inner.narrow(d, max(0, -before), shape[d] + min(0, before) + min(0, after))
        window.append((d, max(0, before), inner.shape[d]))
        shape[d] += before + after
    made = on.empty(shape, source.dtype)
    to = made
    for d, at, size in window:
        to = to.narrow(d, at, size)
    on.write(to, source.with_tensor(inner))
    return source.with_tensor(made)


def repeat(on: Pieces, source: Held, repeats: Sequence[int]) -> Held:
    inner = source.tensor[(None,) * (len(repeats) - source.tensor.ndim)]
    made = on.empty([n * r for n, r in zip(inner.shape, repeats, strict=True)], source.dtype)
    to = made
    for d in reversed(range(inner.ndim)):
        to = to.view(*to.shape[:d], repeats[d], -1, *to.shape[d + 1 :]) if made.numel() else to
        inner = inner.unsqueeze(d)
    if made.numel():
        on.write(to, source.with_tensor(inner))
    return source.with_tensor(made)


def _shape(part: Any) -> tuple[int, ...]:
    return tuple((part.tensor if isinstance(part, Held) else part).shape)


def _first(parts: Sequence[Any]) -> Held:
    return next(part for part in parts if isinstance(part, Held))


def _one_dtype(parts: Sequence[Any]) -> torch.dtype:
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1:
        raise UnsureError("tensors of several dtypes are joined")
    (dtype,) = dtypes
    found: torch.dtype = dtype
    return found


MOVES: Mapping[str, Callable[..., Any]] = {
    **operations(copy=copy_, equal=equal, fill=fill_, clone=clone, to_copy=to_copy, new=empty_like),
    "aten.cat.default": cat,
    "aten.stack.default": stack,
    "aten.constant_pad_nd.default": pad,
    "aten.repeat.default": repeat,
    "aten.flip.default": picks.flip,
    "aten.roll.default": picks.roll,
    "aten.index_select.default": picks.index_select,
    "aten.index.Tensor": picks.index,
    "aten.index_copy_.default": picks.index_copy_,
    "aten.index_put_.default": picks.index_put_,
}
"""By the names that torch gives its operations."""
