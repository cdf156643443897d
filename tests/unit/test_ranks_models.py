"""Several ranks and models that are not plain: tied names, changes of schema and dtype, anchors kept elsewhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import deltafmt
from deltafmt import IncompleteError, SchemaError
from deltafmt.layout import Layout, Placement
from deltafmt.schema import Schema, TensorSpec
from tests.ranks import Tensors, anchor, assert_holds, changed, memory_root, publish, together, writers


def rand(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_names_tied_on_one_rank_are_stored_once_and_may_part_and_join() -> None:
    root = memory_root()
    embed, up = rand(40, 12, seed=1), rand(30, 12, seed=2)
    ranks = writers(root, 2)
    assert anchor(ranks, [{"embed": embed, "head": embed}, {"up": up}]) == [0, 0]
    lineage = deltafmt.open(root)
    assert lineage.schema(0)["head"].alias_of == "embed"
    assert int(lineage.manifest(0).chunks.listed.sum()) == embed.numel() + up.numel()
    embed[3, 5] += 1
    assert publish(ranks, [{"embed": embed, "head": embed}, {"up": up}]) == [1, 1]
    assert lineage.manifest(1).changed == 1
    head = embed.clone()
    head[0, 0] += 1
    assert publish(ranks, [{"embed": embed, "head": head}, {"up": up}]) == [2, 2]
    assert publish(ranks, [{"embed": embed, "head": embed}, {"up": up}]) == [3, 3]
    for version, last in ((0, None), (1, embed), (2, head), (3, embed)):
        if last is not None:
            assert_holds(root, version, {"embed": embed, "head": last, "up": up})
    assert lineage.verify().ok


def test_a_tie_across_ranks_is_one_tensor_that_both_hold() -> None:
    """The first and the last stage of a pipeline, each with its copy of the tied embedding."""
    root = memory_root()
    schema = Schema(
        (
            TensorSpec("embed", "bfloat16", (40, 12)),
            TensorSpec("up", "bfloat16", (30, 12)),
            TensorSpec("head", "bfloat16", (40, 12), "embed"),
        )
    )
    embed, up = rand(40, 12, seed=1), rand(30, 12, seed=2)
    ranks = writers(root, 2, schema=schema, options={"anchor_every": 2})

    def parts(head: torch.Tensor) -> list[Tensors]:
        return [{"embed": embed, "up": up}, {"head": head}]

    assert anchor(ranks, parts(embed.clone())) == [0, 0]
    for version in (1, 2):
        embed[version] *= 2
        assert publish(ranks, parts(embed.clone())) == [version] * 2
        assert_holds(root, version, {"embed": embed, "up": up, "head": embed})
    apart = embed.clone()
    apart[7, 7] += 1
    for error in publish(ranks, parts(apart)):
        assert isinstance(error, IncompleteError)
        assert error.kind == "replicas-differ"
        assert "'embed'" in str(error)
    assert deltafmt.open(root).manifest(2).shards.writer.tolist() == [0], "the lowest rank stores it"
    assert deltafmt.open(root).verify().ok


def test_a_tie_that_one_rank_does_not_know_of_is_refused() -> None:
    embed = rand(40, 12, seed=1)
    for error in anchor(
        writers(memory_root(), 2), [{"embed": embed, "head": embed}, {"head": embed.clone()}]
    ):
        assert isinstance(error, SchemaError)
        assert "'head', ranks 0 and 1" in str(error)


def test_a_new_dtype_needs_an_anchor_of_all_ranks() -> None:
    root = memory_root()
    a, b = rand(40, 12, seed=1), rand(30, 12, seed=2)
    ranks = writers(root, 2)
    assert anchor(ranks, [{"a": a}, {"b": b}]) == [0, 0]
    before = len(list(deltafmt.open(root).history.store.list("schemas")))
    wider = [{"a": a}, {"b": b.float()}]
    for error in publish(ranks, wider):
        assert isinstance(error, SchemaError)
        assert (error.kind, "publish_anchor" in str(error)) == ("dtype-mismatch", True)
    assert len(list(deltafmt.open(root).history.store.list("schemas"))) == before
    assert anchor(ranks, wider) == [1, 1]
    wider[1]["b"][4] += 1
    assert publish(ranks, wider) == [2, 2]
    assert deltafmt.open(root).manifest(2).changed == 12
    assert_holds(root, 2, {"a": a, "b": wider[1]["b"]})


def rows(schema: Schema, rank: int) -> Layout:
    """Two ranks that hold the upper and the lower half of every tensor."""
    placements = []
    for spec in schema:
        half = spec.shape[0] // 2
        low, high = (0, half) if rank == 0 else (half, spec.shape[0])
        box = deltafmt.Box((low, 0), (high, spec.shape[1]))
        placements.append(Placement(spec.name, box, spec.name, 0, (spec.shape[1], 1)))
    return Layout(placements)


def halves(state: Tensors) -> list[Tensors]:
    return [
        {name: half.clone() for name, half in zip(state, split, strict=True)}
        for split in zip(*(t.chunk(2) for t in state.values()), strict=True)
    ]


def laid_out(root: str, state: Tensors, **options: Any) -> list[deltafmt.Writer]:
    schema = Schema.of(state)
    return writers(root, 2, schema=schema, layouts=[rows(schema, 0), rows(schema, 1)], options=options)


def test_a_job_goes_on_with_another_model_through_other_layouts() -> None:
    root = memory_root()
    first = {"a": rand(40, 12, seed=1), "b": rand(30, 12, seed=2), "gone": rand(8, 4, seed=3)}
    assert anchor(laid_out(root, first), halves(first)) == [0, 0]
    second = {"a": changed(first, 5)["a"], "b": rand(50, 12, seed=4), "new": rand(6, 4, seed=5)}
    ranks = laid_out(root, second, job="second")
    assert publish(ranks, halves(second)) == [1, 1]
    third = changed(second, 6)
    assert publish(ranks, halves(third)) == [2, 2]
    for version, state in enumerate((first, second, third)):
        assert_holds(root, version, state)
    assert deltafmt.open(root).verify().ok


def test_an_anchor_kept_elsewhere_through_layouts_and_with_anchors_behind() -> None:
    root = memory_root()
    state = {"a": rand(40, 12, seed=1), "b": rand(30, 12, seed=2)}
    ranks = laid_out(root, state, anchor_every=2)
    calls = [
        partial(w.publish_anchor, p, store_data=False, meta={"hint": "elsewhere"})
        for w, p in zip(ranks, halves(state), strict=True)
    ]
    assert together(calls) == [0, 0]
    lineage = deltafmt.open(root)
    assert len(lineage.manifest(0).shards) == 0
    assert lineage.info(0).ways == (None, None), "version 0 is one of those that get an anchor"
    for version in (1, 2):
        assert publish(ranks, halves(changed(state, version))) == [version] * 2
        assert_holds(root, version, changed(state, version))
    assert lineage.info(2).ways == (1, None)
    bare = memory_root()
    ranks = laid_out(bare, state)
    calls = [
        partial(w.publish_anchor, p, store_data=False) for w, p in zip(ranks, halves(state), strict=True)
    ]
    assert together(calls) == [0, 0]
    assert publish(ranks, halves(changed(state, 1))) == [1, 1]
    with pytest.raises(deltafmt.NotFoundError):
        deltafmt.open(bare).read(1)
    live = {name: tensor.clone() for name, tensor in state.items()}
    receiver = deltafmt.Receiver(bare, live)
    assert receiver.adopt(0) == 0
    assert receiver.advance() == 1
    assert torch.equal(live["b"], changed(state, 1)["b"])
