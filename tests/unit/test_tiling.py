from __future__ import annotations

import numpy as np
import pytest

from deltafmt.addresses import contiguous_strides
from deltafmt.errors import FormatError
from deltafmt.geometry import Box
from deltafmt.layout import Layout, Placement, TargetInfo
from deltafmt.layout_builder import LayoutBuilder
from deltafmt.schema import Schema, TensorSpec
from deltafmt.segments import make_segments
from deltafmt.tiling import Tiling, make_tiling


def small_model(
    *, layers: int, hidden: int, heads: int, kv_heads: int, vocabulary: int, experts: int = 0
) -> Schema:
    head = hidden // heads
    inner = 2 * hidden
    specs = [TensorSpec("embed", "bfloat16", (vocabulary, hidden))]
    for n in range(layers):
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            specs.append(TensorSpec(f"{n}.{name}", "bfloat16", (rows * head, hidden)))
            specs.append(TensorSpec(f"{n}.{name}.bias", "bfloat16", (rows * head,)))
        specs.append(TensorSpec(f"{n}.o", "bfloat16", (hidden, heads * head)))
        specs.append(TensorSpec(f"{n}.norm", "bfloat16", (hidden,)))
        for e in range(experts or 1):
            specs.append(TensorSpec(f"{n}.gate.{e}", "bfloat16", (inner, hidden)))
            specs.append(TensorSpec(f"{n}.up.{e}", "bfloat16", (inner, hidden)))
            specs.append(TensorSpec(f"{n}.down.{e}", "bfloat16", (hidden, inner)))
    return Schema(tuple(specs))


def rank_layout(
    schema: Schema, rank: int, world: int, *, layers: int, head: int, experts: int
) -> tuple[Layout, dict[str, TargetInfo]]:
    """One rank: fused and sharded attention, experts by expert parallelism if there are any."""

    def bf16(*shape: int) -> TargetInfo:
        return TargetInfo("bfloat16", shape, contiguous_strides(shape))

    vocabulary, hidden = schema["embed"].shape
    targets = {"embed": bf16(-(-vocabulary // world), hidden)}
    local = range(rank * experts // world, (rank + 1) * experts // world)
    for n in range(layers):
        q, kv = schema[f"{n}.q"].shape[0] // world, max(head, schema[f"{n}.k"].shape[0] // world)
        inner = schema[f"{n}.gate.0"].shape[0]
        targets[f"{n}.qkv"] = bf16(q + 2 * kv, hidden)
        targets[f"{n}.qkv.bias"] = bf16(q + 2 * kv)
        targets[f"{n}.o"] = bf16(hidden, q)
        targets[f"{n}.norm"] = bf16(hidden)
        if experts:
            targets[f"{n}.w13"] = bf16(len(local), 2 * inner, hidden)
            targets[f"{n}.w2"] = bf16(len(local), hidden, inner)
        else:
            targets[f"{n}.gate_up"] = bf16(2 * inner // world, hidden)
            targets[f"{n}.down"] = bf16(hidden, inner // world)
    builder = LayoutBuilder(schema, targets, rank=rank, world=world).vocabulary("embed", "embed")
    whole = LayoutBuilder(schema, targets)
    for n in range(layers):
        builder.fuse_qkv(f"{n}.qkv", f"{n}.q", f"{n}.k", f"{n}.v", head_dim=head)
        builder.fuse_qkv(f"{n}.qkv.bias", f"{n}.q.bias", f"{n}.k.bias", f"{n}.v.bias", head_dim=head)
        builder.shard(f"{n}.o", f"{n}.o", dim=1).place(f"{n}.norm", f"{n}.norm")
        if experts:
            names = {kind: [f"{n}.{kind}.{e}" for e in range(experts)] for kind in ("gate", "up", "down")}
            whole.experts_w13(f"{n}.w13", names["gate"], names["up"], slots=list(local))
            whole.experts_w2(f"{n}.w2", names["down"], slots=list(local))
        else:
            builder.fuse(f"{n}.gate_up", [f"{n}.gate.0", f"{n}.up.0"]).shard(
                f"{n}.down.0", f"{n}.down", dim=1
            )
    builder._placements += whole._placements
    return builder.build(), targets


@pytest.mark.parametrize(
    ("world", "kv_heads", "vocabulary", "experts"),
    [(2, 2, 1001, 0), (4, 2, 1001, 0), (4, 4, 5000, 8), (8, 1, 777, 8)],
)
def test_a_rank_reads_little_but_its_own_share(
    world: int, kv_heads: int, vocabulary: int, experts: int
) -> None:
    layers, hidden, heads = 2, 128, 8
    schema = small_model(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, vocabulary=vocabulary, experts=experts
    )
    ranks = [
        rank_layout(schema, rank, world, layers=layers, head=hidden // heads, experts=experts)
        for rank in range(world)
    ]
    tiling = make_tiling(schema, layouts=[layout for layout, _ in ranks])
    tiling.check(schema)
    for layout, targets in ranks:
        table = make_segments(schema, tiling, layout, targets)
        read = int(tiling.volume[table.touched].sum())
        own = sum(p.source_box.volume for p in layout.placements)
        assert read <= 1.1 * own


def test_domains_aim_at_their_size() -> None:
    schema = Schema(
        (
            *(TensorSpec(f"n{k}", "bfloat16", (100,)) for k in range(50)),
            TensorSpec("w", "bfloat16", (1000, 100)),
        )
    )
    tiling = make_tiling(schema, domain_elements=10_000)
    tiling.check(schema)
    assert tiling.volume.max() <= 12_500
    assert (tiling.volume >= 2_500).sum() >= len(tiling) - 1


def test_widths_and_orders_have_domains_of_their_own() -> None:
    dtypes = ["bfloat16", "int16", "float32", "int8", "float8_e5m2", "int64"]
    schema = Schema(tuple(TensorSpec(name, name, (10,)) for name in dtypes))
    tiling = make_tiling(schema)
    tiling.check(schema)
    assert len(tiling) == len(dtypes)
    assert sorted(tiling.widths.tolist()) == [1, 1, 2, 2, 4, 8]


def test_a_row_longer_than_a_domain_is_cut() -> None:
    schema = Schema((TensorSpec("w", "int8", (3, 1000)),))
    tiling = make_tiling(schema, domain_elements=64)
    tiling.check(schema)
    assert tiling.volume.max() <= 80


def halves(name: str, shape: tuple[int, ...]) -> list[Placement]:
    """The placements of two ranks that hold half the rows each."""
    half = shape[0] // 2
    tail = shape[1:]
    return [
        Placement(
            name,
            Box((half * r, *(0,) * len(tail)), (half * r + half, *tail)),
            name,
            0,
            contiguous_strides(shape),
        )
        for r in (0, 1)
    ]


def test_small_groups_of_readers_join_one_that_their_readers_read_anyway() -> None:
    schema = Schema((TensorSpec("w", "bfloat16", (100, 100)), TensorSpec("b", "bfloat16", (200,))))
    both = Placement("w", Box((0, 0), (100, 100)), "w", 0, (100, 1))
    tiling = make_tiling(schema, layouts=[Layout([both, half]) for half in halves("b", (200,))])
    tiling.check(schema)
    assert tiling.volume.tolist() == [10_200]


def test_small_groups_of_other_readers_stand_alone() -> None:
    schema = Schema((TensorSpec("w", "bfloat16", (200, 100)), TensorSpec("norm", "bfloat16", (50,))))
    norm = Placement("norm", Box((0,), (50,)), "norm", 0, (1,))
    tiling = make_tiling(schema, layouts=[Layout([half, norm]) for half in halves("w", (200, 100))])
    tiling.check(schema)
    assert tiling.volume.tolist() == [10_000, 10_000, 50]


def test_a_small_group_does_not_cost_other_readers_much() -> None:
    # Each rank's part is below the smallest group, and all ranks together read far less than it.
    schema = Schema((TensorSpec("w", "bfloat16", (8, 400)), TensorSpec("norm", "bfloat16", (10,))))
    norm = Placement("norm", Box((0,), (10,)), "norm", 0, (1,))
    rows = [Placement("w", Box((r, 0), (r + 1, 400)), "w", 0, (400, 1)) for r in range(8)]
    tiling = make_tiling(schema, layouts=[Layout([row, norm]) for row in rows])
    tiling.check(schema)
    assert sorted(tiling.volume.tolist()) == [10, *[400] * 8]


def test_the_end_of_a_group_joins_its_last_domain() -> None:
    schema = Schema(tuple(TensorSpec(f"w{k}", "int8", (100,)) for k in range(41)))
    tiling = make_tiling(schema, domain_elements=1000)
    tiling.check(schema)
    assert tiling.volume.tolist() == [1000, 1000, 1000, 1100]


def test_a_reader_of_a_second_name_cuts_the_owner() -> None:
    schema = Schema(
        (TensorSpec("embed", "bfloat16", (200, 50)), TensorSpec("head", "bfloat16", (200, 50), "embed"))
    )
    tiling = make_tiling(schema, layouts=[Layout([half]) for half in halves("head", (200, 50))])
    tiling.check(schema)
    assert tiling.volume.tolist() == [5000, 5000]


def test_hints_that_do_not_fit_are_passed_over() -> None:
    schema = Schema((TensorSpec("w", "int8", (6, 6)),))
    elsewhere = Placement("x", Box((0,), (9,)), "x", 0, (1,))
    outside = Placement("w", Box((0, 0), (9, 6)), "w", 0, (6, 1))
    tiling = make_tiling(schema, layouts=[Layout([elsewhere, outside])])
    tiling.check(schema)
    assert tiling.volume.tolist() == [36]


def test_stacked_experts_cut_for_many_ranks_are_checked_pair_by_pair() -> None:
    schema = Schema((TensorSpec("down", "bfloat16", (32, 8, 16)),))
    ranks = [
        Layout([Placement("down", Box((e, 0, 4 * r), (e + 1, 8, 4 * r + 4)), "down", 0, (32, 4, 1))])
        for e in range(32)
        for r in range(4)
    ]
    tiling = make_tiling(schema, layouts=ranks)
    tiling.check(schema)
    assert len(tiling.box_tensor) == 128
    boxes = [tiling.boxes(d, schema) for d in range(len(tiling))]
    boxes[1][0] = boxes[0][0]
    with pytest.raises(FormatError) as caught:
        Tiling.of(boxes, schema).check(schema)
    assert caught.value.kind == "tiling-overlap"


def test_more_than_2_to_the_32_elements() -> None:
    schema = Schema((TensorSpec("w", "int8", (2**16 + 2, 2**16)), TensorSpec("row", "int8", (2**32 + 16,))))
    tiling = make_tiling(schema)
    tiling.check(schema)
    assert int(tiling.volume.sum()) == sum(spec.volume for spec in schema)
    assert tiling.volume.max() < 2**31


def test_checks_of_boxes_that_no_run_describes() -> None:
    schema = Schema((TensorSpec("w", "int8", (6, 6)),))
    grid = [[(0, Box((r, q), (r + 2, q + 3)))] for r in (0, 2, 4) for q in (0, 3)]
    Tiling.of(grid, schema).check(schema)
    moved = [*grid[:-1], [(0, Box((3, 3), (5, 6)))]]
    with pytest.raises(FormatError) as caught:
        Tiling.of(moved, schema).check(schema)
    assert caught.value.kind == "tiling-overlap"


def test_positions_and_volumes_follow_from_boxes() -> None:
    schema = Schema((TensorSpec("w", "int8", (6, 6)), TensorSpec("s", "int8", ())))
    tiling = Tiling.of([[(0, Box((0, 0), (6, 2))), (1, Box((), ()))], [(0, Box((0, 2), (6, 6)))]], schema)
    tiling.check(schema)
    assert tiling.box_position.tolist() == [0, 12, 0]
    assert tiling.volume.tolist() == [13, 24]
    assert tiling.boxes(0, schema) == [(0, Box((0, 0), (6, 2))), (1, Box((), ()))]
    assert np.array_equal(tiling.domains_of_boxes(), [0, 0, 1])
