"""What an inference engine's rank holds: fused, sharded tensors, told twice.

Once as a `Layout`, by which deltafmt writes into them; and once as plain torch slicing, by which the demo
checks the outcome without any of deltafmt's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from deltafmt.cli.demo.model import Shape
from deltafmt.geometry import Box
from deltafmt.layout import Layout, Placement

Tensors = Mapping[str, torch.Tensor]


def shards(full: Tensors, shape: Shape, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """The rank's local tensors, cut from the full ones by torch alone."""

    def rows(name: str) -> torch.Tensor:
        return full[name].chunk(ranks, 0)[rank]

    def columns(name: str) -> torch.Tensor:
        return full[name].chunk(ranks, 1)[rank]

    local = {"embed_tokens.weight": rows("embed_tokens.weight"), "norm.weight": full["norm.weight"]}
    for layer in range(shape.layers):
        old = f"layers.{layer}"
        local |= {
            f"{old}.qkv.weight": torch.cat([rows(f"{old}.self_attn.{p}_proj.weight") for p in "qkv"]),
            f"{old}.o.weight": columns(f"{old}.self_attn.o_proj.weight"),
            f"{old}.gate_up.weight": torch.cat([rows(f"{old}.mlp.{p}_proj.weight") for p in ("gate", "up")]),
            f"{old}.down.weight": columns(f"{old}.mlp.down_proj.weight"),
            f"{old}.norm_1.weight": full[f"{old}.input_layernorm.weight"],
            f"{old}.norm_2.weight": full[f"{old}.post_attention_layernorm.weight"],
        }
    return {name: tensor.contiguous() for name, tensor in local.items()}


def layout(full: Tensors, shape: Shape, rank: int, ranks: int) -> Layout:
    """The same as placements: which box of which stored tensor stands where in which local one.

    Of `full` only shapes are read.
    """
    return Layout(_placements(lambda name: tuple(full[name].shape), shape, rank, ranks))


def _placements(
    size: Callable[[str], tuple[int, ...]], shape: Shape, rank: int, ranks: int
) -> Iterator[Placement]:
    def rows(source: str, target: str, first_row: int = 0) -> Placement:
        total, width = size(source)
        part = total // ranks
        box = Box((rank * part, 0), ((rank + 1) * part, width))
        return Placement(source, box, target, first_row * width, (width, 1))

    def columns(source: str, target: str) -> Placement:
        height, total = size(source)
        part = total // ranks
        return Placement(source, Box((0, rank * part), (height, (rank + 1) * part)), target, 0, (part, 1))

    def whole(source: str, target: str) -> Placement:
        return Placement(source, Box.full(size(source)), target, 0, (1,))

    def fused(sources: list[str], target: str) -> Iterator[Placement]:
        first_row = 0
        for source in sources:
            yield rows(source, target, first_row)
            first_row += size(source)[0] // ranks

    yield rows("embed_tokens.weight", "embed_tokens.weight")
    yield whole("norm.weight", "norm.weight")
    for layer in range(shape.layers):
        old = f"layers.{layer}"
        yield from fused([f"{old}.self_attn.{p}_proj.weight" for p in "qkv"], f"{old}.qkv.weight")
        yield columns(f"{old}.self_attn.o_proj.weight", f"{old}.o.weight")
        yield from fused([f"{old}.mlp.{p}_proj.weight" for p in ("gate", "up")], f"{old}.gate_up.weight")
        yield columns(f"{old}.mlp.down_proj.weight", f"{old}.down.weight")
        yield whole(f"{old}.input_layernorm.weight", f"{old}.norm_1.weight")
        yield whole(f"{old}.post_attention_layernorm.weight", f"{old}.norm_2.weight")


def blank(full: Tensors, shape: Shape, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Live tensors of a rank that holds nothing yet; with one rank and no fusing, the stored tensors' own."""
    if ranks == 1:
        live = {name: torch.zeros(tensor.shape, dtype=torch.bfloat16) for name, tensor in full.items()}
        live["lm_head.weight"] = live["embed_tokens.weight"]
        return live
    local = shards(full, shape, rank, ranks)
    return {name: torch.zeros(tensor.shape, dtype=torch.bfloat16) for name, tensor in local.items()}
