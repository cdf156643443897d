"""A9: one tensor on many ranks; local numbers of experts; redundant slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import deltafmt
from deltafmt.errors import IncompleteError
from deltafmt.schema import Schema
from tests.cases.common import assert_same, new_root
from tests.ranks import Tensors, anchor, publish, writers

EXPERTS = {f"e.{k}": torch.full((6, 4), float(k)).bfloat16() for k in range(4)}


def test_a_replica_is_stored_once_and_a_differing_bit_is_refused() -> None:
    root = new_root()
    norm = torch.linspace(0, 1, 8)
    ranks = writers(root, 2)
    assert anchor(ranks, [{"norm": norm}, {"norm": norm.clone()}]) == [0, 0]
    assert deltafmt.open(root).manifest().shards.writer.tolist() == [0]
    other = norm.clone()
    other.view(torch.int32)[7] ^= 1
    for error in publish(ranks, [{"norm": norm}, {"norm": other}]):
        assert isinstance(error, IncompleteError)
        assert error.kind == "replicas-differ"
        assert "'norm' (0,) to (8,), ranks 0 and 1" in str(error)
    assert deltafmt.open(root).latest() == 0


def test_experts_by_local_numbers_need_their_offset() -> None:
    root = new_root()
    local = [{f"e.{k}": EXPERTS[f"e.{2 * rank + k}"] for k in range(2)} for rank in range(2)]
    for error in anchor(writers(root, 2), local):
        assert isinstance(error, IncompleteError)
        assert error.kind == "replicas-differ"
        assert "'e.0'" in str(error)
    numbered = [{f"e.{2 * rank + k}": EXPERTS[f"e.{2 * rank + k}"] for k in range(2)} for rank in range(2)]
    assert anchor(writers(root, 2, options={"job": "b"}), numbered) == [0, 0]
    assert_same(deltafmt.open(root).read(), EXPERTS)


SLOTS = ((0, 1, 0), (2, 3, 2))


def slots(experts: Tensors, rank: int) -> Tensors:
    return {"experts": torch.stack([experts[f"e.{k}"] for k in SLOTS[rank]])}


def slot_layout(rank: int) -> deltafmt.Layout:
    full = deltafmt.Box((0, 0), (6, 4))
    return deltafmt.Layout(
        [
            deltafmt.Placement(f"e.{k}", full, "experts", 24 * slot, (4, 1))
            for slot, k in enumerate(SLOTS[rank])
        ]
    )


def test_every_slot_of_a_changed_expert_is_written_and_equal_slots_are_published_once() -> None:
    root = new_root()
    ranks = writers(root, 2, schema=Schema.of(EXPERTS), layouts=[slot_layout(0), slot_layout(1)])
    assert anchor(ranks, [slots(EXPERTS, rank) for rank in range(2)]) == [0, 0]
    live = [slots(EXPERTS, rank) for rank in range(2)]
    receivers = [deltafmt.Receiver(root, live[rank], layout=slot_layout(rank)) for rank in range(2)]
    for receiver in receivers:
        receiver.adopt(0)
    new = {**EXPERTS, "e.0": EXPERTS["e.0"] + 5}
    assert publish(ranks, [slots(new, rank) for rank in range(2)]) == [1, 1]
    for rank, receiver in enumerate(receivers):
        assert receiver.advance() == 1
        assert_same(live[rank], slots(new, rank))
    assert_same(deltafmt.open(root).read(), new)
    torn = slots(new, 0)
    torn["experts"].view(torch.int16)[2, 1, 1] ^= 1
    first, second = publish(ranks, [torn, slots(new, 1)])
    assert (first.kind, second.kind) == ("replicas-differ", "rank-failed")
    assert "'e.0'" in str(first)


def stacked(rank: int, numbers: Sequence[int], norm: torch.Tensor) -> deltafmt.Shards:
    """Two experts of four in one local tensor, numbered as the rank takes them, and a norm that all have."""
    held = {"experts": torch.stack([EXPERTS[f"e.{2 * rank + slot}"] for slot in range(2)]), "norm": norm}
    return deltafmt.ShardBuilder(held).experts("experts", "e.{}", numbers=numbers).whole("norm").build()


def test_stacks_of_experts_need_their_global_numbers() -> None:
    norm = torch.linspace(0, 1, 8)
    for error in anchor(writers(new_root(), 2), [stacked(rank, (0, 1), norm) for rank in range(2)]):
        assert isinstance(error, IncompleteError)
        assert error.kind == "replicas-differ"
        assert "'e.0'" in str(error)
    root = new_root()
    ranks = writers(root, 2)
    parts = [stacked(rank, (2 * rank, 2 * rank + 1), norm.clone()) for rank in range(2)]
    assert anchor(ranks, parts) == [0, 0]
    assert_same(deltafmt.open(root).read(), {**EXPERTS, "norm": norm})
    parts[1].tensors["norm"].view(torch.int32)[7] ^= 1
    for error in publish(ranks, parts):
        assert isinstance(error, IncompleteError)
        assert "'norm' (0,) to (8,), ranks 0 and 1" in str(error)
    parts[0].tensors["norm"].view(torch.int32)[7] ^= 1
    parts[1].tensors["experts"][1] += 1
    assert publish(ranks, parts) == [1, 1]
    assert_same(deltafmt.open(root).read(names=["e.3"]), {"e.3": EXPERTS["e.3"] + 1})
