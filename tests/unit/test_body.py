from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deltafmt.format.body import content_digest, emit, parse
from deltafmt.format.codec import compress, decompress
from deltafmt.format.constants import FREE_TABLE_BYTES, MAX_TABLE_BYTES, RAW, ZSTD, table_limit
from deltafmt.format.envelope import unseal
from deltafmt.format.records import (
    RECORDS,
    TABLES,
    LineageRecord,
    SchemaRecord,
    Table,
    TensorTable,
    described,
)
from tests.formats import SCHEMA, delta, edited, kind_of, same_record

LINEAGE = LineageRecord(lineage=b"l" * 16, created=5, schema=b"s" * 32)
DELTA = emit(delta(), "version")


def frame(raw: bytes) -> bytes:
    codec, stored = compress(np.frombuffer(raw, np.uint8))
    assert codec == ZSTD
    return stored


def test_records_come_back() -> None:
    assert parse(emit(LINEAGE, "lineage"), "lineage", where="x") == LINEAGE
    assert same_record(parse(DELTA, "version", where="x"), delta())


def test_unknown_keys_are_ignored_in_bodies_and_tables() -> None:
    def add(body: dict[str, Any]) -> None:
        body["later"] = [1, {"a": 2}]
        body["chunks"]["later"] = [9, 9, b""]

    assert same_record(parse(edited(DELTA, add), "version", where="x"), delta())


def test_every_field_and_column_says_what_it_is() -> None:
    for record in {*RECORDS.values(), *TABLES.values()}:
        for name, wire, meaning in described(record):
            assert name.islower()
            assert wire
            assert meaning
    for table in TABLES.values():
        assert all(dtype.str[0] in "<|" for _, dtype in table.column_types())


def test_tables_of_rows_and_parts_of_them() -> None:
    table = TABLES["ShardTable"].of_rows([(0, 5), (3, 2**40)])
    assert len(table) == 2
    assert table.take([1]).writer.tolist() == [3]
    assert len(TABLES["ShardTable"].of_rows([])) == len(TABLES["ShardTable"].empty()) == 0


def set_field(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda body: body.update({name: value})


def set_column(
    value: object, table: str = "tensors", name: str = "digest0"
) -> Callable[[dict[str, Any]], object]:
    return lambda body: body[table].update({name: value})


ROWS = len(SCHEMA)
EIGHTS = bytes(8 * ROWS)
SPOILED: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "field missing": ("field-missing", lambda body: body.pop("attempt")),
    "table missing": ("field-missing", lambda body: body.pop("chunks")),
    "column missing": (
        "field-missing",
        lambda body: body["chunks"].pop("crc", None) or body["columns"].pop("crc"),
    ),
    "negative number": ("field-type", set_field("version", -1)),
    "number of 64 bits": ("field-type", set_field("version", 2**63)),
    "a boolean as a number": ("field-type", set_field("version", True)),
    "a float as a number": ("field-type", set_field("version", 1.0)),
    "a number as a boolean": ("field-type", set_field("data", 1)),
    "a short id": ("field-type", set_field("lineage", b"x" * 15)),
    "an id as text": ("field-type", set_field("lineage", "x" * 16)),
    "nil where it must not be": ("field-type", set_field("schema", None)),
    "a long digest": ("field-type", set_field("base_digest", b"x" * 33)),
    "meta as list": ("field-type", set_field("meta", [])),
    "files as list": ("field-type", set_field("files", [])),
    "a file without size": ("field-type", set_field("files", {"a": [b"x" * 32]})),
    "a file with a short digest": ("field-type", set_field("files", {"a": [b"x" * 31, 1]})),
    "a file outside": ("key-unsafe", set_field("files", {"../a": [b"x" * 32, 1]})),
    "a table as list": ("field-type", set_field("chunks", [])),
    "rows as text": ("field-type", lambda body: body["chunks"].update(rows="3")),
    "rows negative": ("field-type", lambda body: body["chunks"].update(rows=-3)),
    "rows missing": ("field-type", lambda body: body["chunks"].pop("rows")),
    "rows too many": ("column-length", lambda body: body["chunks"].update(rows=2**62)),
    "a column as bytes": ("field-type", set_column(EIGHTS)),
    "a column of two": ("field-type", set_column([RAW, len(EIGHTS)])),
    "a column of text": ("field-type", set_column([RAW, len(EIGHTS), "x"])),
    "a codec as text": ("field-type", set_column(["raw", len(EIGHTS), EIGHTS])),
    "a negative length": ("field-type", set_column([RAW, -1, EIGHTS])),
    "another codec": ("codec-unknown", set_column([7, len(EIGHTS), EIGHTS])),
    "an odd length": ("column-length", set_column([RAW, len(EIGHTS) - 1, EIGHTS[:-1]])),
    "a row less": ("column-length", set_column([RAW, len(EIGHTS) - 8, EIGHTS[:-8]])),
    "fewer bytes than said": ("column-length", set_column([RAW, len(EIGHTS), EIGHTS[:-1]])),
    "no frame": ("zstd-corrupt", set_column([ZSTD, len(EIGHTS), EIGHTS])),
    "a frame of another size": ("zstd-size", set_column([ZSTD, len(EIGHTS), frame(EIGHTS + EIGHTS)])),
    "two frames": ("zstd-trailing", set_column([ZSTD, len(EIGHTS), frame(EIGHTS) * 2])),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_body_is_refused(case: str) -> None:
    kind, edit = SPOILED[case]
    assert kind_of(lambda: parse(edited(DELTA, edit), "version", where="x")) == kind


def test_columns_of_one_object_share_one_bound() -> None:
    def announce(body: dict[str, Any]) -> None:
        half = FREE_TABLE_BYTES // 2 + (1 << 20)
        for name in ("names", "shapes"):
            body[name] = [ZSTD, half, frame(bytes(half))]

    schema = SchemaRecord(
        dtypes=[], tensors=TensorTable.empty(), names=np.empty(0, np.uint8), shapes=np.empty(0, "<u8")
    )
    spoiled = edited(emit(schema, "schema"), announce)
    assert len(spoiled) < 10_000
    assert kind_of(lambda: parse(spoiled, "schema", where="x")) == "table-too-large"


def test_the_bound_grows_with_the_object_up_to_a_cap() -> None:
    assert table_limit(0) == FREE_TABLE_BYTES
    assert table_limit(1 << 20) > table_limit(0)
    assert table_limit(1 << 40) == MAX_TABLE_BYTES


def test_what_compresses_like_a_bomb_is_stored_raw() -> None:
    shapes = np.zeros(FREE_TABLE_BYTES // 8 + 100_000, "<u8")
    schema = SchemaRecord(dtypes=[], tensors=TensorTable.empty(), names=np.empty(0, np.uint8), shapes=shapes)
    data = emit(schema, "schema")
    assert unseal(data, kind="schema", where="x")["shapes"][0] == RAW
    assert len(parse(data, "schema", where="x").shapes) == len(shapes)


def test_content_digests_do_not_depend_on_the_compressor() -> None:
    def store_raw(body: dict[str, Any]) -> None:
        codec, raw_bytes, stored = body["names"]
        assert codec == ZSTD
        body["names"] = [
            RAW,
            raw_bytes,
            decompress(codec, memoryview(stored), raw_bytes, where="x").tobytes(),
        ]

    schema = SchemaRecord(
        dtypes=[],
        tensors=TensorTable.empty(),
        names=np.frombuffer(b"layer" * 99, np.uint8),
        shapes=np.empty(0, "<u8"),
    )
    data = emit(schema, "schema")
    other = edited(data, store_raw)
    assert other != data
    again = parse(other, "schema", where="x")
    assert content_digest(again, "schema") == content_digest(schema, "schema")


def test_a_table_keeps_its_columns_little_endian() -> None:
    table: Table = delta().chunks
    turned = replace(delta(), chunks=table.replaced(offset=delta().chunks.offset.astype(">u8")))
    assert emit(turned, "version") == DELTA
