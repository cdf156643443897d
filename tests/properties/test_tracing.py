"""Any loader that only moves elements is found out, element by element."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deltafmt
from deltafmt.layout import TargetInfo
from deltafmt.tracing.bits import layout_by_bits
from deltafmt.tracing.counted import layout_by_numbers
from deltafmt.tracing.meet import Budget, Loop, common, view_axes
from deltafmt.tracing.parts import Numbers
from deltafmt.tracing.recorded import layout_by_records


class Moves:
    """Tensors that are cut, turned, joined and repeated at random into others."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.shapes = [self.shape() for _ in range(int(self.rng.integers(1, 4)))]
        self.plan = [int(x) for x in self.rng.integers(0, 1 << 30, 6)]

    def shape(self) -> tuple[int, ...]:
        return tuple(int(n) for n in self.rng.integers(1, 6, int(self.rng.integers(1, 4))))

    def sources(self, fill: Any) -> dict[str, torch.Tensor]:
        return {f"s{k}": fill(shape) for k, shape in enumerate(self.shapes)}

    def made(self, given_: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The targets' contents, by the same random moves at each call."""
        rng = np.random.default_rng(self.plan)
        made = {}
        for k in range(int(rng.integers(1, 4))):
            parts = [self.turned(given_[f"s{int(rng.integers(len(given_)))}"], rng) for _ in range(2)]
            made[f"t{k}"] = torch.cat([part.reshape(-1) for part in parts])
            size = made[f"t{k}"].numel()
            for width in (2, 3, 5):
                if size % width == 0 and rng.random() < 0.5:
                    made[f"t{k}"] = made[f"t{k}"].view(-1, width)
                    break
        return made

    def patched(self, given_: dict[str, torch.Tensor], made: dict[str, torch.Tensor]) -> None:
        """Write parts over in place: with other parts of the same tensors, with sources, with nothing."""
        rng = np.random.default_rng([*self.plan, 1])
        for tensor in made.values():
            flat = tensor.view(-1)
            for _ in range(int(rng.integers(0, 4))):
                step, low, source = int(rng.integers(1, 4)), int(rng.integers(0, len(flat))), rng.random()
                window = flat[low::step]
                if source < 0.4:
                    other = given_["s0"].reshape(-1)
                    count = min(len(window), len(other))
                    window[:count].copy_(other[:count])
                elif source < 0.8:
                    window.copy_(flat[: len(window)].clone().roll(int(rng.integers(0, 3)), 0))
                else:
                    window.fill_(0)

    def turned(self, tensor: torch.Tensor, rng: Any) -> torch.Tensor:
        for d in range(tensor.ndim):
            low = int(rng.integers(0, tensor.shape[d]))
            tensor = tensor.narrow(d, low, int(rng.integers(1, tensor.shape[d] - low + 1)))
        tensor = tensor.permute(*rng.permutation(tensor.ndim).tolist())
        if rng.random() < 0.3:
            tensor = tensor.flip(0)
        if rng.random() < 0.2:
            tensor = torch.stack([tensor, tensor])
        return tensor


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_the_layout_is_the_loader(seed: int) -> None:
    moves = Moves(seed)
    zeros = moves.sources(lambda shape: torch.zeros(shape, dtype=torch.bfloat16))
    targets = {name: torch.zeros_like(made) for name, made in moves.made(zeros).items()}
    if seed % 2:
        targets = {name: t.T.contiguous().T if t.ndim == 2 else t for name, t in targets.items()}

    def load(named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, made in moves.made(dict(named)).items():
            targets[name].copy_(made)

    held_against(moves, deltafmt.trace_layout(load, deltafmt.Schema.of(zeros), targets), targets)


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_each_means_finds_the_same(seed: int) -> None:
    """Also where what was written is written over, in part, out of itself."""
    moves = Moves(seed)
    zeros = moves.sources(lambda shape: torch.zeros(shape, dtype=torch.bfloat16))
    targets = {name: torch.zeros_like(made) for name, made in moves.made(zeros).items()}

    def load(named: Iterable[tuple[str, torch.Tensor]]) -> None:
        given_ = dict(named)
        for name, made in moves.made(given_).items():
            targets[name].copy_(made)
        moves.patched(given_, targets)

    schema = deltafmt.Schema.of(zeros)
    spared = frozenset(targets)
    layouts = [
        layout_by_records(load, schema, targets, spared),
        layout_by_numbers(load, schema, Numbers(schema), targets, spared),
        layout_by_bits(load, schema, Numbers(schema), targets, spared),
    ]
    for layout in layouts:
        layout.validate(schema, {name: TargetInfo.of(tensor) for name, tensor in targets.items()})
        held_against(moves, layout, targets, patched=True)


def held_against(
    moves: Moves, layout: deltafmt.Layout, targets: dict[str, torch.Tensor], *, patched: bool = False
) -> None:
    numbers: list[int] = [1]

    def counted(shape: tuple[int, ...]) -> torch.Tensor:
        first = numbers[0]
        numbers[0] += int(np.prod(shape))
        return torch.arange(first, numbers[0]).view(shape)

    given_ = moves.sources(counted)
    expected = moves.made(given_)
    if patched:
        moves.patched(given_, expected)
    for name, wanted in expected.items():
        info = TargetInfo.of(targets[name])
        memory = torch.zeros(info.span, dtype=torch.int64)
        for p in layout.placements:
            if p.target == name:
                box = given_[p.source][p.source_box.slices()]
                memory.as_strided(box.shape, p.strides, p.offset).copy_(box)
        assert torch.equal(memory.as_strided(info.shape, info.strides), wanted)


@settings(max_examples=200)
@given(st.integers(0, 2**32))
def test_what_a_view_and_a_piece_have_in_common(seed: int) -> None:
    rng = np.random.default_rng(seed)
    (shape, strides, offset), (extents, spans, begin) = strided(rng), strided(rng)
    if shape and rng.random() < 0.1:
        strides[int(rng.integers(len(shape)))] = 0
    steps = rng.integers(-9, 10, len(extents)).tolist()
    loops = [Loop(*loop) for loop in zip(extents, spans, steps, strict=True) if loop[0] > 1]
    piece = tuple(sorted(loops, key=lambda loop: -loop.stride))
    stands = {begin + int(np.dot(index, spans)): int(np.dot(index, steps)) for index in np.ndindex(*extents)}
    expected = {}
    for index in np.ndindex(*shape):
        address = offset + int(np.dot(index, strides))
        if address in stands:
            expected[index] = stands[address]
    found: dict[tuple[int, ...], int] = {}
    budget = Budget(1 << 20)
    for part in common(view_axes(shape, strides), offset - begin, piece, len(shape), budget):
        for counts in np.ndindex(*(run.times for run in part.runs)):
            at, first = list(part.start), part.first
            for count, run in zip(counts, part.runs, strict=True):
                at[run.axis] += count * run.unit
                first += count * run.step
            assert tuple(at) not in found
            found[tuple(at)] = first
    assert found == expected


def strided(rng: Any) -> tuple[list[int], list[int], int]:
    """(shape, strides, offset) whose elements have addresses of their own."""
    shape = rng.integers(1, 6, int(rng.integers(0, 5))).tolist()
    strides, reach = [0] * len(shape), 1
    for d in rng.permutation(len(shape)).tolist():
        strides[d] = reach
        reach = reach * shape[d] * int(rng.choice([1, 1, 1, 2, 3])) + int(rng.choice([0, 0, 0, 1]))
    return shape, strides, int(rng.integers(0, 30))
