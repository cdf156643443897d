"""Whatever happens to a trainer between two versions, detectors without a copy publish what its tensors hold."""

from __future__ import annotations

import copy
import random
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import deltafmt
from tests.cases.common import assert_same

Tensors = dict[str, torch.Tensor]


class Life:
    """A trainer of random shape; each verb is something that may happen to it."""

    def __init__(self, kind: str, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.noise = torch.Generator().manual_seed(seed)
        shapes = [(dice.randint(1, 40), dice.randint(1, 30)) for _ in range(dice.randint(1, 5))]
        self.masters = {f"p{k}": nn.Parameter(self.random(shape) * 0.02) for k, shape in enumerate(shapes)}
        self.copies: Tensors = {}
        if kind == "masters":
            self.copies = {name: nn.Parameter(p.detach().bfloat16()) for name, p in self.masters.items()}
        self.others = {"buffer": self.random((50,)), "frozen": nn.Parameter(self.random((77,)), False)}
        lr = dice.choice([0.0, 1e-6, 1e-4, 1e-3])
        held = [*self.masters.values(), self.others["frozen"]]
        form: Any = dice.choice([{"foreach": False}, {"foreach": True}, {"fused": True}])
        groups: Any = [{"params": held[:1]}, {"params": held[1:], "lr": 3 * lr}]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=lr,
            weight_decay=dice.choice([0.0, 0.01, 0.5]),
            amsgrad=dice.random() < 0.2,
            **form,
        )
        self.detector: Any
        if kind == "adamw":
            named = {**self.masters, "frozen": self.others["frozen"]}
            self.detector = deltafmt.AdamWDetector(self.optimizer, named)
        else:
            published = {**(self.copies or self.masters), "frozen": self.others["frozen"]}
            masters = self.masters if self.copies else None
            self.detector = deltafmt.CastDetector(self.optimizer, published, masters=masters)
        self.url = f"memory://{uuid.uuid4().hex}"
        self.state: Any = None
        self.writer = self.opened()
        self.expected: dict[int, Tensors] = {}
        self.anchor()

    def random(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self.noise)

    def opened(self) -> deltafmt.Writer:
        options = deltafmt.WriterOptions(
            domain_elements=self.dice.choice([64, 512, 1 << 20]),
            anchor_every=self.dice.choice([None, 3]),
            threads=1,
        )
        return deltafmt.Writer(self.url, detector=self.detector, publish_dtype="bfloat16", options=options)

    @property
    def tensors(self) -> Tensors:
        return {**(self.copies or self.masters), **self.others}

    def held(self) -> Tensors:
        return {name: tensor.detach().bfloat16().clone() for name, tensor in self.tensors.items()}

    def step(self) -> None:
        for parameter in self.masters.values():
            if self.dice.random() < 0.1:
                parameter.grad = None
            else:
                parameter.grad = self.random(tuple(parameter.shape)) * 10 ** self.dice.uniform(-6, 0)
        self.optimizer.step()
        if self.dice.random() < 0.9:
            self.refresh()

    def refresh(self) -> None:
        for name, copy_ in self.copies.items():
            (copy_.data if self.dice.random() < 0.5 else copy_.detach()).copy_(self.masters[name].detach())

    def write(self) -> None:
        """Somebody else writes to a tensor, in one of the ways that there are."""
        tensor = self.dice.choice(list(self.tensors.values()))
        at, how = (
            self.dice.randrange(tensor.numel()),
            self.dice.choice(["data", "counted", "numpy", "storage"]),
        )
        if how == "data":
            tensor.data.view(-1)[at] += 1
        elif how == "counted":
            tensor.detach().view(-1)[at] *= -1
        elif how == "numpy" and tensor.dtype is torch.float32:
            tensor.detach().numpy().reshape(-1)[at] = self.dice.random()
        elif isinstance(tensor, nn.Parameter):
            fresh = tensor.detach().clone()
            fresh.view(-1)[at] += 2
            tensor.data = fresh
        if self.dice.random() < 0.5:
            self.refresh()

    def load_state(self) -> None:
        """The optimizer goes back to what it was once."""
        if self.state is None:
            self.state = copy.deepcopy(self.optimizer.state_dict())
        else:
            self.optimizer.load_state_dict(self.state)
            self.state = None

    def publish(self) -> None:
        self.expected[self.writer.publish(self.tensors)] = self.held()

    def publish_behind(self) -> None:
        held = self.held()
        pending = self.writer.publish_async(self.tensors)
        for tensor in self.tensors.values():
            tensor.data.view(-1)[0] += 0.5
        self.expected[pending.result()] = held

    def fail(self) -> None:
        """A publish that storage refuses."""
        store: Any = self.writer._engine._history.store
        store.put_if_absent = _refuse
        with pytest.raises(deltafmt.StoreError):
            self.writer.publish(self.tensors)
        del store.put_if_absent

    def anchor(self) -> None:
        self.expected[self.writer.publish_anchor(self.tensors)] = self.held()

    def open_again(self) -> None:
        self.writer.close()
        self.writer = self.opened()

    def check(self) -> None:
        lineage = deltafmt.open(self.url)
        assert lineage.latest() == max(self.expected)
        for version, held in self.expected.items():
            assert_same(lineage.read(version), held)
        assert lineage.verify().ok


def _refuse(*_: object) -> None:
    raise deltafmt.StoreError("no", kind="store-failed")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["adamw", "cast", "masters"])
def test_every_version_is_what_the_tensors_held(kind: str, seed: int) -> None:
    life = Life(kind, seed)
    often: list[Callable[[], None]] = [life.step] * 4 + [life.publish] * 3
    rarely = [
        life.write,
        life.load_state,
        life.publish_behind,
        life.fail,
        life.anchor,
        life.open_again,
    ]
    for _ in range(20):
        life.dice.choice(often + rarely)()
    life.check()
