"""The worked example of the spec, decoded by both readers; the library's writer gives the same bytes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafmt.format.checksum import crc32c
from deltafmt.format.chunk import ChunkHead, ColumnHead
from deltafmt.format.constants import BLOCK, CODE, GAP, MAGNITUDE, PLANE, SET, STEP
from deltafmt.format.objects import digest_of_schema, emit_lineage, emit_schema, parse_lineage, parse_schema
from deltafmt.format.records import LineageRecord
from deltafmt.kernels.digest import digest_run, zero
from deltafmt.kernels.steps import add_step
from deltafmt.read.decode import DomainShape, decode_chunk
from deltafmt.schema import Schema, TensorSpec
from deltafmt.segments import tensor_salt
from tests.conformance.reference import ROOT, load_refdump

refdump = load_refdump()
PAGE = (ROOT / "spec" / "13-example.md").read_text()
SCHEMA = Schema((TensorSpec("w", "bfloat16", (4, 25)),))
DOMAIN = {"width": 2, "boxes": [(0, [0, 0], [4, 25])], "volume": 100}


def example(name: str) -> bytes:
    """The bytes of a hex block of the page."""
    found = re.search(rf"```hex {name}\n(.*?)```", PAGE, re.DOTALL)
    assert found, name
    return bytes.fromhex(" ".join(line.split("|")[0] for line in found[1].splitlines()))


def row(name: str) -> tuple[int, int]:
    """Both lanes of a row of the table of section 13.3."""
    found = re.search(rf"\| {re.escape(name)}.* \| `(\w{{8,16}})` \| `(\w{{8,16}})` \|", PAGE)
    assert found, name
    return int(found[1], 16), int(found[2], 16)


def chunk(name: str) -> tuple[ChunkHead, list[ColumnHead], bytes]:
    operation, last = {
        "chunk-set": (SET, {PLANE: 2, PLANE + 1: 2}),
        "chunk-step": (STEP, {CODE: 1, MAGNITUDE: 1}),
    }[name]
    data, columns, at = example(name), [], 0
    for column, size in {GAP: 2, BLOCK: 32, **last}.items():
        columns.append(
            ColumnHead(column=column, codec=0, stored=size, raw=size, crc=crc32c(data[at : at + size]))
        )
        at += size
    assert at == len(data)
    head = ChunkHead(domain=0, operation=operation, order=1, width=2, shift=0, block=6, listed=2)
    return head, columns, data


def decoded_twice(name: str) -> tuple[list[int], Any]:
    """Positions and values of an example chunk, by refdump and the library, which must agree."""
    head, columns, data = chunk(name)
    rows = [
        {field: getattr(c, field) for field in ("column", "codec", "stored", "raw", "crc")} for c in columns
    ]
    fields = {field: getattr(head, field) for field in ChunkHead.__dataclass_fields__}
    positions, values = refdump.decode(fields, rows, data, DOMAIN, name)
    shape = DomainShape(width=2, box_position=np.array([0]), box_volume=np.array([100]))
    decoded = decode_chunk(head, tuple(columns), memoryview(data), shape, where=name)
    assert decoded.positions is not None
    assert decoded.positions.tolist() == positions.tolist()
    assert decoded.values.tolist() == values.tolist()
    return positions.tolist(), decoded.values


def test_schema() -> None:
    data = example("schema")
    assert emit_schema(SCHEMA) == data
    assert parse_schema(data, where="example") == SCHEMA
    (tensor,) = refdump.schema_of(data, "example", digest_of_schema(SCHEMA))
    assert (tensor["name"], tensor["dtype"], tensor["shape"]) == ("w", "bfloat16", [4, 25])
    assert digest_of_schema(SCHEMA).hex() in PAGE


def test_lineage() -> None:
    data = example("lineage")
    record = LineageRecord(
        lineage=bytes(range(16)), created=1_750_000_000_000, schema=digest_of_schema(SCHEMA)
    )
    assert emit_lineage(record) == data
    assert parse_lineage(data, where="example") == record
    found = refdump.parse(data, "lineage", "example")
    assert found == {"lineage": record.lineage, "created": record.created, "schema": record.schema}


def test_set_chunk() -> None:
    positions, bits = decoded_twice("chunk-set")
    assert positions == [3, 90]
    assert bits.tolist() == [0x3F80, 0xC000]


def test_step_chunk() -> None:
    positions, steps = decoded_twice("chunk-step")
    assert positions == [3, 90]
    assert steps.view(np.int16).tolist() == [1, -3]
    old = np.array([0x3F80, 0xC000], "<u2")
    assert add_step(old, steps, 1).tolist() == [0x3F81, 0xC003]
    assert refdump.add_steps(old, steps, 1, 2).tolist() == [0x3F81, 0xC003]


def test_digest() -> None:
    content = np.zeros(100, "<u2")
    content[[3, 90]] = 0x3F80, 0xC000
    reference = refdump.TensorDigest("w", 2)
    found = zero()
    digest_run(content, 0, tensor_salt("w"), found)
    assert row("D = ") == tuple(found.tolist()) == reference.of(np.arange(100), content)
    assert row("S ") == tuple(tensor_salt("w"))
    assert row("A[45]") == (refdump.A[0][45], refdump.A[1][45])
    assert row("A[1]") == (refdump.A[0][1], refdump.A[1][1])
    for lane in (0, 1):
        assert reference.multiplier(lane, 45) == refdump.A[lane][45] * row("M(0)")[lane]


@pytest.mark.parametrize("page", sorted((ROOT / "spec").rglob("*.md")), ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
