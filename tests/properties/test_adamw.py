"""Undoing AdamW misses nothing, next to the borders between BF16 values above all."""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from deltafmt.kernels import marks
from deltafmt.kernels.adamw import Step, mark

Floats = npt.NDArray[np.float32]

LARGE = os.environ.get("DELTAFMT_LARGE") == "1"
ELEMENTS = 2_000_000 if LARGE else 40_000
BETAS = (0.9, 0.95)

FORMS: dict[str, dict[str, Any]] = {
    "one by one": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "lr as a tensor": {"lr": torch.tensor(1e-5), "foreach": False},
    "strong decay": {"weight_decay": 10.0, "lr": 1e-3},
    "large steps": {"lr": 1e-2},
    "small steps": {"lr": 1e-9},
    "large eps": {"eps": 1e-3},
    "no eps": {"eps": 0.0},
}


def bf16(values: Floats) -> npt.NDArray[np.int16]:
    narrow: npt.NDArray[np.int16] = torch.from_numpy(values).bfloat16().view(torch.int16).numpy()
    return narrow


def borders(rng: np.random.Generator, count: int) -> Floats:
    """Values at borders between two BF16 values, and up to four FP32 steps beside them."""
    exponents = rng.integers(90, 140, count).astype(np.uint32)
    upper = rng.integers(0, 2, count).astype(np.uint32) << 15 | exponents << 7
    upper |= rng.integers(0, 128, count).astype(np.uint32)
    bits = (upper << np.uint32(16)) + np.uint32(0x8000) + rng.integers(-4, 5, count).astype(np.uint32)
    return bits.view(np.float32)


def usual(rng: np.random.Generator, count: int) -> Floats:
    return (rng.standard_normal(count) * 0.02).astype(np.float32)


def odd(rng: np.random.Generator, count: int) -> Floats:
    """Zeros of both signs, subnormals, powers of two, infinities and NaN among usual ones."""
    values = usual(rng, count)
    chosen = rng.integers(0, 8, count)
    special = np.array([0.0, -0.0, 1e-42, -1e-45, 2.0**-9, np.inf, np.nan, 1e38], np.float32)
    return np.where(rng.random(count) < 0.3, special[chosen], values).astype(np.float32)


def found(p: Floats, m: Floats, v: Floats, step: Step) -> npt.NDArray[np.bool_]:
    words = marks.words_for(len(p))
    changed, unsure = mark(p, m, v, step, words)
    assert changed + unsure == marks.count(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return bits[: len(p)].astype(bool)


@pytest.mark.parametrize("values", [borders, usual, odd])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_every_form_of_the_step(kind: Any, form: str, values: Any) -> None:
    rng = np.random.default_rng(list(FORMS).index(form))
    options = {"lr": 1e-6, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.01, **FORMS[form]}
    if kind is torch.optim.Adam and form == "strong decay":
        options["decoupled_weight_decay"] = True
    parameter = torch.nn.Parameter(torch.from_numpy(values(rng, ELEMENTS)))
    optimizer = kind([parameter], **options)
    for count in range(1, 4):
        gradient = rng.standard_normal(ELEMENTS) * 10.0 ** rng.uniform(-9, 0, ELEMENTS)
        gradient[rng.random(ELEMENTS) < 0.1] = 0
        parameter.grad = torch.from_numpy(gradient.astype(np.float32))
        before = parameter.detach().clone().numpy()
        optimizer.step()
        state, group = optimizer.state[parameter], optimizer.param_groups[0]
        decoupled = kind is torch.optim.AdamW or group.get("decoupled_weight_decay", False)
        step = Step(
            lr=float(group["lr"]),
            correction1=1 - BETAS[0] ** count,
            correction2=1 - BETAS[1] ** count,
            eps=group["eps"],
            weight_decay=group["weight_decay"] if decoupled else 0.0,
        )
        square = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"].numpy()
        after = parameter.detach().numpy()
        marked = found(after, state["exp_avg"].numpy(), square, step)
        assert not ((bf16(before) != bf16(after)) & ~marked).any()


@pytest.mark.parametrize("rounds", ["once", "product first", "update first"])
@pytest.mark.parametrize("decay", [0.0, 0.1, 0.9])
def test_steps_that_round_less_often(decay: float, rounds: str) -> None:
    rng = np.random.default_rng(7)
    for lr, count in itertools.product((1e-3, 1e-5, 1e-6, 1e-7), (1, 2, 1000)):
        p = np.concatenate((borders(rng, ELEMENTS), usual(rng, ELEMENTS)))
        m = (rng.standard_normal(len(p)) * 10.0 ** rng.uniform(-9, -1, len(p))).astype(np.float32)
        v = (m.astype(np.float64) ** 2 * 10.0 ** rng.uniform(-1, 2, len(p))).astype(np.float32)
        step = Step(
            lr=lr,
            correction1=1 - BETAS[0] ** count,
            correction2=1 - BETAS[1] ** count,
            eps=1e-8,
            weight_decay=decay,
        )
        wide = p.astype(np.float64)
        update = step.size * (m.astype(np.float64) / (np.sqrt(v.astype(np.float64)) * step.root + step.eps))
        factor = 1 - lr * decay
        if rounds == "once":
            after = (wide * factor - update).astype(np.float32)
        elif rounds == "product first":
            after = ((wide * factor).astype(np.float32) - update).astype(np.float32)
        else:
            after = (wide * factor - update.astype(np.float32)).astype(np.float32)
        marked = found(after, m, v, step)
        assert not ((bf16(p) != bf16(after)) & ~marked).any()


def test_few_are_marked_that_have_not_changed() -> None:
    rng = np.random.default_rng(3)
    parameter = torch.nn.Parameter(torch.from_numpy(usual(rng, 400_000)))
    optimizer = torch.optim.AdamW([parameter], lr=1e-6, betas=BETAS, weight_decay=0.01)
    changed = unchanged = 0
    for count in range(1, 9):
        parameter.grad = torch.randn(400_000, generator=torch.Generator().manual_seed(count)) * 1e-3
        before = parameter.detach().clone().numpy()
        optimizer.step()
        state = optimizer.state[parameter]
        step = Step(
            lr=1e-6,
            correction1=1 - BETAS[0] ** count,
            correction2=1 - BETAS[1] ** count,
            eps=1e-8,
            weight_decay=0.01,
        )
        after = parameter.detach().numpy()
        marked = found(after, state["exp_avg"].numpy(), state["exp_avg_sq"].numpy(), step)
        differ = bf16(before) != bf16(after)
        changed += int(differ.sum())
        unchanged += int((marked & ~differ).sum())
    assert unchanged <= 0.02 * changed
