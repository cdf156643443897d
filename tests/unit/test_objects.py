from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deltafmt.dtypes import DTYPES
from deltafmt.errors import FormatError
from deltafmt.format.body import content_digest, emit
from deltafmt.format.codec import compress
from deltafmt.format.constants import MAX_LEASE_SECONDS, MAX_TENSORS, MAX_VERSION, SHARD_END
from deltafmt.format.objects import (
    digest_of_schema,
    digest_of_tiling,
    emit_floor,
    emit_footer,
    emit_lease,
    emit_lineage,
    emit_manifest,
    emit_schema,
    emit_tiling,
    parse_floor,
    parse_footer,
    parse_lease,
    parse_lineage,
    parse_manifest,
    parse_schema,
    parse_tiling,
)
from deltafmt.format.records import (
    BoxTable,
    DomainShapeTable,
    FloorRecord,
    Footer,
    LeaseRecord,
    LineageRecord,
    SchemaRecord,
    TensorTable,
    TilingRecord,
)
from deltafmt.format.shard import footer_offset, read_footer, shard_tail
from deltafmt.schema import Schema, TensorSpec
from deltafmt.tiling import make_tiling
from tests.formats import SCHEMA, TILING, anchor, delta, edited, kind_of, same_record

FOOTER = Footer(
    lineage=b"l" * 16,
    version=5,
    base=4,
    schema=b"s" * 32,
    tiling=b"t" * 32,
    attempt=b"a" * 16,
    writer=1,
    writers=2,
    changed=None,
    listed=38,
    chunks=delta().chunks,
    columns=delta().columns,
    domains=delta().domains,
)


FLOOR = FloorRecord(lineage=b"l" * 16, version=7, created=9)
LEASE = LeaseRecord(lineage=b"l" * 16, reader=b"r" * 16, start=7, seconds=900, created=9)


def test_floors_and_leases_come_back() -> None:
    assert parse_floor(emit_floor(FLOOR), where="x") == FLOOR
    assert parse_lease(emit_lease(LEASE), where="x") == LEASE


def test_floors_and_leases_stay_in_bounds() -> None:
    late, long = replace(LEASE, start=MAX_VERSION), replace(LEASE, seconds=MAX_LEASE_SECONDS + 1)
    assert kind_of(lambda: parse_lease(emit_lease(late), where="x")) == "field-type"
    assert kind_of(lambda: parse_lease(emit_lease(long), where="x")) == "field-type"
    high = replace(FLOOR, version=MAX_VERSION)
    assert kind_of(lambda: parse_floor(emit_floor(high), where="x")) == "field-type"


def test_all_objects_come_back() -> None:
    lineage = LineageRecord(lineage=b"l" * 16, created=5, schema=b"s" * 32)
    assert parse_lineage(emit_lineage(lineage), where="x") == lineage
    assert parse_schema(emit_schema(SCHEMA), where="x") == SCHEMA
    tiling = parse_tiling(emit_tiling(TILING, SCHEMA), SCHEMA, where="x")
    assert tiling.boxes(0, SCHEMA) == TILING.boxes(0, SCHEMA)
    assert digest_of_tiling(tiling, SCHEMA) == digest_of_tiling(TILING, SCHEMA)
    for manifest in (delta(), anchor()):
        assert same_record(parse_manifest(emit_manifest(manifest), way=False, where="x"), manifest)
    way = delta(target_digest=b"t" * 32)
    assert same_record(parse_manifest(emit_manifest(way), way=True, where="x"), way)
    assert same_record(parse_footer(emit_footer(FOOTER), where="x"), FOOTER)


def test_a_schema_of_all_dtypes_and_odd_names() -> None:
    specs = [TensorSpec(f"t.{name}", name, (3,)) for name in DTYPES]
    odd = [TensorSpec(name, "uint8", ()) for name in ("", "../x", "a\0b", "\N{GREEK SMALL LETTER PI}" * 2048)]
    wide = [TensorSpec("wide", "bool", (1,) * 16), TensorSpec("huge", "int8", (2**31, 2**31, 0))]
    schema = Schema((*specs, *odd, *wide))
    assert parse_schema(emit_schema(schema), where="x", digest=digest_of_schema(schema)) == schema
    assert parse_schema(emit_schema(Schema(())), where="x") == Schema(())


def test_digests_name_content() -> None:
    assert digest_of_schema(SCHEMA) != digest_of_schema(Schema(SCHEMA.tensors[:3]))
    assert len({digest_of_schema(SCHEMA), digest_of_tiling(TILING, SCHEMA)}) == 2
    data = edited(emit_schema(SCHEMA), lambda body: body.update(later=1))
    assert parse_schema(data, where="x", digest=digest_of_schema(SCHEMA)) == SCHEMA
    assert kind_of(lambda: parse_schema(data, where="x", digest=bytes(32))) == "digest-mismatch"
    tiling = emit_tiling(TILING, SCHEMA)
    assert kind_of(lambda: parse_tiling(tiling, SCHEMA, where="x", digest=bytes(32))) == "digest-mismatch"


def test_a_version_and_a_further_way_are_told_apart() -> None:
    version = emit_manifest(delta())
    way = emit_manifest(delta(target_digest=b"t" * 32))
    assert kind_of(lambda: parse_manifest(version, way=True, where="x")) == "kind-wrong"
    assert kind_of(lambda: parse_manifest(way, way=False, where="x")) == "kind-wrong"
    lost = emit(delta(), "way")
    assert kind_of(lambda: parse_manifest(lost, way=True, where="x")) == "target-digest"
    extra = emit(delta(target_digest=b"t" * 32), "version")
    assert kind_of(lambda: parse_manifest(extra, way=False, where="x")) == "target-digest"


def schema_with(**changes: Any) -> bytes:
    """A schema object of two tensors, `a` of shape (2,) and `b` of shape (2,), spoiled."""
    columns: dict[str, Any] = {"name_length": [1, 1], "dtype": [0, 0], "rank": [1, 1], "alias": [0, 0]}
    columns |= {name: changes.pop(name) for name in list(changes) if name in columns}
    types = dict(TensorTable.column_types())
    record = SchemaRecord(
        dtypes=changes.get("dtypes", ["bfloat16", "float32"]),
        tensors=TensorTable(**{name: np.array(values, types[name]) for name, values in columns.items()}),
        names=np.frombuffer(changes.get("names", b"ab"), np.uint8),
        shapes=np.array(changes.get("shapes", [2, 2]), "<u8"),
    )
    return emit(record, "schema")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("shape-overflow", {"rank": [1, 17], "shapes": [2] * 18}),
        ("shape-overflow", {"shapes": [2, 2**63]}),
        ("shape-overflow", {"shapes": [2, 2**62]}),
        ("shape-overflow", {"rank": [1, 3], "shapes": [2, 0, 2**31, 2**31]}),
        ("column-length", {"rank": [1, 2]}),
        ("column-length", {"name_length": [1, 2]}),
        ("column-length", {"name_length": [1, 2**32 - 1]}),
        ("dtype-unknown", {"dtypes": ["bfloat16", "float4"]}),
        ("dtype-unknown", {"dtypes": ["bfloat16", "x" * 10**6]}),
        ("index-range", {"dtype": [0, 2]}),
        ("index-range", {"alias": [0, 3]}),
        ("name-invalid", {"names": b"a\xff"}),
        ("name-invalid", {"name_length": [1, 4097], "names": b"a" + b"b" * 4097}),
        ("name-invalid", {"name_length": [2, 1], "names": b"a\xc3\xb6"}),
        ("name-twice", {"names": b"aa"}),
        ("name-reserved", {"name_length": [1, 12], "names": b"a__metadata__"}),
        ("alias-invalid", {"alias": [1, 0]}),
        ("alias-invalid", {"alias": [2, 1]}),
        ("alias-invalid", {"alias": [0, 1], "dtype": [0, 1]}),
        ("alias-invalid", {"alias": [0, 1], "shapes": [2, 3]}),
    ],
)
def test_spoiled_schemas(kind: str, changes: dict[str, Any]) -> None:
    parse_schema(schema_with(), where="x")
    with pytest.raises(FormatError) as caught:
        parse_schema(schema_with(**changes), where="x")
    assert caught.value.kind == kind
    assert len(str(caught.value)) < 600


def test_a_schema_of_too_many_tensors_is_refused_before_one_is_made() -> None:
    rows = MAX_TENSORS + 1

    def grow(body: dict[str, Any]) -> None:
        body["tensors"] = {"rows": rows}
        for name, dtype in TensorTable.column_types():
            codec, stored = compress(bytes(rows * dtype.itemsize))
            body["tensors"][name] = [codec, rows * dtype.itemsize, stored]

    data = edited(schema_with(), grow)
    assert len(data) < 10_000
    assert kind_of(lambda: parse_schema(data, where="x")) == "table-too-large"


def tiling_with(**changes: Any) -> bytes:
    """A tiling object of SCHEMA, each owner in a domain of its own, spoiled."""
    columns: dict[str, Any] = {
        "schema": digest_of_schema(SCHEMA),
        "width": [2, 2, 4],
        "boxes": [1, 1, 1],
        "tensor": [0, 1, 2],
        "starts": [0, 0, 0, 0, 0],
        "stops": [10, 20, 300, 5, 5],
    } | changes
    record = TilingRecord(
        schema=columns["schema"],
        domains=DomainShapeTable(
            width=np.array(columns["width"], "<u1"), boxes=np.array(columns["boxes"], "<u4")
        ),
        boxes=BoxTable(tensor=np.array(columns["tensor"], "<u4")),
        starts=np.array(columns["starts"], "<u8"),
        stops=np.array(columns["stops"], "<u8"),
    )
    return emit(record, "tiling")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("schema-mismatch", {"schema": bytes(32)}),
        ("box-tensor", {"tensor": [0, 9, 2]}),
        ("box-tensor", {"tensor": [0, 3, 2]}),
        ("width-mismatch", {"width": [2, 3, 4]}),
        ("width-mismatch", {"width": [2, 4, 4]}),
        ("column-length", {"boxes": [1, 1, 2]}),
        ("column-length", {"boxes": [1, 1, 2**32 - 1]}),
        ("column-length", {"starts": [0, 0, 0, 0]}),
        ("column-length", {"stops": [10, 20, 300, 5, 5, 1]}),
        ("box-outside", {"stops": [10, 20, 301, 5, 5]}),
        ("box-outside", {"starts": [0, 0, 300, 0, 0]}),
        ("box-outside", {"starts": [0, 0, 2**63, 0, 0]}),
        ("box-outside", {"stops": [10, 20, 2**64 - 1, 5, 5]}),
        ("domain-empty", {"width": [2, 2, 4, 4], "boxes": [1, 1, 1, 0]}),
        ("tiling-hole", {"stops": [10, 19, 300, 5, 5]}),
        ("tiling-hole", {"width": [2, 2], "boxes": [1, 1], "tensor": [0, 1], "starts": [0] * 3, "stops": [10, 20, 300]}),
        ("tiling-overlap", {"boxes": [1, 1, 2], "tensor": [0, 1, 2, 2], "starts": [0] * 7, "stops": [10, 20, 300, 5, 5, 1, 1]}),
        ("tiling-overlap", {"boxes": [1, 2, 1], "tensor": [0, 1, 1, 2], "starts": [0, 0, 0, 100, 0, 0], "stops": [10, 20, 200, 200, 5, 5]}),
    ],
)  # fmt: skip
def test_spoiled_tilings(kind: str, changes: dict[str, Any]) -> None:
    parse_tiling(tiling_with(), SCHEMA, where="x")
    with pytest.raises(FormatError) as caught:
        parse_tiling(tiling_with(**changes), SCHEMA, where="x")
    assert caught.value.kind == kind


def test_a_domain_of_2_to_the_31_elements() -> None:
    schema = Schema((TensorSpec("w", "int8", (2**31,)),))
    halves = [0, 2**30], [2**30, 2**31]
    empty = TilingRecord(
        schema=digest_of_schema(schema),
        domains=DomainShapeTable(width=np.array([1], "<u1"), boxes=np.array([2], "<u4")),
        boxes=BoxTable(tensor=np.array([0, 0], "<u4")),
        starts=np.array(halves[0], "<u8"),
        stops=np.array(halves[1], "<u8"),
    )
    data = emit(empty, "tiling")
    assert kind_of(lambda: parse_tiling(data, schema, where="x")) == "domain-too-large"
    whole = replace(
        empty,
        domains=DomainShapeTable(width=np.array([1], "<u1"), boxes=np.array([1], "<u4")),
        boxes=BoxTable(tensor=np.array([0], "<u4")),
        starts=np.array([0], "<u8"),
        stops=np.array([2**31], "<u8"),
    )
    assert kind_of(lambda: parse_tiling(emit(whole, "tiling"), schema, where="x")) == "domain-too-large"
    assert len(parse_tiling(emit_tiling(make_tiling(schema), schema), schema, where="x")) == 512


def test_corners_are_not_padded_beyond_what_the_object_allows() -> None:
    schema = Schema((TensorSpec("s", "int8", ()), TensorSpec("wide", "int8", (1,) * 16)))
    count = 1 << 20
    record = TilingRecord(
        schema=digest_of_schema(schema),
        domains=DomainShapeTable(width=np.array([1], "<u1"), boxes=np.array([count], "<u4")),
        boxes=BoxTable(tensor=np.zeros(count, "<u4")),
        starts=np.empty(0, "<u8"),
        stops=np.empty(0, "<u8"),
    )
    data = emit(record, "tiling")
    assert len(data) < 10_000
    assert kind_of(lambda: parse_tiling(data, schema, where="x")) == "table-too-large"


def test_a_tiling_without_domains() -> None:
    schema = Schema((TensorSpec("none", "int8", (0,)),))
    tiling = make_tiling(schema)
    assert len(parse_tiling(emit_tiling(tiling, schema), schema, where="x")) == 0


SHARD = b"\x89DFS\r\n\x1a\n" + b"chunks" + shard_tail(FOOTER, 14)


def test_a_shard_ends_with_its_footer_and_where_that_begins() -> None:
    assert SHARD.endswith((14).to_bytes(8, "little") + SHARD_END)
    assert footer_offset(SHARD[-16:], len(SHARD), where="x") == 14
    assert same_record(read_footer(memoryview(SHARD), where="x"), FOOTER)


@pytest.mark.parametrize(
    ("kind", "shard"),
    [
        ("magic-wrong", b"\x89DFX\r\n\x1a\n" + SHARD[8:]),
        ("magic-wrong", SHARD[:-1]),
        ("magic-wrong", SHARD + b"\0"),
        ("truncated", SHARD[:23]),
        ("footer-offset", SHARD[:-16] + (7).to_bytes(8, "little") + SHARD_END),
        ("footer-offset", SHARD[:-16] + (len(SHARD) - 15).to_bytes(8, "little") + SHARD_END),
        ("footer-offset", SHARD[:-16] + (2**64 - 1).to_bytes(8, "little") + SHARD_END),
        ("truncated", SHARD[:-16] + (len(SHARD) - 16).to_bytes(8, "little") + SHARD_END),
        ("magic-wrong", SHARD[:-16] + (13).to_bytes(8, "little") + SHARD_END),
        ("crc-mismatch", SHARD[:-20] + b"\0\0\0\0" + SHARD[-16:]),
    ],
)
def test_spoiled_shards(kind: str, shard: bytes) -> None:
    assert kind_of(lambda: read_footer(memoryview(shard), where="x")) == kind


def test_the_digest_of_a_record_is_that_of_its_raw_body() -> None:
    record = LineageRecord(lineage=b"l" * 16, created=5, schema=b"s" * 32)
    assert content_digest(record, "lineage") != content_digest(replace(record, created=6), "lineage")


@pytest.mark.parametrize("names", [[], ["", "a\n", "b\x7f"], ["a", "", ""], ["", "ÿ", "x\xff"], [""]])
def test_names_come_back_whatever_stands_in_them(names: list[str]) -> None:
    names = list(dict.fromkeys(names))
    schema = Schema(TensorSpec(name, "float32", (k,) * k) for k, name in enumerate(names))
    assert parse_schema(emit_schema(schema), where="x", digest=digest_of_schema(schema)) == schema
