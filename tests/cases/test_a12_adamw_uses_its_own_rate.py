"""A12: undoing AdamW must use the learning rate of the step itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import deltafmt
from tests.cases.common import new_root

STEPS, ELEMENTS = 60, 50_000


def rate(step: int) -> float:
    """Three steps of warm-up, then a cosine."""
    return (step + 1) / 3 if step < 3 else 0.5 * (1 + math.cos(math.pi * (step - 3) / (STEPS - 3)))


def listed(lineage: Any, version: int) -> int:
    return int(lineage.manifest(version).listed)


@pytest.mark.parametrize("scheduler_first", [True, False])
@pytest.mark.parametrize("form", [{"foreach": False}, {"foreach": True}, {"fused": True}, {"amsgrad": True}])
def test_nothing_is_missed_whenever_the_scheduler_steps(form: dict[str, bool], scheduler_first: bool) -> None:
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(ELEMENTS) * 0.02)
    optimizer = torch.optim.AdamW([weights], lr=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01, **form)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    root = new_root()
    named = {"w": weights}
    detector = deltafmt.AdamWDetector(optimizer, named)
    writer = deltafmt.Writer(root, detector=detector, publish_dtype="bfloat16")
    writer.publish_anchor(named)
    lineage = deltafmt.open(root)
    missed = changed = stored = 0
    before = weights.detach().bfloat16()
    for step in range(STEPS):
        weights.grad = torch.randn(ELEMENTS) * 1e-3
        optimizer.step()
        if scheduler_first:
            scheduler.step()
        version = writer.publish(named, step=step)
        if not scheduler_first:
            scheduler.step()
        now = weights.detach().bfloat16()
        missed += int((lineage.read(version)["w"].view(torch.int16) != now.view(torch.int16)).sum())
        changed += int((before.view(torch.int16) != now.view(torch.int16)).sum())
        stored += listed(lineage, version)
        before = now
    assert missed == 0
    assert changed > 50_000
    assert 0 <= stored - changed <= 0.02 * changed
    assert detector.report.lost == 0
    assert detector.report.changed <= changed <= detector.report.changed + detector.report.unsure
