"""A10: fused query, key and value rows on tensor-parallel receivers; also unequal parts and shared heads."""

from __future__ import annotations

import pytest
import torch

from deltafmt import Box, Layout, Placement, Receiver
from tests.reading import Course, Tensors, same


def fused_layout(rank: int, ranks: int, rows: dict[str, int], hidden: int) -> tuple[Layout, int]:
    """`[q_r | k_r | v_r]` row blocks of one rank, and how many rows that makes."""
    placements, at = [], 0
    for name, count in rows.items():
        part = count // ranks
        box = Box((part * rank, 0), (part * rank + part, hidden))
        placements.append(Placement(name, box, "qkv", at * hidden, (hidden, 1)))
        at += part
    return Layout(placements), at


def expected(tensors: Tensors, rank: int, ranks: int) -> Tensors:
    return {"qkv": torch.cat([tensor.chunk(ranks)[rank] for tensor in tensors.values()])}


@pytest.mark.parametrize("hinted", [False, True])
def test_changes_land_in_the_rows_of_the_right_rank(hinted: bool) -> None:
    rows = {"q": 8, "k": 4, "v": 4}
    layouts = [fused_layout(rank, 2, rows, 4)[0] for rank in range(2)]
    tensors = {name: torch.randn(count, 4).bfloat16() for name, count in rows.items()}
    course = Course(tensors, tile_for=layouts if hinted else ())
    course.anchor()
    live = [{"qkv": torch.zeros(8, 4, dtype=torch.bfloat16)} for _ in range(2)]
    receivers = [
        Receiver(course.root, mine, layout=layout) for mine, layout in zip(live, layouts, strict=True)
    ]
    for receiver in receivers:
        receiver.advance()
    before = [mine["qkv"].clone() for mine in live]
    tensors["q"][5, 2] = 1024
    tensors["k"][3, 0] = 2048
    tensors["v"][0, 3] = 4096
    course.publish()
    for receiver in receivers:
        receiver.advance()
    changed = [
        {tuple(index): float(mine["qkv"][tuple(index)]) for index in (mine["qkv"] != old).nonzero().tolist()}
        for mine, old in zip(live, before, strict=True)
    ]
    assert changed == [{(6, 3): 4096.0}, {(1, 2): 1024.0, (5, 0): 2048.0}]
    for rank, mine in enumerate(live):
        assert same(mine, expected(tensors, rank, 2))


def test_unequal_parts_and_heads_shared_by_ranks_follow_many_versions() -> None:
    heads, hidden, head = 8, 6, 4
    tensors = {
        "q": torch.randn(heads * head, hidden).bfloat16(),
        "k": torch.randn(2 * head, hidden).bfloat16(),
        "v": torch.randn(2 * head, hidden).bfloat16(),
    }
    course = Course(tensors)
    course.anchor()
    receivers, live = [], []
    for rank in range(4):
        q, kv = heads * head // 4, rank // 2 * head
        layout = Layout(
            [
                Placement("q", Box((q * rank, 0), (q * rank + q, hidden)), "qkv", 0, (hidden, 1)),
                Placement("k", Box((kv, 0), (kv + head, hidden)), "qkv", q * hidden, (hidden, 1)),
                Placement("v", Box((kv, 0), (kv + head, hidden)), "qkv", (q + head) * hidden, (hidden, 1)),
            ]
        )
        live.append({"qkv": torch.zeros(q + 2 * head, hidden, dtype=torch.bfloat16)})
        receivers.append(Receiver(course.root, live[-1], layout=layout))
    for seed in range(4):
        course.step(seed=seed, share=0.2)
        for rank, receiver in enumerate(receivers):
            receiver.advance()
            queries = tensors["q"].chunk(4)[rank]
            shared = [tensors[name].chunk(2)[rank // 2] for name in ("k", "v")]
            assert same(live[rank], {"qkv": torch.cat((queries, *shared))})
