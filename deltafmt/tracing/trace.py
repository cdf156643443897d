"""A layout from a loader: it is run on numbered elements, and what it has made of them is read off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from deltafmt.errors import LayoutError
from deltafmt.geometry import Box
from deltafmt.layout import Layout, Placement, TargetInfo
from deltafmt.schema import Schema
from deltafmt.tensors import NamedTensors, bits, dtype_name, named
from deltafmt.tracing.nests import NOTHING, Numbers, Part, impure, placements_of, regular_parts
from deltafmt.tracing.patterns import INVALID, check_traceable, digit_bits, digits_in, noise, numbered

Ints = npt.NDArray[np.int64]
Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


def trace_layout(
    load: Load, schema: Schema, targets: NamedTensors, *, untouched: Iterable[str] = ()
) -> Layout:
    """The layout by which `load` moves tensors of a schema into local tensors.

    `load` gets (name, tensor) for every name of the schema, aliases included, and writes into `targets`. It
    is called a few times: on tensors whose elements carry their numbers, some bits a time, and at last on
    random bits, on which the layout found is tried. So it may rename, split, fuse, transpose, slice, pad,
    repeat and permute, and cast bfloat16 to float32, whatever it is written in. Elements that it leaves
    alone, or fills with a constant, are `untouched` in the layout; names in `untouched` are targets of which
    it may write nothing at all.

    All targets hold their old bits again afterwards. Takes 8 bytes per local element meanwhile, and a copy
    of the targets. Raises `LayoutError`: `trace-impure` for a loader that does anything but move elements,
    `target-unfilled` for a target that it does not write to, `layout-too-fine` for one that it scatters.
    """
    tensors = named(targets)
    known = Numbers(schema)
    for spec in schema:
        check_traceable(spec.dtype, repr(spec.name))
    with _kept(tensors):
        numbers = _numbers(load, schema, known, tensors)
        layout = _layout(numbers, known, tensors, set(untouched))
        _try(load, schema, layout, tensors)
    return layout


@contextmanager
def _kept(tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Give all tensors their bits back in the end."""
    saved = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    try:
        yield
    finally:
        for name, tensor in tensors.items():
            bits(tensor).copy_(bits(saved[name]))


def _numbers(
    load: Load, schema: Schema, known: Numbers, tensors: Mapping[str, torch.Tensor]
) -> dict[str, Ints]:
    """Which canonical element stands at each local one."""
    dtypes = {name: dtype_name(tensor) for name, tensor in tensors.items()}
    for name, dtype in dtypes.items():
        check_traceable(dtype, repr(name))
    found = {name: np.zeros(tuple(tensor.shape), np.int64) for name, tensor in tensors.items()}
    narrowest = min(
        (digit_bits(dtype) for dtype in (*dtypes.values(), *(s.dtype for s in schema))), default=14
    )
    turns = -(-known.bits // narrowest)
    for turn in range(turns):
        for tensor in tensors.values():
            bits(tensor).zero_()

        def element_numbers(turn: int = turn) -> Iterator[tuple[str, torch.Tensor]]:
            for spec in schema:
                owner = schema.resolve(spec.name)
                first = known.first_of(schema.index(owner.name))
                yield spec.name, numbered(owner.dtype, owner.shape, first, turn)

        _run(load, element_numbers())
        for name, tensor in tensors.items():
            width = digit_bits(dtypes[name])
            if turn * width < known.bits:
                _add_digit(found[name], digits_in(tensor.detach(), dtypes[name]), turn, width, name)
    return found


def _run(load: Load, sources: Iterator[tuple[str, torch.Tensor]]) -> None:
    with torch.no_grad():
        load(sources)


def _add_digit(numbers: Ints, digit: Ints, turn: int, width: int, name: str) -> None:
    nothing = digit == INVALID
    if turn == 0:
        numbers[...] = np.where(nothing, NOTHING, digit)
        return
    if (nothing != (numbers == NOTHING)).any():
        raise impure(repr(name), "an element comes from a tensor at one time, and not at another")
    numbers[~nothing] |= digit[~nothing] << (turn * width)


def _layout(
    numbers: dict[str, Ints], known: Numbers, tensors: Mapping[str, torch.Tensor], spared: set[str]
) -> Layout:
    placements: list[Placement] = []
    left: list[tuple[str, Box]] = []
    casts: dict[str, str] = {}
    for name, found in numbers.items():
        if not found.size:
            continue
        if (found == NOTHING).all():
            if name not in spared:
                raise LayoutError(
                    "the loader writes nothing to this local tensor (if that is meant, name it in `untouched`; "
                    "if it puts a new tensor in its place, trace into that)",
                    kind="target-unfilled",
                    where=repr(name),
                )
            left.append((name, Box.full(found.shape)))
            continue
        info = TargetInfo.of(tensors[name])
        for part in regular_parts(found, known, repr(name)):
            if part.first == NOTHING:
                left.append((name, part.box))
                continue
            _check_dtype(part, known, name, info, casts)
            placements += placements_of(part, name, info.strides, known, repr(name))
    return Layout(placements, untouched=left, casts=casts)


def _check_dtype(part: Part, known: Numbers, name: str, info: TargetInfo, casts: dict[str, str]) -> None:
    row = known.row_of(part.first, part.first)
    assert row is not None
    dtype = known.schema.tensors[row].dtype
    if dtype == info.dtype and name not in casts:
        return
    if (dtype, info.dtype) == ("bfloat16", "float32") and casts.setdefault(name, dtype) == dtype:
        return
    raise LayoutError(
        "the loader casts elements, and only bfloat16 to float32 loses nothing",
        kind="dtype-mismatch",
        where=repr(name),
        expected=dtype,
        found=info.dtype,
    )


def _try(load: Load, schema: Schema, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
    """Hold the layout against what the loader makes of random bits."""
    seeds = {schema.index(name): number for number, name in enumerate(schema.names)}

    def source(name: str) -> torch.Tensor:
        owner = schema.resolve(name)
        return noise(owner.dtype, owner.shape, seeds[schema.index(owner.name)])

    _run(load, ((name, source(name)) for name in schema.names))
    by_source: dict[str, list[Placement]] = {}
    for placement in layout.placements:
        by_source.setdefault(placement.source, []).append(placement)
    for name, placed in by_source.items():
        whole = source(name)
        for p in placed:
            expected, target = whole[p.source_box.slices()], tensors[p.target]
            here = target.as_strided(expected.shape, p.strides, target.storage_offset() + p.offset)
            wanted = expected.to(torch.float32) if p.target in layout.casts else expected
            if not torch.equal(bits(here).cpu(), bits(wanted)):
                raise impure(repr(p.target), f"elements of {name!r} do not arrive as they are")
