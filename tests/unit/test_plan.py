from __future__ import annotations

import numpy as np
import pytest
import torch

from deltafmt import Box, Layout, Placement, Schema
from deltafmt.read.history import History
from deltafmt.read.options import ReadOptions
from deltafmt.read.replica import Link, Replica
from deltafmt.read.targets import Targets
from deltafmt.store import Range, open_store
from deltafmt.store.base import coalesce
from tests.reading import Course, Tensors, blank, wrapped

HEADS, KV_HEADS, HEAD, HIDDEN, VOCABULARY = 8, 2, 64, 128, 520


def model() -> Tensors:
    torch.manual_seed(0)
    return {
        "embed": torch.randn(VOCABULARY, HIDDEN).bfloat16(),
        "q": torch.randn(HEADS * HEAD, HIDDEN).bfloat16(),
        "k": torch.randn(KV_HEADS * HEAD, HIDDEN).bfloat16(),
        "v": torch.randn(KV_HEADS * HEAD, HIDDEN).bfloat16(),
        "o": torch.randn(HIDDEN, HEADS * HEAD).bfloat16(),
        "norm": torch.randn(HIDDEN),
    }


def rank_of_four(rank: int) -> tuple[Layout, Tensors]:
    """Grouped-query attention on four ranks: key and value heads are shared by two, the vocabulary is padded."""
    rows, kv = HEADS * HEAD // 4, HEAD
    fused = torch.zeros(rows + 2 * kv, HIDDEN, dtype=torch.bfloat16)
    padded = -(-VOCABULARY // 64) * 64
    part = padded // 4
    stop = min(VOCABULARY, part * (rank + 1))
    used = stop - part * rank
    kv_box = Box((rank // 2 * kv, 0), (rank // 2 * kv + kv, HIDDEN))
    targets = {
        "qkv": fused,
        "o": torch.zeros(HIDDEN, rows, dtype=torch.bfloat16),
        "embed": torch.zeros(part, HIDDEN, dtype=torch.bfloat16),
        "norm": torch.zeros(HIDDEN),
    }
    line = (HIDDEN, 1)
    placements = [
        Placement("q", Box((rows * rank, 0), (rows * rank + rows, HIDDEN)), "qkv", 0, line),
        Placement("k", kv_box, "qkv", rows * HIDDEN, line),
        Placement("v", kv_box, "qkv", (rows + kv) * HIDDEN, line),
        Placement("o", Box((0, rows * rank), (HIDDEN, rows * rank + rows)), "o", 0, (rows, 1)),
        Placement("embed", Box((part * rank, 0), (stop, HIDDEN)), "embed", 0, line),
        Placement("norm", Box((0,), (HIDDEN,)), "norm", 0, (1,)),
    ]
    untouched = [("embed", Box((used, 0), (part, HIDDEN)))] if used < part else []
    return Layout(placements, untouched=untouched), targets


def links(root: str, layout: Layout | None, targets: Tensors) -> list[Link]:
    history = History(open_store(root))
    replica = Replica(history, Targets(targets), layout, options=ReadOptions(threads=1))
    return replica.links([history.first_way(version) for version in history.versions()])


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_reads_its_share_where_the_writer_knew_its_layout(rank: int) -> None:
    layouts = [rank_of_four(r)[0] for r in range(4)]
    course = Course(model(), tile_for=layouts, domain_elements=4 << 20)
    course.anchor()
    layout, targets = rank_of_four(rank)
    anchor = links(course.root, layout, targets)[0]
    stored = anchor.stored.manifest.chunks.listed[anchor.plan.rows]
    held = sum(p.source_box.volume for p in layout.placements)
    assert held <= int(stored.sum()) <= 1.1 * held
    assert anchor.view.table.full[anchor.view.table.touched].all(), "so that each rank can prove its own"


def test_a_plan_names_exactly_the_chunks_of_touched_domains() -> None:
    course = Course(model(), domain_elements=1024)
    course.anchor()
    course.step(seed=1)
    layout = Layout([Placement("q", Box((0, 0), (32, HIDDEN)), "q", 0, (HIDDEN, 1))])
    for link in links(course.root, layout, {"q": torch.zeros(32, HIDDEN, dtype=torch.bfloat16)}):
        chunks = link.stored.manifest.chunks
        domains = {d for d in range(len(link.view.tiling)) if link.view.table.touched[d]}
        assert set(chunks.domain[link.plan.rows].tolist()) == domains
        assert link.plan.nbytes == sum(r.nbytes for r in link.plan.ranges)
        assert len(list(link.plan.heads())) == len(link.plan.rows)
        for (head, columns), row in zip(link.plan.heads(), link.plan.rows.tolist(), strict=True):
            assert head.domain == chunks.domain[row]
            assert len(columns) == chunks.columns[row]
            assert [column.column for column in columns] == sorted(column.column for column in columns)


def test_an_undo_log_is_bounded_before_anything_is_read() -> None:
    course = Course({"a": torch.zeros(10_000, dtype=torch.bfloat16)}, domain_elements=1 << 14)
    course.anchor()
    course.tensors["a"][::1500] = 1
    course.publish()
    anchor, delta = links(course.root, None, course.tensors)
    assert anchor.plan.undo_bytes == 10_000 * 2
    assert delta.plan.undo_bytes == 7 * (2 + 4)


def test_neighbours_are_read_together_and_little_else() -> None:
    near = [Range("s", 0, 1000), Range("s", 1000, 2000), Range("s", 2050, 3000), Range("t", 3000, 3100)]
    assert [f.range for f in coalesce(near)] == [Range("s", 0, 3000), Range("t", 3000, 3100)]
    sparse = [Range("s", start, start + 10) for start in range(0, 1000, 100)]
    assert [f.range for f in coalesce(sparse)] == sparse


def test_the_bytes_read_are_those_planned() -> None:
    from deltafmt import Receiver

    course = Course(model(), domain_elements=512)
    course.anchor()
    live = blank({"o": course.tensors["o"]})
    with Receiver(course.root, live) as receiver:
        store = wrapped(receiver)
        planned = receiver.prepare().nbytes
        receiver.advance()
    assert planned <= store.bytes_read <= 1.07 * planned
    assert np.array_equal(live["o"].view(torch.int16), course.tensors["o"].view(torch.int16))
    assert len(Schema.of(live)) == 1
