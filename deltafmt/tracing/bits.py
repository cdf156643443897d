"""The third means: a loader moves bit patterns that carry the numbers of elements, some bits at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np
import torch

from deltafmt.layout import Layout
from deltafmt.schema import Schema
from deltafmt.tensors import bits, dtype_name
from deltafmt.tracing.found import Ints, by_numbers
from deltafmt.tracing.parts import Numbers, impure
from deltafmt.tracing.patterns import numbered, read_digit, turns
from deltafmt.tracing.running import Load, run


def layout_by_bits(
    load: Load, schema: Schema, known: Numbers, tensors: Mapping[str, torch.Tensor], spared: Collection[str]
) -> Layout:
    """The layout by running a loader, whatever it is written in, on real tensors and in real memory.

    Writes into the targets, and takes 8 bytes per local element. Raises `LayoutError`, or what `load` raises.
    """
    dtypes = {name: dtype_name(tensor) for name, tensor in tensors.items()}
    numbers = {name: np.zeros(tuple(tensor.shape), np.int64) for name, tensor in tensors.items()}
    for turn in range(turns({*dtypes.values(), *(spec.dtype for spec in schema)}, known)):
        for tensor in tensors.values():
            bits(tensor).zero_()
        run(load, _numbered(schema, known, turn))
        for name, tensor in tensors.items():
            if not read_digit(numbers[name], tensor.detach(), dtypes[name], turn):
                raise impure(repr(name), "an element comes from a tensor at one time, and not at another")

    def found() -> Iterator[tuple[str, Ints]]:
        for name in tensors:
            yield name, numbers.pop(name)

    return by_numbers(found(), known, tensors, spared)


def _numbered(schema: Schema, known: Numbers, turn: int) -> Iterator[tuple[str, torch.Tensor]]:
    for spec in schema:
        owner = schema.resolve(spec.name)
        first = known.first_of(schema.index(owner.name))
        yield spec.name, numbered(owner.dtype, owner.shape, first, turn)
