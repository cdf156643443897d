"""One rank of a sharded trainer as a process of its own: `python -m tests.integrations.worker JSON`.

Each scenario trains a real model, publishes it, and keeps what the model really is (gathered by torch, apart
from the publishing) in files next to the root, for the test to compare.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import deltafmt
from deltafmt.store import LocalStore, register_protocol
from deltafmt.tensors import local_part
from deltafmt.write import marked as delta
from deltafmt.write.cut import Bits, Piece
from deltafmt.write.part import PlacedSource
from tests.integrations.models import Block, Policy, loss_of
from tests.integrations.traffic import Traffic

Full = dict[str, torch.Tensor]
Report = dict[str, Any]


def main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    register_protocol("counted", lambda path, _: CountedStore(path))
    dist.init_process_group(
        "gloo", init_method=f"file://{task['group']}", rank=task["rank"], world_size=task["world"]
    )
    report = {name: SCENARIOS[name](Path(task["root"]) / name) for name in task["names"]}
    dist.barrier()
    print(json.dumps(report), flush=True)
    # Groups need not be taken down in an order that all ranks agree on.
    os._exit(0)


class CountedStore(LocalStore):
    """A folder that counts the bytes of data read from it."""

    fetched = 0

    def read_range(self, key: str, start: int, stop: int) -> Any:
        if key.endswith(".dfs"):
            CountedStore.fetched += stop - start
        return super().read_range(key, start, stop)


class Live:
    """Counts the bytes of live tensors that publishing reads."""

    def __init__(self) -> None:
        self.read = 0
        pieces = PlacedSource.pieces

        def counted(self_: PlacedSource, domain: int) -> Iterator[tuple[Piece, Bits]]:
            for piece, bits in pieces(self_, domain):
                self.read += bits.nbytes
                yield piece, bits

        PlacedSource.pieces = counted  # type: ignore[method-assign,assignment]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, vocabulary: int, seed: int) -> None:
    optimizer.zero_grad()
    loss_of(model, vocabulary, seed).backward()
    optimizer.step()


def gathered(model: nn.Module) -> Full:
    """What the model really is, as torch gathers it."""
    full = {}
    for name, tensor in model.state_dict().items():
        full[name] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
    return full


def gathered_flat(model: nn.Module) -> Full:
    with FullyShardedDataParallel.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=False)
    ):
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def keep(root: Path, version: int, full: Full) -> None:
    if dist.get_rank() == 0:
        torch.save(full, f"{root}-{version}.pt")


def life(
    root: Path,
    model: nn.Module,
    *,
    vocabulary: int,
    given: Callable[[nn.Module], Any] = nn.Module.state_dict,
    gather: Callable[[nn.Module], Full] = gathered,
    publish_dtype: str | None = None,
    lr: float = 1e-3,
) -> Report:
    """Train and publish, at once and behind; go on with a new writer; count what all that moves."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def writer() -> deltafmt.Writer:
        return deltafmt.Writer(
            f"counted://{root}",
            group=dist.group.WORLD,
            publish_dtype=publish_dtype,
            options=deltafmt.WriterOptions(threads=1, rank_timeout_seconds=60.0),
        )

    live = Live()
    with Traffic() as traffic, writer() as w:
        assert w.publish_anchor(given(model)) == 0
        anchored = live.read
    keep(root, 0, gather(model))
    w = writer()
    assert w.resume(0, given(model)) == 0
    for version in (1, 2):
        train(model, optimizer, vocabulary, version)
        live.read = 0
        with traffic:
            assert w.publish(given(model), step=version) == version
        keep(root, version, gather(model))
    detected = live.read
    train(model, optimizer, vocabulary, 3)
    keep(root, 3, gather(model))
    CountedStore.fetched = 0
    with writer() as later:
        with traffic:
            pending = later.publish_async(given(model), step=3)
        for parameter in model.parameters():
            parameter.data.zero_()
        assert pending.result() == 3
    return {
        "calls": dict(traffic.calls),
        "longest": traffic.longest,
        "largest": traffic.largest,
        "moved": traffic.sent,
        "anchored": anchored,
        "detected": detected,
        "stored": CountedStore.fetched,
    }


def policy(vocabulary: int, width: int, **settings: Any) -> Policy:
    torch.manual_seed(0)
    return Policy(vocabulary=vocabulary, width=width, **settings)


def shard_all(model: Policy, mesh: DeviceMesh | None = None, **settings: Any) -> nn.Module:
    if mesh is not None:
        settings["mesh"] = mesh
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    return model


def fsdp2(root: Path) -> Report:
    """FP32 masters, published as the BF16 that the model computes with."""
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    def gather(model: nn.Module) -> Full:
        return {name: tensor.bfloat16() for name, tensor in gathered(model).items()}

    model = shard_all(policy(1024, 256), mp_policy=mixed)
    return life(root, model, vocabulary=1024, gather=gather, publish_dtype="bfloat16", lr=1e-6)


def uneven(root: Path) -> Report:
    """Three ranks share what three does not divide; the module itself is given."""
    return life(root, shard_all(policy(67, 10)), vocabulary=67, given=deltafmt.shards_of)


def second_dim(root: Path) -> Report:
    """Matrices are cut along their second dimension."""
    model = shard_all(policy(67, 12), shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else Shard(0))

    def given(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        return model.named_parameters(remove_duplicate=False)

    def gather(model: nn.Module) -> Full:
        return {name: p.full_tensor() for name, p in given(model) if isinstance(p, DTensor)}

    return life(root, model, vocabulary=67, given=given, gather=gather)


def hybrid(root: Path) -> Report:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return life(root, shard_all(policy(67, 12), mesh), vocabulary=67)


def tensor_parallel(root: Path) -> Report:
    """Tensor parallelism within, FSDP around it: both cut the same dimension."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = policy(67, 12, tied=False)
    for block in model.blocks:
        assert isinstance(block, Block)
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return life(root, shard_all(model, mesh["dp"]), vocabulary=67)


def restarted(root: Path) -> Report:
    """One more version of what a job of any number of ranks has left at the root."""
    model = shard_all(policy(67, 10))
    writer = deltafmt.Writer(str(root), group=dist.group.WORLD, options=deltafmt.WriterOptions(threads=1))
    version = writer.next_version
    dist.barrier()
    if version:
        train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), 67, version)
        assert writer.publish(model.state_dict()) == version
    else:
        writer.publish_anchor(model.state_dict())
    keep(root, version, gathered(model))
    return {"version": version}


def flat(root: Path, **settings: Any) -> Report:
    model = FullyShardedDataParallel(
        policy(67, 10), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), **settings
    )
    return life(root, model, vocabulary=67, given=deltafmt.shards_of, gather=gathered_flat)


def marked(root: Path, model: nn.Module, given: Any, gather: Callable[[nn.Module], Full]) -> Report:
    """Without a copy: each rank undoes the optimizer's steps on its own part."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    detector = deltafmt.AdamWDetector(optimizer, model.named_parameters())
    writer = deltafmt.Writer(str(root), group=dist.group.WORLD, detector=detector, publish_dtype="bfloat16")
    module: Any = delta
    read = module.stored_bits

    reads: list[int] = []

    def counted(*arguments: Any) -> Any:
        reads.append(arguments[1])
        return read(*arguments)

    module.stored_bits = counted
    for version in range(4):
        if version:
            train(model, optimizer, 67, version)
            assert writer.publish(given(model)) == version
        else:
            assert writer.publish_anchor(given(model)) == version
        keep(root, version, {name: tensor.bfloat16() for name, tensor in gather(model).items()})
    module.stored_bits = read
    held = sum(local_part(parameter).numel() for parameter in model.parameters())
    return {"lost": detector.lost, "reads": len(reads), "bytes_per_element": detector.nbytes / held}


def marked_flat(root: Path) -> Report:
    model = FullyShardedDataParallel(
        policy(67, 10), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu")
    )
    return marked(root, model, deltafmt.shards_of, gathered_flat)


SCENARIOS: Mapping[str, Callable[[Path], Report]] = {
    "fsdp2": fsdp2,
    "uneven": uneven,
    "second-dim": second_dim,
    "hybrid": hybrid,
    "tensor-parallel": tensor_parallel,
    "restarted": restarted,
    "flat": lambda root: flat(root, use_orig_params=False),
    "flat-originals": lambda root: flat(root, use_orig_params=True),
    "marked": lambda root: marked(root, shard_all(policy(67, 12)), nn.Module.state_dict, gathered),
    "marked-flat": marked_flat,
    "flat-whole": lambda root: flat(root, sharding_strategy=ShardingStrategy.NO_SHARD),
}


if __name__ == "__main__":
    main()
