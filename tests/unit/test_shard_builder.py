from __future__ import annotations

import itertools

import pytest
import torch

import deltafmt
from deltafmt.errors import IncompleteError, LayoutError
from tests.ranks import Tensors, anchor, assert_holds, changed, memory_root, publish, writers

HIDDEN, HEAD, GROUPS, QUERIES, INNER, VOCABULARY = 8, 4, 2, 3, 6, 11
LAYERS, EXPERTS = 4, 4
RANKS = [*itertools.product(range(2), range(2), range(2))]
"""(pipeline stage, expert rank, tensor rank) of eight ranks."""


def policy() -> Tensors:
    random = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).bfloat16()

    state = {"embed": weight(VOCABULARY, HIDDEN), "norm": weight(HIDDEN)}
    for k in range(LAYERS):
        start = f"layers.{k}"
        state[f"{start}.q"] = weight(GROUPS * QUERIES * HEAD, HIDDEN)
        state[f"{start}.k"], state[f"{start}.v"] = (weight(GROUPS * HEAD, HIDDEN) for _ in range(2))
        state[f"{start}.q_bias"] = weight(GROUPS * QUERIES * HEAD)
        state[f"{start}.k_bias"], state[f"{start}.v_bias"] = (weight(GROUPS * HEAD) for _ in range(2))
        state[f"{start}.o"] = weight(HIDDEN, GROUPS * QUERIES * HEAD)
        state[f"{start}.gate"], state[f"{start}.up"] = weight(INNER, HIDDEN), weight(INNER, HIDDEN)
        state[f"{start}.norm"] = weight(HIDDEN)
        for e in range(EXPERTS):
            for name in ("gate", "up"):
                state[f"{start}.experts.{e}.{name}"] = weight(INNER, HIDDEN)
    return state


def local(state: Tensors, stage: int, expert: int, tensor: int) -> Tensors:
    """What a rank has, as Megatron would cut, fuse, pad and number it."""

    def half(name: str, dim: int = 0) -> torch.Tensor:
        return state[name].chunk(2, dim)[tensor]

    held = {"final": state["norm"].clone()} if stage else {}
    # The first stage embeds; the last one has a copy of that for its head.
    padded = torch.cat([state["embed"], torch.full((1, HIDDEN), 9.0).bfloat16()])
    held["head" if stage else "embed"] = padded.chunk(2)[tensor].clone()
    for k in range(2):
        start, mine = f"layers.{2 * stage + k}", f"layers.{k}"
        for bias in ("", "_bias"):
            # Two groups and two ranks: one group each.
            parts = [half(f"{start}.{name}{bias}") for name in "qkv"]
            held[f"{mine}.qkv{bias}"] = torch.cat(parts)
        held[f"{mine}.o"] = half(f"{start}.o", 1).clone()
        held[f"{mine}.gate_up"] = torch.cat([half(f"{start}.gate"), half(f"{start}.up")])
        held[f"{mine}.norm"] = state[f"{start}.norm"].clone()
        held[f"{mine}.experts"] = torch.stack(
            [
                torch.cat([state[f"{start}.experts.{2 * expert + e}.{name}"] for name in ("gate", "up")])
                for e in range(2)
            ]
        )
    return held


def shards(state: Tensors, stage: int, expert: int, tensor: int) -> deltafmt.Shards:
    builder = deltafmt.ShardBuilder(
        local(state, stage, expert, tensor), rank=tensor, world=2, first={"layers": 2 * stage}
    )
    builder.vocabulary("head" if stage else "embed", "embed", size=VOCABULARY)
    if stage:
        builder.tie("lm_head", "embed").whole("final", "norm")
    for k in range(2):
        start = f"layers.{k}"
        for bias in ("", "_bias"):
            names = [f"{start}.{name}{bias}" for name in "qkv"]
            builder.qkv_groups(f"{start}.qkv{bias}", *names, head_dim=HEAD, queries_per_group=QUERIES)
        builder.row(f"{start}.o").stack(f"{start}.gate_up", [f"{start}.gate", f"{start}.up"])
        patterns = [f"{start}.experts.{{}}.{name}" for name in ("gate", "up")]
        builder.experts(f"{start}.experts", *patterns, numbers=[2 * expert, 2 * expert + 1])
    return builder.whole().build()


def test_eight_ranks_of_a_trainer_with_all_kinds_of_parallelism() -> None:
    root = memory_root()
    ranks = writers(root, 8)
    states = [policy()]
    states += [changed(states[0], seed) for seed in (1, 2)]
    assert anchor(ranks, [shards(states[0], *rank) for rank in RANKS]) == [0] * 8
    for version in (1, 2):
        given = [shards(states[version], *rank) for rank in RANKS]
        assert publish(ranks, given) == [version] * 8
    for version, state in enumerate(states):
        assert_holds(root, version, {**state, "lm_head": state["embed"]})
    # The copy of the embedding on the last stage must be the same one.
    torn = [shards(states[2], *rank) for rank in RANKS]
    torn[-1].tensors["head"].view(torch.int16)[0, 0] ^= 1
    for error in publish(ranks, torn):
        assert isinstance(error, IncompleteError)
        assert "'embed'" in str(error)
    assert deltafmt.open(root).latest() == 2


def test_several_groups_are_interleaved() -> None:
    q, k, v = torch.arange(24.0), 100 + torch.arange(8.0), 200 + torch.arange(8.0)
    fused = torch.cat([part for g in range(2) for part in (q[12 * g :][:12], k[4 * g :][:4], v[4 * g :][:4])])
    root = memory_root()
    builder = deltafmt.ShardBuilder({"qkv": fused})
    held = builder.qkv_groups("qkv", "q", "k", "v", head_dim=4, queries_per_group=3).build()
    deltafmt.Writer(root).publish_anchor(held)
    assert_holds(root, 0, {"q": q, "k": k, "v": v})


def test_what_does_not_fit_is_refused() -> None:
    builder = deltafmt.ShardBuilder({"w": torch.zeros(6, 4), "v": torch.zeros(6, 4)}, world=2)
    with pytest.raises(LayoutError) as refused:
        builder.stack("w", ["a", "b"], rows=[4, 4])
    assert (refused.value.kind, refused.value.where) == ("shape-mismatch", "'w'")
    with pytest.raises(LayoutError):
        builder.vocabulary("w", size=13)
    with pytest.raises(LayoutError):
        builder.qkv_groups("w", "q", "k", "v", head_dim=4, queries_per_group=1)
    with pytest.raises(LayoutError):
        builder.column("x")
    with pytest.raises(LayoutError):
        builder.tie("head", "embed")
    builder.column("w", "same")
    with pytest.raises(LayoutError):
        builder.row("v", "same")
    with pytest.raises(LayoutError) as refused:
        builder.build()
    assert refused.value.kind == "target-unfilled"
    assert builder.whole("v").build().schema.names == ("same", "v")


def test_names_get_global_numbers() -> None:
    builder = deltafmt.ShardBuilder({}, first={"layers": 8, "experts": 4})
    assert builder.global_name("model.layers.1.mlp.experts.3.w") == "model.layers.9.mlp.experts.7.w"
    assert builder.global_name("my_layers.1") == "my_layers.1"
    assert builder.global_name("layers.10") == "layers.18"
