"""Segments say of every element where it stands, as brute force does."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deltafmt.addresses import contiguous_strides
from deltafmt.geometry import Box
from deltafmt.layout import Layout, Placement, TargetInfo
from deltafmt.schema import Schema, TensorSpec
from deltafmt.segments import SegmentTable, make_segments
from deltafmt.tiling import Tiling, make_tiling

Key = tuple[int, int]


def random_case(seed: int) -> tuple[Schema, Layout, dict[str, TargetInfo], Tiling]:
    rng = random.Random(seed)
    shapes = [tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 3))) for _ in range(3)]
    schema = Schema(tuple(TensorSpec(f"t{i}", "bfloat16", shape) for i, shape in enumerate(shapes)))
    placements = []
    for i, shape in enumerate(shapes):
        for _ in range(rng.randint(0, 3)):
            start = tuple(rng.randint(0, n - 1) for n in shape)
            stop = tuple(rng.randint(a + 1, n) for a, n in zip(start, shape, strict=True))
            extent = tuple(b - a for a, b in zip(start, stop, strict=True))
            strides = contiguous_strides(extent)
            if rng.random() < 0.3:
                strides = contiguous_strides(extent[::-1])[::-1]
            placements.append(
                Placement(f"t{i}", Box(start, stop), f"x{rng.randint(0, 1)}", rng.randint(0, 3), strides)
            )
    layout = Layout(placements)
    targets = {f"x{k}": TargetInfo("bfloat16", (1000,), (1,)) for k in range(2)}
    hints = [layout] if rng.random() < 0.5 else []
    return schema, layout, targets, make_tiling(schema, domain_elements=rng.choice([3, 8, 64]), layouts=hints)


def by_hand(schema: Schema, layout: Layout, tiling: Tiling) -> dict[Key, tuple[list[tuple[str, int]], int]]:
    result = {}
    for domain in range(len(tiling)):
        for row in tiling.box_rows(domain):
            tensor, box = tiling.box(row, schema)
            spec = schema.tensors[tensor]
            for number, c in enumerate(np.ndindex(*box.shape)):
                index = tuple(a + b for a, b in zip(c, box.start, strict=True))
                places = {
                    (p.target, p.offset + sum((x - a) * s for x, a, s in zip(index, p.source_box.start, p.strides, strict=True)))
                    for p in layout.placements
                    if p.source == spec.name and p.source_box.contains(Box(index, tuple(x + 1 for x in index)))
                }  # fmt: skip
                flat = sum(x * s for x, s in zip(index, contiguous_strides(spec.shape), strict=True))
                key = (domain, int(tiling.box_position[row]) + number)
                result[key] = (sorted((target, address) for target, address in places), flat)
    return result


def from_table(
    table: SegmentTable, tiling: Tiling
) -> tuple[dict[Key, tuple[list[tuple[str, int]], int | None]], dict[Key, int]]:
    result: dict[Key, tuple[list[tuple[str, int]], int | None]] = {}
    counted: dict[Key, int] = {}
    for domain in range(len(tiling)):
        for box in tiling.box_rows(domain):
            for number in range(table.box_volume[box]):
                key = (domain, int(table.box_position[box]) + number)
                places, flat = [], None
                for s in range(table.box_segment[box], table.box_segment[box + 1]):
                    c = np.array(np.unravel_index(number, table.dims[s]))
                    if ((table.low[s] <= c) & (c < table.high[s])).all():
                        address = int(
                            table.target_base[s] + ((c - table.low[s]) * table.target_stride[s]).sum()
                        )
                        places.append((table.target_names[table.target[s]], address))
                        flat = int(table.source_base[s] + (c * table.source_stride[s]).sum())
                        counted[key] = counted.get(key, 0) + int(table.counted[s])
                result[key] = (sorted(places), flat)
    return result, counted


def agree_in_part(p: Placement, q: Placement) -> bool:
    """Whether two placements of one tensor into one target put some common elements, not all, alike."""
    common = p.source_box.intersect(q.source_box)
    if (p.source, p.target) != (q.source, q.target) or common is None:
        return False
    places = [
        [
            r.offset + sum((x + a - b) * s for x, a, b, s in zip(c, common.start, r.source_box.start, r.strides, strict=True))
            for c in np.ndindex(*common.shape)
        ]
        for r in (p, q)
    ]  # fmt: skip
    alike = [a == b for a, b in zip(*places, strict=True)]
    return any(alike) and not all(alike)


@given(st.integers(0, 2**32))
def test_every_element_stands_where_brute_force_says(seed: int) -> None:
    schema, layout, targets, tiling = random_case(seed)
    tiling.check(schema)
    table = make_segments(schema, tiling, layout, targets)
    expected = by_hand(schema, layout, tiling)
    found, counted = from_table(table, tiling)
    plain = not any(agree_in_part(p, q) for p in layout.placements for q in layout.placements)
    for key, (places, flat) in expected.items():
        # Two maps that agree in some elements only are refused by `validate`; here they may write twice.
        assert (found[key][0] if plain else sorted(set(found[key][0]))) == places
        if places:
            assert found[key][1] == flat
            assert counted[key] == 1
    held = {
        domain: [bool(expected[key][0]) for key in expected if key[0] == domain]
        for domain in range(len(tiling))
    }
    assert table.full.tolist() == [all(held[domain]) for domain in range(len(tiling))]
    assert table.touched.tolist() == [any(held[domain]) for domain in range(len(tiling))]


def test_row_cuts_of_contiguous_tensors_are_single_runs() -> None:
    schema = Schema((TensorSpec("w", "bfloat16", (64, 4, 16)), TensorSpec("b", "bfloat16", (7,))))
    targets = {s.name: TargetInfo(s.dtype, s.shape, contiguous_strides(s.shape)) for s in schema}
    tiling = make_tiling(schema, domain_elements=512)
    table = make_segments(schema, tiling, Layout.identity(schema), targets)
    assert table.dims.shape[1] == 1
    assert table.full.all()


def test_index_arithmetic_is_exact_beyond_32_bits() -> None:
    shape = (2**16 + 2, 2**16)
    schema = Schema((TensorSpec("w", "int8", shape),))
    half = shape[0] // 2
    layout = Layout([Placement("w", Box((half, 0), shape), "rank1", 0, (shape[1], 1))])
    targets = {"rank1": TargetInfo("int8", (half, shape[1]), (shape[1], 1))}
    layout.validate(schema, targets)
    tiling = make_tiling(schema)
    tiling.check(schema)
    table = make_segments(schema, tiling, layout, targets)
    last = int(np.flatnonzero(table.touched)[-1])
    row = table.segment_rows(last)[-1]
    end = (
        table.target_base[row] + (table.high[row, -1] - 1 - table.low[row, -1]) * table.target_stride[row, -1]
    )
    assert end == half * shape[1] - 1
    assert table.source_base[row] + table.high[row, -1] - 1 == shape[0] * shape[1] - 1
