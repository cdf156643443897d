"""The second means: a loader moves the numbers of elements, as integers, under the dtypes that it knows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from deltafmt.layout import Layout
from deltafmt.schema import Schema
from deltafmt.tensors import torch_dtype
from deltafmt.tracing.found import Ints, by_numbers
from deltafmt.tracing.meet import UnsureError
from deltafmt.tracing.operations import operations
from deltafmt.tracing.parts import NOTHING, Numbers
from deltafmt.tracing.pieces import check_cast
from deltafmt.tracing.recorded import follow
from deltafmt.tracing.recorder import Held, Recorder, Stand
from deltafmt.tracing.running import Load

_CPU = torch.device("cpu")
_LEAST = 2
"""The least number of an element; the zeros that operations fill in are none."""


def layout_by_numbers(
    load: Load, schema: Schema, known: Numbers, tensors: Mapping[str, torch.Tensor], spared: Collection[str]
) -> Layout:
    """The layout by element numbers, 8 bytes each. Raises `UnsureError`, or what `load` raises."""
    recorder = Recorder(Integers())
    flats = {name: recorder.watch(tensor) for name, tensor in tensors.items()}

    def sources() -> Iterator[tuple[str, torch.Tensor]]:
        for spec in schema:
            owner = schema.resolve(spec.name)
            first = known.first_of(schema.index(owner.name))
            numbers = torch.arange(first, first + owner.volume).view(owner.shape)
            yield spec.name, Stand(Held(numbers, torch_dtype(owner.dtype), _CPU), recorder)

    follow(load, recorder, sources())

    def found() -> Iterator[tuple[str, Ints]]:
        for name, tensor in tensors.items():
            flat = flats[name].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            numbers = flat.numpy()
            yield name, np.where(numbers < _LEAST, NOTHING, numbers)

    return by_numbers(found(), known, tensors, spared)


class Integers:
    """A carrier of element numbers: operations that only move are done on them."""

    def memory(self, like: torch.Tensor) -> torch.Tensor:
        """Numbers for the whole storage of an ordinary tensor."""
        return _nothing((like.untyped_storage().nbytes() // like.element_size(),))

    def operation(self, func: Any) -> Callable[..., Any] | None:
        """What follows an operation of torch; None where it is not known."""
        name = str(func)
        if name in _OWN:
            return _OWN[name]
        if name in _DATA:
            return partial(_moved, func, _DATA[name])
        return None


def _nothing(shape: Sequence[int]) -> torch.Tensor:
    return torch.full(tuple(shape), NOTHING, dtype=torch.int64)


def _moved(func: Any, data: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
    """Do an operation on numbers; the arguments at positions `data` are elements, the others say where to."""
    if kwargs or any(arg is True for arg in args):
        raise UnsureError("an operation with options")
    held = [part for at in data if at < len(args) for part in _listed(args[at]) if isinstance(part, Held)]
    if len({part.dtype for part in held}) != 1:
        raise UnsureError("tensors of several dtypes are joined")
    given = [_numbers(arg) if at in data else _where(arg) for at, arg in enumerate(args)]
    made = func(*given)
    if func._schema.is_mutable:
        return None
    if isinstance(made, (list, tuple)):
        return [held[0].with_tensor(each) for each in made]
    return held[0].with_tensor(made)


def _listed(arg: Any) -> Sequence[Any]:
    return arg if isinstance(arg, (list, tuple)) else [arg]


def _numbers(arg: Any) -> Any:
    if isinstance(arg, (list, tuple)):
        return [_numbers(each) for each in arg]
    if isinstance(arg, Held):
        return arg.tensor
    return _nothing(arg.shape) if isinstance(arg, torch.Tensor) else NOTHING


def _where(arg: Any) -> Any:
    if any(isinstance(each, Held) for each in _listed(arg)):
        raise UnsureError("elements are chosen by elements")
    return arg


def _copy_(to: Held, source: Any, _non_blocking: bool = False) -> None:
    if isinstance(source, Held):
        check_cast(source.dtype, to.dtype)
        to.tensor.copy_(source.tensor)
    else:
        to.tensor.fill_(NOTHING)


def _fill_(to: Held, value: Any = 0) -> None:
    to.tensor.fill_(value.tensor if isinstance(value, Held) else NOTHING)


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Held) or not isinstance(other, Held) or one.dtype != other.dtype:
        raise UnsureError("elements are compared with others")
    if not torch.equal(one.tensor, other.tensor) or bool((one.tensor < _LEAST).any()):
        raise UnsureError("elements are compared with others")
    return True


def _clone(source: Held, memory_format: Any = None) -> Held:
    return source.with_tensor(source.tensor.clone(memory_format=memory_format or torch.preserve_format))


def _to_copy(
    source: Held, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any
) -> Held:
    dtype = dtype or source.dtype
    check_cast(source.dtype, dtype)
    device = source.device if device is None else torch.device(device)
    return Held(_clone(source, memory_format).tensor, dtype, device)


def _new(source: Held, *given: Any, dtype: Any = None, device: Any = None, **_: Any) -> Held:
    shape = given[0] if given and isinstance(given[0], (list, tuple)) else source.tensor.shape
    device = source.device if device is None else torch.device(device)
    return Held(_nothing(shape), dtype or source.dtype, device)


_OWN = operations(copy=_copy_, equal=_equal, fill=_fill_, clone=_clone, to_copy=_to_copy, new=_new)
_DATA: Mapping[str, tuple[int, ...]] = {
    "aten.cat.default": (0,),
    "aten.stack.default": (0,),
    "aten.constant_pad_nd.default": (0, 2),
    "aten.repeat.default": (0,),
    "aten.flip.default": (0,),
    "aten.roll.default": (0,),
    "aten.rot90.default": (0,),
    "aten.index_select.default": (0,),
    "aten.index.Tensor": (0,),
    "aten.gather.default": (0,),
    "aten.take.default": (0,),
    "aten.tril.default": (0,),
    "aten.triu.default": (0,),
    "aten.diag_embed.default": (0,),
    "aten.block_diag.default": (0,),
    "aten.narrow_copy.default": (0,),
    "aten.masked_select.default": (0,),
    "aten.pixel_shuffle.default": (0,),
    "aten.pixel_unshuffle.default": (0,),
    "aten.split_with_sizes_copy.default": (0,),
    "aten.where.self": (1, 2),
    "aten.where.ScalarOther": (1, 2),
    "aten.where.ScalarSelf": (1, 2),
    "aten.masked_fill.Scalar": (0, 2),
    "aten.masked_fill.Tensor": (0, 2),
    "aten.masked_fill_.Scalar": (0, 2),
    "aten.masked_fill_.Tensor": (0, 2),
    "aten.masked_scatter.default": (0, 2),
    "aten.masked_scatter_.default": (0, 2),
    "aten.index_put.default": (0, 2),
    "aten.index_put_.default": (0, 2),
    "aten.index_copy.default": (0, 3),
    "aten.index_copy_.default": (0, 3),
    "aten.index_fill.int_Scalar": (0, 3),
    "aten.index_fill_.int_Scalar": (0, 3),
    "aten.scatter.src": (0, 3),
    "aten.scatter_.src": (0, 3),
    "aten.slice_scatter.default": (0, 1),
    "aten.select_scatter.default": (0, 1),
    "aten.diagonal_scatter.default": (0, 1),
}
"""Operations that only move, and the positions of those arguments that are elements."""
