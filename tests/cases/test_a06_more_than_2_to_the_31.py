"""A6: more than 2^31 elements: positions, flat indices and shard-local places stay exact, without big memory."""

from __future__ import annotations

import numpy as np
import pytest

from deltafmt.geometry import Box
from deltafmt.kernels.positions import block_starts, decode_positions, encode_positions
from deltafmt.layout import Layout, Placement, TargetInfo
from deltafmt.schema import Schema, TensorSpec
from deltafmt.segments import SegmentTable, make_segments
from deltafmt.tiling import Tiling, make_tiling

INDICES = [0, 2**31 - 1, 2**31, 2**31 + 7, 2**32, 2**32 + 15]


def domain_positions(schema: Schema, tiling: Tiling, flats: list[int]) -> dict[int, list[int]]:
    """Domain -> positions of elements of the schema's only tensor, given by flat index."""
    shape = schema.tensors[0].shape
    result: dict[int, list[int]] = {}
    for flat in flats:
        index = np.array(np.unravel_index(flat, shape), np.int64)
        row = int(np.flatnonzero(((tiling.box_start <= index) & (index < tiling.box_stop)).all(axis=1))[0])
        extents = tuple((tiling.box_stop - tiling.box_start)[row].tolist())
        inside = np.ravel_multi_index(tuple(index - tiling.box_start[row]), extents)
        domain = int(tiling.domains_of_boxes()[row])
        result.setdefault(domain, []).append(int(tiling.box_position[row]) + int(inside))
    return result


def places(table: SegmentTable, domain: int, position: int) -> list[tuple[str, int, int]]:
    """(target, local address, canonical flat index) of each place of one element."""
    found = []
    for box in range(int(table.domain_box[domain]), int(table.domain_box[domain + 1])):
        number = position - int(table.box_position[box])
        if not 0 <= number < table.box_volume[box]:
            continue
        for s in range(int(table.box_segment[box]), int(table.box_segment[box + 1])):
            c = np.array(np.unravel_index(number, table.dims[s]), np.int64)
            if ((table.low[s] <= c) & (c < table.high[s])).all():
                local = table.target_base[s] + ((c - table.low[s]) * table.target_stride[s]).sum()
                flat = table.source_base[s] + (c * table.source_stride[s]).sum()
                found.append((table.target_names[int(table.target[s])], int(local), int(flat)))
    return found


def through_codec(tiling: Tiling, domain: int, positions: list[int]) -> list[int]:
    """The positions after coding and decoding."""
    rows = slice(int(tiling.domain_box[domain]), int(tiling.domain_box[domain + 1]))
    starts = block_starts(tiling.box_position[rows], tiling.box_volume[rows], 16)
    coded = encode_positions(np.array(positions, np.uint32), starts, 0)
    back = decode_positions(
        coded.gap, coded.low, coded.entries, coded.elements,
        starts=starts, shift=0, listed=len(positions), where=domain,
    )  # fmt: skip
    return [int(position) for position in back]


@pytest.mark.parametrize("shape", [(2**32 + 16,), (2**16 + 2, 2**16)])
def test_every_index_comes_back(shape: tuple[int, ...]) -> None:
    schema = Schema((TensorSpec("w", "int8", shape),))
    tiling = make_tiling(schema)
    tiling.check(schema)
    strides = (1,) if len(shape) == 1 else (shape[1], 1)
    targets = {"w": TargetInfo("int8", shape, strides)}
    table = make_segments(schema, tiling, Layout.identity(schema), targets)
    found = [
        place
        for domain, positions in domain_positions(schema, tiling, INDICES).items()
        for position in through_codec(tiling, domain, positions)
        for place in places(table, domain, position)
    ]
    assert sorted(found) == [("w", flat, flat) for flat in INDICES]


def test_row_shards_of_two_ranks_get_exact_local_places() -> None:
    shape = (2**16 + 2, 2**16)
    schema = Schema((TensorSpec("w", "int8", shape),))
    half = shape[0] // 2
    layouts, targets = [], {"w": TargetInfo("int8", (half, shape[1]), (shape[1], 1))}
    for rank in range(2):
        layout = Layout(
            [Placement("w", Box((half * rank, 0), (half * rank + half, shape[1])), "w", 0, (shape[1], 1))]
        )
        layout.validate(schema, targets)
        layouts.append(layout)
    tiling = make_tiling(schema, layouts=layouts)
    tables = [make_segments(schema, tiling, layout, targets) for layout in layouts]
    assert int(sum(tiling.volume[table.touched].sum() for table in tables)) == shape[0] * shape[1]
    border = half * shape[1]
    found = set()
    for domain, positions in domain_positions(schema, tiling, INDICES).items():
        for position in through_codec(tiling, domain, positions):
            for rank, table in enumerate(tables):
                found |= {(rank, local, flat) for _, local, flat in places(table, domain, position)}
    assert found == {(flat // border, flat % border, flat) for flat in INDICES}
