"""hypothesis strategies for models, their updates and receivers' layouts, and plain torch to check against."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from hypothesis import strategies as st

from deltafmt.dtypes import DTYPES
from deltafmt.geometry import Box
from deltafmt.layout import Layout, Placement
from deltafmt.tensors import bits, numpy_bits, torch_dtype

Tensors = dict[str, torch.Tensor]

PADDING = 0x55
"""The byte that fills local memory before anything is received."""

seeds = st.integers(0, 2**32 - 1)
densities = st.sampled_from((0.0, 0.002, 0.05, 0.5, 1.0))
dtypes = st.sampled_from(sorted(DTYPES))
shapes = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
    st.tuples(st.integers(1, 200)),
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
)


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor of random bit patterns: NaNs, infinities and both zeros included."""
    tensor = torch.empty(shape, dtype=torch_dtype(dtype))
    _randomize(tensor, np.random.default_rng(seed), 1.0)
    return tensor


@st.composite
def tensors(draw: st.DrawFn, *, prefix: str = "t", min_size: int = 1, max_size: int = 4) -> Tensors:
    """A small model of any dtypes and shapes; sometimes its last two names are one tensor."""
    count = draw(st.integers(min_size, max_size))
    result = {
        f"{prefix}{number}": random_tensor(draw(dtypes), draw(shapes), draw(seeds)) for number in range(count)
    }
    if draw(st.booleans()):
        result[f"{prefix}tied"] = result[f"{prefix}{count - 1}"]
    return result


def update(model: Mapping[str, torch.Tensor], seed: int, density: float) -> None:
    """Change about a share of the elements in place, most of them by one step, some to anything."""
    rng = np.random.default_rng(seed)
    for tensor in {tensor.data_ptr(): tensor for tensor in model.values() if tensor.numel()}.values():
        _randomize(tensor, rng, density / 10)
        if tensor.dtype != torch.bool:
            flat = numpy_bits(tensor)
            chosen = rng.random(flat.shape) < density
            flat[chosen] += flat.dtype.type(1)


@st.composite
def layouts(draw: st.DrawFn, model: Mapping[str, torch.Tensor]) -> tuple[Layout, Tensors]:
    """Local tensors for a part of a model, and the layout: slices, transposed, padded, FP32 for BF16."""
    names = draw(st.lists(st.sampled_from(sorted(model)), min_size=1, unique=True))
    placements: list[Placement] = []
    untouched: list[tuple[str, Box]] = []
    casts: dict[str, str] = {}
    targets: Tensors = {}
    for name in names:
        source = model[name]
        target = f"local.{name}"
        box = draw(_boxes(source)) if source.numel() else Box.full(tuple(source.shape))
        padding = draw(st.integers(0, 2)) if source.dim() and source.numel() else 0
        shape = box.shape if not padding else (box.shape[0] + padding, *box.shape[1:])
        dtype = source.dtype
        if dtype == torch.bfloat16 and draw(st.booleans()):
            dtype, casts[target] = torch.float32, "bfloat16"
        local = torch.empty(shape, dtype=dtype)
        if draw(st.booleans()):
            local = torch.empty(shape[::-1], dtype=dtype).permute(tuple(reversed(range(len(shape)))))
        bits(local).fill_(1 if source.dtype == torch.bool else PADDING)
        targets[target] = local
        if source.numel():
            placements.append(Placement(name, box, target, 0, tuple(local.stride())))
        if padding:
            untouched.append((target, Box((box.shape[0], *(0,) * (len(shape) - 1)), shape)))
    return Layout(placements, untouched=untouched, casts=casts), targets


def placed(layout: Layout, targets: Mapping[str, torch.Tensor], model: Mapping[str, torch.Tensor]) -> Tensors:
    """What local tensors hold after receiving `model`: by views of torch, element for element."""
    result = {name: _like(tensor) for name, tensor in targets.items()}
    for placement in layout.placements:
        box = placement.source_box
        source = model[placement.source]
        piece = source[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
        local = torch.as_strided(
            bits(result[placement.target]), box.shape, placement.strides, placement.offset
        )
        patterns = bits(piece)
        if placement.target in layout.casts:
            # BF16 is the upper half of FP32.
            patterns = patterns.to(torch.int32) << 16
        local.copy_(patterns)
    return result


def same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    """Whether names, dtypes, shapes and bits agree."""
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype
        and found[name].shape == tensor.shape
        and torch.equal(bits(found[name]), bits(tensor))
        for name, tensor in expected.items()
    )


def copied(model: Mapping[str, torch.Tensor]) -> Tensors:
    """A copy that the original's updates do not reach."""
    return {name: tensor.clone() for name, tensor in model.items()}


@st.composite
def _boxes(draw: st.DrawFn, source: torch.Tensor) -> Box:
    """The whole tensor, or a part cut along its first or its last dimension."""
    start, stop = [0] * source.dim(), list(source.shape)
    if source.dim():
        along = draw(st.sampled_from((0, source.dim() - 1)))
        start[along] = draw(st.integers(0, stop[along] - 1))
        stop[along] = draw(st.integers(start[along] + 1, stop[along]))
    return Box(tuple(start), tuple(stop))


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """An independent tensor of the same strides and bits."""
    result = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    bits(result).copy_(bits(tensor))
    return result


def _randomize(tensor: torch.Tensor, rng: np.random.Generator, share: float) -> None:
    flat = numpy_bits(tensor)
    random = rng.integers(0, 256, (*flat.shape, flat.itemsize), np.uint8).view(flat.dtype)[..., 0]
    if tensor.dtype == torch.bool:
        random &= 1
    flat[...] = np.where(np.asarray(rng.random(flat.shape) < share), random, flat)
