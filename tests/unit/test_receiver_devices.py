"""Receivers whose tensors are not in main memory: here some or all of them are only said not to be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltafmt import BaseMismatchError, Box, ChecksumError, Layout, Placement, Receiver
from deltafmt.read.targets import Targets
from tests.reading import Course, blank, copied, same


@pytest.fixture(params=["all", "every other"], autouse=True)
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    every = 1 if request.param == "all" else 2
    foreign = property(lambda targets: np.arange(len(targets.names)) % every == 0)
    monkeypatch.setattr(Targets, "foreign", foreign)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_versions_come_in_and_go_back() -> None:
    course = Course(
        {"a": rand(40, 9), "b": torch.randn(77), "c": torch.arange(9), "d": torch.zeros(5, dtype=torch.bool)}
    )
    course.anchor()
    live = blank(course.tensors)
    receiver = Receiver(course.root, live)
    for seed in range(4):
        receiver.advance()
        assert same(live, course.tensors)
        assert receiver.verify().complete
        held = copied(live)
        course.step(seed=seed, share=0.3)
        step = receiver.prepare()
        step.apply()
        assert same(live, course.tensors)
        step.rollback()
        assert same(live, held)
    receiver.advance(1, streaming=True)
    assert same(live, course.versions[1])
    live["b"][3] += 1
    with pytest.raises(ChecksumError):
        receiver.verify()


def test_strides_slots_and_casts() -> None:
    course = Course({"e": rand(4, 3, 5), "t": rand(6, 8), "w": rand(12, 4), "embed": rand(10, 4)})
    course.anchor()
    slots = [0, 1, 2, 3, 0, 2]
    live = {
        "slots": torch.zeros(6, 3, 5, dtype=torch.bfloat16),
        "t": torch.zeros(8, 6, dtype=torch.bfloat16).T,
        "wide": torch.zeros(12, 4),
        "embed": torch.zeros(10, 4, dtype=torch.bfloat16),
    }
    live["head"] = live["embed"]
    placements = [
        Placement("e", Box((expert, 0, 0), (expert + 1, 3, 5)), "slots", slot * 15, (15, 5, 1))
        for slot, expert in enumerate(slots)
    ]
    placements += [
        Placement("t", Box.full((6, 8)), "t", 0, (1, 6)),
        Placement("w", Box.full((12, 4)), "wide", 0, (4, 1)),
        Placement("embed", Box.full((10, 4)), "embed", 0, (4, 1)),
        Placement("embed", Box.full((10, 4)), "head", 0, (4, 1)),
    ]
    receiver = Receiver(course.root, live, layout=Layout(placements, casts={"wide": "bfloat16"}))
    for seed in range(4):
        receiver.advance()
        wide = (course.tensors["w"].view(torch.int16).to(torch.int32) << 16).view(torch.float32)
        assert same(
            live,
            {
                "slots": course.tensors["e"][slots],
                "t": course.tensors["t"],
                "wide": wide,
                "embed": course.tensors["embed"],
            },
        )
        assert receiver.verify().complete
        course.step(seed=seed, share=0.3)
    live["wide"][3, 3] = 1 + 2**-20
    with pytest.raises(BaseMismatchError):
        receiver.advance()
    receiver.advance()
    assert receiver.verify().complete
