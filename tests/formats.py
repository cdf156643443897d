"""What tests of the format share: small valid records, and ways to spoil them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deltafmt.errors import DeltafmtError
from deltafmt.format.checksum import crc32c
from deltafmt.format.constants import (
    BLOCK,
    CODE,
    DENSE,
    GAP,
    LOW,
    MAGNITUDE,
    OBJECT_MAGIC,
    PLANE,
    RAW,
    SET,
    STEP,
)
from deltafmt.format.envelope import seal, unseal
from deltafmt.format.objects import digest_of_schema, digest_of_tiling
from deltafmt.format.records import (
    ChunkTable,
    ColumnTable,
    DigestTable,
    DomainTable,
    Manifest,
    ShardTable,
)
from deltafmt.geometry import Box
from deltafmt.schema import Schema, TensorSpec
from deltafmt.tiling import Tiling

SCHEMA = Schema(
    (
        TensorSpec("a", "bfloat16", (10, 20)),
        TensorSpec("b", "bfloat16", (300,)),
        TensorSpec("c", "float32", (5, 5)),
        TensorSpec("tied", "bfloat16", (300,), "b"),
        TensorSpec("none", "float32", (0, 3)),
    )
)
TILING = Tiling.of(
    [
        [(0, Box((0, 0), (10, 20))), (1, Box((0,), (100,)))],
        [(1, Box((100,), (300,)))],
        [(2, Box((0, 0), (5, 5)))],
    ],
    SCHEMA,
)
"""Domains of 300, 200 and 25 elements."""

_ROWS: list[tuple[tuple[int, ...], list[tuple[int, int]]]] = [
    # (domain, operation, order, width, shift, block, listed), then (column, raw bytes)
    ((0, SET, 1, 2, 2, 7, 9), [(GAP, 9), (LOW, 3), (BLOCK, 48), (PLANE, 9), (PLANE + 1, 9)]),
    ((0, STEP, 1, 2, 0, 6, 4), [(GAP, 5), (BLOCK, 96), (CODE, 1), (MAGNITUDE, 2)]),
    ((2, DENSE, 1, 4, 0, 0, 25), [(PLANE + j, 25) for j in range(4)]),
]


def delta(**changes: Any) -> Manifest:
    """A delta manifest with a set, a step and a dense chunk, all columns raw; its bytes exist nowhere."""
    chunks, columns, offset = [], [], 8
    for (domain, *coding), own in _ROWS:
        chunks.append((0, domain, *coding, offset, len(own)))
        columns += [(column, RAW, size, size, 7) for column, size in own]
        offset += sum(size for _, size in own)
    manifest = Manifest(
        lineage=b"l" * 16,
        version=5,
        base=4,
        base_digest=b"b" * 32,
        target_digest=None,
        schema=digest_of_schema(SCHEMA),
        tiling=digest_of_tiling(TILING, SCHEMA),
        attempt=b"a" * 16,
        writers=2,
        created=1_750_000_000_000,
        data=True,
        meta={"step": 10, "note": "x"},
        files={"config.json": (b"f" * 32, 17)},
        changed=38,
        listed=38,
        shards=ShardTable.of_rows([(1, offset + 500)]),
        chunks=ChunkTable.of_rows(chunks),
        columns=ColumnTable.of_rows(columns),
        domains=DomainTable.of_rows([(0, 1, 2, 3, 4, 1), (2, 5, 6, 0, 0, 0)]),
        tensors=DigestTable.of_rows([(k, 10 + k) for k in range(len(SCHEMA))]),
    )
    return replace(manifest, **changes)


def anchor(**changes: Any) -> Manifest:
    """An anchor manifest over the same tiling."""
    chunks, columns, offset = [], [], 8
    for domain, volume in enumerate(TILING.volume.tolist()):
        width = int(TILING.widths[domain])
        chunks.append((0, domain, DENSE, 1, width, 0, 0, volume, offset, width))
        columns += [(PLANE + j, RAW, volume, volume, 7) for j in range(width)]
        offset += volume * width
    fields: dict[str, Any] = {
        "base": None,
        "base_digest": None,
        "changed": None,
        "listed": int(TILING.volume.sum()),
        "shards": ShardTable.of_rows([(0, offset + 500)]),
        "chunks": ChunkTable.of_rows(chunks),
        "columns": ColumnTable.of_rows(columns),
        "domains": DomainTable.of_rows([(domain, 1, 2, 0, 0, 0) for domain in range(len(TILING))]),
    }
    return delta(**fields | changes)


def with_cells(manifest: Manifest, table: str, row: int, **cells: int) -> Manifest:
    """The manifest with some cells of one row of a table exchanged."""
    old = getattr(manifest, table)
    columns = {name: getattr(old, name).copy() for name in cells}
    for name, value in cells.items():
        columns[name][row] = value
    return replace(manifest, **{table: old.replaced(**columns)})


def same_record(found: Any, expected: Any) -> bool:
    """Whether two records or tables have equal fields."""
    return all(
        _equal(getattr(found, name), getattr(expected, name)) for name in expected.__dataclass_fields__
    )


def _equal(found: Any, expected: Any) -> bool:
    if hasattr(expected, "__dataclass_fields__"):
        return same_record(found, expected)
    if isinstance(expected, np.ndarray):
        return bool(found.dtype == expected.dtype and np.array_equal(found, expected))
    return bool(found == expected)


def edited(data: bytes, edit: Callable[[dict[str, Any]], object]) -> bytes:
    """An object with a changed body, sealed again."""
    body = unseal(data, kind=None, where="object")
    edit(body)
    return seal(body)


def enveloped(body: bytes, *, version: int = 1) -> bytes:
    """Any bytes in a right envelope."""
    head = version.to_bytes(4, "little") + len(body).to_bytes(8, "little")
    return OBJECT_MAGIC + head + crc32c(body, crc32c(head)).to_bytes(4, "little") + body


def kind_of(call: Callable[[], object]) -> str:
    """The reason code that a call is refused with."""
    with pytest.raises(DeltafmtError) as caught:
        call()
    return caught.value.kind
