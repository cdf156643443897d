"""Two tensor-parallel ranks that follow one lineage together, each in a process of its own.

    python tools/examples/two_ranks.py ./run

Each rank holds half of the fused gate and up projections and half of the down projection. They form a
group of torch.distributed, so that either both make a step or none does.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from pathlib import Path

import torch
from torch import distributed

import deltafmt

HIDDEN, INNER, RANKS = 32, 64, 2


def publish(root: str) -> None:
    """Three versions of a policy of one layer."""
    torch.manual_seed(0)
    weights = {
        "gate": torch.randn(INNER, HIDDEN).bfloat16(),
        "up": torch.randn(INNER, HIDDEN).bfloat16(),
        "down": torch.randn(HIDDEN, INNER).bfloat16(),
    }
    schema = deltafmt.Schema.of(weights)
    # Cut where the ranks cut, so that each of them reads its own half only.
    hints = [engine(schema, rank)[1] for rank in range(RANKS)]
    writer = deltafmt.Writer(root, options=deltafmt.WriterOptions(tile_for=hints))
    writer.publish_anchor(weights)
    for step in (1, 2):
        for tensor in weights.values():
            tensor[step::7] += 1
        writer.publish(weights, step=step)


def engine(schema: deltafmt.Schema, rank: int) -> tuple[dict[str, torch.Tensor], deltafmt.Layout]:
    """A rank's tensors, and where the policy's elements stand in them."""
    local = {
        "gate_up": torch.zeros(2 * INNER // RANKS, HIDDEN, dtype=torch.bfloat16),
        "down": torch.zeros(HIDDEN, INNER // RANKS, dtype=torch.bfloat16),
    }
    builder = deltafmt.LayoutBuilder(schema, local, rank=rank, world=RANKS)
    layout = builder.fuse("gate_up", ["gate", "up"]).shard("down", "down", dim=1).build()
    return local, layout


def follow(rank: int, root: str, meeting_place: str) -> None:
    distributed.init_process_group("gloo", f"file://{meeting_place}", rank=rank, world_size=RANKS)
    lineage = deltafmt.open(root)
    local, layout = engine(lineage.schema(), rank)
    receiver = deltafmt.Receiver(root, local, layout=layout, group=distributed.group.WORLD)
    for version in (0, 1, None):
        receiver.advance(version)
    policy = lineage.read(receiver.version)
    rows, columns = (policy["gate"].chunk(RANKS)[rank], policy["up"].chunk(RANKS)[rank]), policy["down"]
    assert torch.equal(local["gate_up"], torch.cat(rows))
    assert torch.equal(local["down"], columns.chunk(RANKS, dim=1)[rank])
    # One write, line end and all, since the ranks share the terminal.
    sys.stdout.write(f"rank {rank} holds its half of version {receiver.version}\n")
    sys.stdout.flush()
    distributed.barrier()
    distributed.destroy_process_group()


def main(root: str) -> None:
    publish(root)
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            processes.Process(target=follow, args=(rank, root, str(Path(folder) / "meet")))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        sys.exit("a rank failed")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1])
