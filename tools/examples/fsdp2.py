#!/usr/bin/env python3
"""A trainer sharded by `fully_shard` publishes after each step; every rank stores what it holds.

    torchrun --nproc-per-node 2 tools/examples/fsdp2.py ./run

Nothing is gathered: rank k puts one object with the changes in its shards, and rank 0 makes the version of them.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import deltafmt

WIDTH, STEPS = 128, 3


def main(root: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU()) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    writer = deltafmt.Writer(root, group=dist.group.WORLD, publish_dtype="bfloat16")
    writer.publish_anchor(model.state_dict(), step=0)
    for step in range(1, STEPS + 1):
        x = torch.randn(8, WIDTH)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        version = writer.publish(model.state_dict(), step=step)
        found = writer.last_publish
        assert found is not None
        line = f"rank {dist.get_rank()}, version {version}: {found.changed} changed in {found.stored_bytes} bytes\n"
        sys.stdout.write(line)
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1])
