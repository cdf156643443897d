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

    schema = deltafmt.Schema.of(zeros)
    layout = deltafmt.trace_layout(load, schema, targets)
    layout.validate(schema, {name: TargetInfo.of(tensor) for name, tensor in targets.items()})
    numbers: list[int] = [0]

    def counted(shape: tuple[int, ...]) -> torch.Tensor:
        first = numbers[0]
        numbers[0] += int(np.prod(shape))
        return torch.arange(first, numbers[0]).view(shape)

    given_ = moves.sources(counted)
    expected = moves.made(given_)
    for name, wanted in expected.items():
        found = torch.full_like(wanted, -1)
        info = TargetInfo.of(targets[name])
        memory = torch.full((info.span,), -1)
        for p in layout.placements:
            if p.target == name:
                box = given_[p.source][p.source_box.slices()]
                memory.as_strided(box.shape, p.strides, p.offset).copy_(box)
        found.copy_(memory.as_strided(info.shape, info.strides))
        assert torch.equal(found, wanted)
