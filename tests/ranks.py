"""Ranks of a writer as threads of one process, which talk through the root."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

import deltafmt
from deltafmt.layout import Layout, Placement
from deltafmt.schema import Schema

Tensors = dict[str, torch.Tensor]


def memory_root() -> str:
    return f"memory://{secrets.token_hex(8)}"


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each call returns or raises; all run at once."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # noqa: BLE001 (the test looks at it)
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def writers(root: str, count: int, **settings: Any) -> list[deltafmt.Writer]:
    options = settings.pop("options", {})
    layouts = settings.pop("layouts", [None] * count)
    return [
        deltafmt.Writer(
            root,
            rank=rank,
            world_size=count,
            layout=layouts[rank],
            options=deltafmt.WriterOptions(**{"rank_timeout_seconds": 20.0, "threads": 1, **options}),
            **settings,
        )
        for rank in range(count)
    ]


def publish(
    ranks: Sequence[deltafmt.Writer], parts: Sequence[Tensors | deltafmt.Shards], **labels: Any
) -> list[Any]:
    return together([partial(w.publish, p, **labels) for w, p in zip(ranks, parts, strict=True)])


def anchor(
    ranks: Sequence[deltafmt.Writer], parts: Sequence[Tensors | deltafmt.Shards], **labels: Any
) -> list[Any]:
    return together([partial(w.publish_anchor, p, **labels) for w, p in zip(ranks, parts, strict=True)])


def model(seed: int = 0) -> Tensors:
    random = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(64, 48, generator=random).bfloat16(),
        "up": torch.randn(96, 48, generator=random).bfloat16(),
        "down": torch.randn(48, 96, generator=random).bfloat16(),
        "norm": torch.randn(48, generator=random),
        "scale": torch.randn((), generator=random),
    }


def changed(tensors: Tensors, seed: int) -> Tensors:
    """A copy in which some elements of each tensor have other bits."""
    random = torch.Generator().manual_seed(seed)
    result = {}
    for name, tensor in tensors.items():
        mask = torch.rand(tensor.shape, generator=random) < 0.05
        if name == "scale":
            mask = torch.tensor(seed % 2 == 0)
        result[name] = torch.where(mask, tensor * 2 + 1, tensor)
    return result


def tensor_parallel(state: Tensors, world: int) -> tuple[list[Layout], list[Tensors]]:
    """Column and row shards with a padded, fused local tensor; norms and scale on all ranks."""
    schema = Schema.of(state)
    layouts, parts = [], []
    for rank in range(world):
        placements, local = [], {}
        # Two column-parallel tensors in one local one, and one that is cut along its second dimension.
        low, high = rank * 96 // world, (rank + 1) * 96 // world
        rows, more = high - low, 64 // world
        fused = torch.full((rows + more, 48), -1.0, dtype=torch.bfloat16)
        fused[:rows], fused[rows:] = state["up"][low:high], state["embed"][rank * more : (rank + 1) * more]
        local["fused"] = fused
        placements.append(Placement("up", deltafmt.Box((low, 0), (high, 48)), "fused", 0, (48, 1)))
        box = deltafmt.Box((rank * more, 0), ((rank + 1) * more, 48))
        placements.append(Placement("embed", box, "fused", rows * 48, (48, 1)))
        local["down"] = state["down"][:, low:high].clone()
        placements.append(Placement("down", deltafmt.Box((0, low), (48, high)), "down", 0, (rows, 1)))
        for name in ("norm", "scale"):
            local[name] = state[name].clone()
            spec = schema[name]
            full = deltafmt.Box((0,) * len(spec.shape), spec.shape)
            placements.append(Placement(name, full, name, 0, (1,) * len(spec.shape)))
        layouts.append(Layout(placements))
        parts.append(local)
    return layouts, parts


STAGES = (("embed", "norm", "scale"), ("up", "norm"), ("down", "scale"))


def staged_parts(state: Tensors) -> list[Tensors]:
    """What three pipeline-like ranks have: whole tensors, some of them on several."""
    return [{name: state[name] for name in names} for names in STAGES]


def assert_holds(root: str, version: int, state: Tensors) -> None:
    """The version is exactly these bits."""
    read = deltafmt.open(root).read(version)
    assert read.keys() == state.keys()
    for name, tensor in state.items():
        kind = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
        assert torch.equal(read[name].view(kind), tensor.view(kind)), name
