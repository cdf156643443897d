#!/usr/bin/env python3
"""Ranks of a tensor-parallel trainer publish versions together.

    torchrun --nproc-per-node 2 tools/examples/ranks.py ./run

Each rank holds half of the rows of one weight and half of the columns of another, and all of a norm.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import deltafmt
from deltafmt.schema import Schema, TensorSpec

HIDDEN, INNER = 64, 256


def layout_of(rank: int, world: int) -> deltafmt.Layout:
    """Where this rank's parts of the canonical tensors stand in its own."""
    share = INNER // world
    low, high = rank * share, (rank + 1) * share
    return deltafmt.Layout(
        [
            deltafmt.Placement("up", deltafmt.Box((low, 0), (high, HIDDEN)), "up", 0, (HIDDEN, 1)),
            deltafmt.Placement("down", deltafmt.Box((0, low), (HIDDEN, high)), "down", 0, (share, 1)),
            deltafmt.Placement("norm", deltafmt.Box((0,), (HIDDEN,)), "norm", 0, (1,)),
        ]
    )


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    schema = Schema(
        [
            TensorSpec("up", "bfloat16", (INNER, HIDDEN)),
            TensorSpec("down", "bfloat16", (HIDDEN, INNER)),
            TensorSpec("norm", "float32", (HIDDEN,)),
        ]
    )
    local = {
        "up": torch.randn(INNER // world, HIDDEN).bfloat16(),
        "down": torch.randn(HIDDEN, INNER // world).bfloat16(),
        "norm": torch.ones(HIDDEN),
    }
    writer = deltafmt.Writer(
        sys.argv[1], schema=schema, rank=rank, world_size=world, layout=layout_of(rank, world)
    )
    writer.publish_anchor(local, step=0)
    for step in range(1, 4):
        local["up"][step] += 1
        local["norm"] *= 0.5
        version = writer.publish(local, step=step)
        if rank == 0:
            info = deltafmt.open(sys.argv[1]).info(version)
            print(f"version {version}, step {info.step}: {info.changed} elements changed, by {world} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main()
