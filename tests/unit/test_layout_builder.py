"""The usual layouts, checked by carrying numbered elements through them."""

from __future__ import annotations

import numpy as np
import pytest

from deltafmt.addresses import contiguous_strides
from deltafmt.errors import LayoutError
from deltafmt.geometry import Box
from deltafmt.layout import Layout, TargetInfo
from deltafmt.layout_builder import LayoutBuilder
from deltafmt.schema import Schema, TensorSpec


def numbered(schema: Schema) -> dict[str, np.ndarray]:
    """Every element of a schema with a number of its own."""
    result, first = {}, 1
    for spec in schema:
        result[spec.name] = np.arange(first, first + spec.volume).reshape(spec.shape)
        first += spec.volume
    return result


def filled(
    layout: Layout, contents: dict[str, np.ndarray], targets: dict[str, TargetInfo]
) -> dict[str, np.ndarray]:
    """Local arrays as the layout fills them; 0 where nothing is placed."""
    result = {}
    for name, info in targets.items():
        memory = np.zeros(info.span, np.int64)
        for p in layout.placements:
            if p.target == name:
                part = contents[p.source][p.source_box.slices()]
                for c in np.ndindex(*part.shape):
                    memory[p.offset + sum(x * s for x, s in zip(c, p.strides, strict=True))] = part[c]
        result[name] = np.lib.stride_tricks.as_strided(memory, info.shape, [8 * s for s in info.strides])
    return result


def schema_of(**shapes: tuple[int, ...]) -> Schema:
    return Schema(tuple(TensorSpec(name, "bfloat16", shape) for name, shape in shapes.items()))


def target(*shape: int) -> TargetInfo:
    return TargetInfo("bfloat16", shape, contiguous_strides(shape))


def test_column_and_row_parallel_and_transposed() -> None:
    schema = schema_of(up=(8, 6), down=(6, 8), head=(4, 6))
    x = numbered(schema)
    targets = {"up": target(4, 6), "down": target(6, 4), "head_t": target(6, 4)}
    layout = (
        LayoutBuilder(schema, targets, rank=1, world=2)
        .shard("up", "up", dim=0)
        .shard("down", "down", dim=1)
        .place("head", "head_t", dims=(1, 0))
        .build()
    )
    local = filled(layout, x, targets)
    assert (local["up"] == x["up"][4:]).all()
    assert (local["down"] == x["down"][:, 4:]).all()
    assert (local["head_t"] == x["head"].T).all()


def test_fused_gate_up_and_qkv() -> None:
    schema = schema_of(gate=(8, 3), up=(8, 3), q=(8, 4), k=(4, 4), v=(4, 4), qb=(8,), kb=(4,), vb=(4,))
    x = numbered(schema)
    targets = {"gate_up": target(8, 3), "qkv": target(8, 4), "qkv_bias": target(8)}
    for rank in (0, 1):
        layout = (
            LayoutBuilder(schema, targets, rank=rank, world=2)
            .fuse("gate_up", ["gate", "up"])
            .fuse_qkv("qkv", "q", "k", "v", head_dim=2)
            .fuse_qkv("qkv_bias", "qb", "kb", "vb", head_dim=2)
            .build()
        )
        local = filled(layout, x, targets)
        half = slice(4 * rank, 4 * rank + 4)
        quarter = slice(2 * rank, 2 * rank + 2)
        assert (local["gate_up"] == np.concatenate([x["gate"][half], x["up"][half]])).all()
        assert (local["qkv"] == np.concatenate([x["q"][half], x["k"][quarter], x["v"][quarter]])).all()
        assert (
            local["qkv_bias"] == np.concatenate([x["qb"][half], x["kb"][quarter], x["vb"][quarter]])
        ).all()


def test_key_value_heads_are_shared_by_neighbouring_ranks() -> None:
    schema = schema_of(q=(8, 5), k=(4, 5), v=(4, 5))
    x = numbered(schema)
    targets = {"qkv": target(6, 5)}
    for rank in range(4):
        layout = (
            LayoutBuilder(schema, targets, rank=rank, world=4)
            .fuse_qkv("qkv", "q", "k", "v", head_dim=2)
            .build()
        )
        head = slice(2 * (rank // 2), 2 * (rank // 2) + 2)
        expected = np.concatenate([x["q"][2 * rank : 2 * rank + 2], x["k"][head], x["v"][head]])
        assert (filled(layout, x, targets)["qkv"] == expected).all()


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("up_first", [False, True])
def test_experts_with_redundant_slots(stacked: bool, up_first: bool) -> None:
    experts, inner, hidden = 4, 4, 3
    if stacked:
        schema = schema_of(
            gate=(experts, inner, hidden), up=(experts, inner, hidden), down=(experts, hidden, inner)
        )
        gate, up, down = "gate", "up", "down"
        x = numbered(schema)
        parts = {kind: list(x[kind]) for kind in ("gate", "up", "down")}
    else:
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        schema = Schema(
            tuple(
                TensorSpec(f"{kind}.{e}", "bfloat16", shape)
                for e in range(experts)
                for kind, shape in shapes.items()
            )
        )
        gate, up, down = ([f"{kind}.{e}" for e in range(experts)] for kind in ("gate", "up", "down"))  # type: ignore[assignment]
        x = numbered(schema)
        parts = {kind: [x[f"{kind}.{e}"] for e in range(experts)] for kind in shapes}
    slots = [2, 3, 2]
    targets = {"w13": target(3, 4, 3), "w2": target(3, 3, 2)}
    layout = (
        LayoutBuilder(schema, targets, rank=1, world=2)
        .experts_w13("w13", gate, up, slots=slots, up_first=up_first)
        .experts_w2("w2", down, slots=slots)
        .build()
    )
    local = filled(layout, x, targets)
    for slot, e in enumerate(slots):
        halves = [parts["gate"][e][2:], parts["up"][e][2:]]
        assert (local["w13"][slot] == np.concatenate(halves[::-1] if up_first else halves)).all()
        assert (local["w2"][slot] == parts["down"][e][:, 2:]).all()


def test_padded_vocabulary_leaves_padding_alone() -> None:
    schema = schema_of(embed=(10, 3))
    x = numbered(schema)
    targets = {"embed": target(4, 3)}
    expected = np.zeros((4, 3), int)
    expected[:2] = x["embed"][8:]
    layout = LayoutBuilder(schema, targets, rank=2, world=3).vocabulary("embed", "embed").build()
    assert (filled(layout, x, targets)["embed"] == expected).all()
    assert layout.untouched == (("embed", Box((2, 0), (4, 3))),)
    empty = LayoutBuilder(schema, targets, rank=3, world=4).vocabulary("embed", "embed").build()
    assert empty.placements == ()


def test_the_rest_by_name_and_a_cast() -> None:
    schema = schema_of(a=(3,), b=(2, 2))
    targets = {"a": TargetInfo("float32", (3,), (1,)), "b": TargetInfo("bfloat16", (2, 2), (1, 2))}
    layout = LayoutBuilder(schema, targets).cast("a").by_name().build()
    assert [p.strides for p in layout.placements] == [(1,), (1, 2)]


@pytest.mark.parametrize(
    ("build", "kind"),
    [
        (lambda b: b.shard("w", "t", dim=0), "shape-mismatch"),
        (lambda b: b.place("w", "nothing"), "name-unknown"),
        (lambda b: b.place("nothing", "t"), "name-unknown"),
        (lambda b: b.place("w", "t", at=(1, 0)), "placement-outside"),
        (lambda b: b.place("w", "t", at=(-1, 0)), "placement-outside"),
        (lambda b: b.place("w", "t", box=Box((0,), (1,))), "shape-mismatch"),
        (lambda b: b.place("w", "t", dims=(0, 0)), "shape-mismatch"),
        (lambda b: b.experts_w2("four", ["w"], slots=[0]), "shape-mismatch"),
        (lambda b: b.experts_w2("t", ["w"], slots=[1]), "index-range"),
        (lambda b: b.build(), "target-unfilled"),
        (lambda b: b.place("w", "t").place("u", "t").build(), "placement-overlap"),
        (lambda b: b.place("w", "t").untouched("t", Box((0, 0), (1, 1))).build(), "placement-overlap"),
    ],
)
def test_what_does_not_fit_is_refused(build: object, kind: str) -> None:
    schema = schema_of(w=(3, 4), u=(3, 4))
    builder = LayoutBuilder(schema, {"t": target(3, 4), "four": target(1, 1, 1, 1)}, rank=0, world=2)
    builder.untouched("four")
    with pytest.raises(LayoutError) as caught:
        build(builder)  # type: ignore[operator]
    assert caught.value.kind == kind


def test_stacks_along_a_dimension_counted_from_the_end() -> None:
    schema = schema_of(a=(2, 3), b=(2, 5))
    x = numbered(schema)
    targets = {"t": target(4, 2, 8)}
    builder = LayoutBuilder(schema, targets).fuse("t", ["a", "b"], dim=-1, at=(1, 0, 0))
    for slot in (0, 2, 3):
        builder.untouched("t", Box((slot, 0, 0), (slot + 1, 2, 8)))
    local = filled(builder.build(), x, targets)["t"]
    assert (local[1] == np.concatenate([x["a"], x["b"]], axis=1)).all()
