"""The first elements that a chunk lists: where they stand in their tensors, and what becomes of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from deltafmt.addresses import contiguous_strides
from deltafmt.cli.dump_object import Source
from deltafmt.cli.output import table
from deltafmt.format.chunk import ChunkHead, ColumnHead
from deltafmt.format.constants import STEP
from deltafmt.format.keys import schema_key, tiling_key
from deltafmt.format.objects import parse_schema, parse_tiling
from deltafmt.format.records import Footer, Manifest
from deltafmt.read.decode import DomainShape, decode_chunk
from deltafmt.schema import Schema
from deltafmt.tiling import Tiling


def elements(
    source: Source,
    record: Manifest | Footer,
    head: ChunkHead,
    columns: tuple[ColumnHead, ...],
    data: bytes,
    most: int,
) -> list[dict[str, Any]]:
    """Position, tensor, index and step or new bits of the first `most` elements.

    Reads schema and tiling from the lineage that the object lies in, and raises what any reader would.
    """
    store = source.store
    schema_name, tiling_name = schema_key(record.schema), tiling_key(record.tiling)
    schema = parse_schema(store.read(schema_name), where=schema_name, digest=record.schema)
    tiling = parse_tiling(store.read(tiling_name), schema, where=tiling_name, digest=record.tiling)
    rows = tiling.box_rows(head.domain)
    boxes = slice(rows.start, rows.stop)
    shape = DomainShape(
        width=head.width, box_position=tiling.box_position[boxes], box_volume=tiling.box_volume[boxes]
    )
    where = f"{source.key}, domain {head.domain}"
    decoded = decode_chunk(head, columns, memoryview(data), shape, where=where)
    found = np.arange(head.listed) if decoded.positions is None else decoded.positions
    values = decoded.values[:most]
    if head.operation == STEP:
        values = values.view(values.dtype.str.replace("u", "i"))
    listed = zip(found[:most].tolist(), values.tolist(), strict=True)
    return [_element(schema, tiling, head, position, value) for position, value in listed]


def _element(schema: Schema, tiling: Tiling, head: ChunkHead, position: int, value: int) -> dict[str, Any]:
    rows = tiling.box_rows(head.domain)
    starts = tiling.box_position[rows.start : rows.stop]
    row = rows.start + int(np.searchsorted(starts, position, "right")) - 1
    tensor, box = tiling.box(row, schema)
    inside = np.unravel_index(position - int(tiling.box_position[row]), box.shape)
    index = [int(i) + start for i, start in zip(inside, box.start, strict=True)]
    spec = schema.tensors[tensor]
    flat = sum(i * s for i, s in zip(index, contiguous_strides(spec.shape), strict=True))
    what = {"step": value} if head.operation == STEP else {"bits": f"{value:0{2 * head.width}x}"}
    return {"position": position, "tensor": spec.name, "index": index, "flat": flat, **what}


def element_lines(rows: list[dict[str, Any]], listed: int) -> list[str]:
    """The elements as an aligned table, and how many more there are."""
    kind = "step" if "step" in rows[0] else "bits"
    cells = (
        (
            f"{row['position']:,}",
            row["tensor"],
            str(row["index"]),
            f"{row['flat']:,}",
            f"{row['step']:+d}" if kind == "step" else row["bits"],
        )
        for row in rows
    )
    lines = table(("position", "tensor", "index", "flat", kind), cells, left=["tensor", "index"])
    left = listed - len(rows)
    return [*lines, f"... {left:,} more elements (--all shows them)"] if left else lines
