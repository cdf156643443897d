"""The third means: a loader moves bit patterns that carry the numbers of elements, some bits at a time."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import torch

from deltafmt.layout import Layout
from deltafmt.schema import Schema
from deltafmt.tensors import bits, dtype_name
from deltafmt.tracing import grouping
from deltafmt.tracing.found import Ints, by_numbers
from deltafmt.tracing.grouping import bytes_of, groups_by_layer
from deltafmt.tracing.meet import UnsureError
from deltafmt.tracing.parts import NOTHING, Numbers, impure
from deltafmt.tracing.patterns import numbered, read_digit, turns
from deltafmt.tracing.running import Load, run

_log = logging.getLogger("deltafmt.tracing")


def layout_by_bits(
    load: Load, schema: Schema, known: Numbers, tensors: Mapping[str, torch.Tensor], spared: Collection[str]
) -> Layout:
    """The layout by running a loader, whatever it is written in, on real tensors and in real memory.

    Writes into the targets. Takes 8 bytes per local element, of some layers at a time where all are much and
    the loader can be given some. Raises `LayoutError`, or what `load` raises.
    """
    if bytes_of(schema, tensors) > grouping.AT_ONCE:
        try:
            return by_numbers(_by_layers(load, schema, known, tensors), known, tensors, spared)
        except Exception as error:  # noqa: BLE001 - told again where all tensors are given at once
            _log.debug("by layers: %s", error)
    found = _found(load, schema, schema.names, known, tensors)
    numbers = ((name, found.pop(name) if name in found else _none(tensors[name])) for name in tensors)
    return by_numbers(numbers, known, tensors, spared)


def _by_layers(
    load: Load, schema: Schema, known: Numbers, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, Ints]]:
    """The numbers in each target, as soon as all of its elements have one."""
    waiting: dict[str, Ints] = {}
    done = set()
    for group in groups_by_layer(schema):
        for name, numbers in _found(load, schema, group.names, known, tensors).items():
            if name in done:
                raise UnsureError("a tensor is written again")
            if name in waiting:
                earlier = waiting.pop(name)
                numbers = np.where(numbers == NOTHING, earlier, numbers)
            if (numbers == NOTHING).any():
                waiting[name] = numbers
            else:
                done.add(name)
                yield name, numbers
    for name, tensor in tensors.items():
        if name not in done:
            yield name, waiting.pop(name, _none(tensor))


def _found(
    load: Load,
    schema: Schema,
    names: Sequence[str],
    known: Numbers,
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, Ints]:
    """The numbers in the targets into which the named tensors go."""
    dtypes = {name: dtype_name(tensor) for name, tensor in tensors.items()}
    found: dict[str, Ints] = {}
    for turn in range(turns({*dtypes.values(), *(spec.dtype for spec in schema)}, known)):
        for tensor in tensors.values():
            bits(tensor).zero_()
        run(load, _numbered(schema, names, known, turn))
        for name, tensor in tensors.items():
            if name not in found and tensor.dtype != torch.bool and not bits(tensor).any():
                continue
            numbers = found[name] if name in found else _none(tensor)
            if not read_digit(numbers, tensor.detach(), dtypes[name], turn):
                raise impure(repr(name), "an element comes from a tensor at one time, and not at another")
            if turn == 0 or name in found:
                found[name] = numbers
    return {name: numbers for name, numbers in found.items() if (numbers != NOTHING).any()}


def _none(tensor: torch.Tensor) -> Ints:
    return np.full(tuple(tensor.shape), NOTHING, np.int64)


def _numbered(
    schema: Schema, names: Sequence[str], known: Numbers, turn: int
) -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        owner = schema.resolve(name)
        first = known.first_of(schema.index(owner.name))
        yield name, numbered(owner.dtype, owner.shape, first, turn)
