"""Whatever bytes stand in an object, parsing gives a record or one of the library's own errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deltafmt.errors import DeltafmtError, FormatError, UnsupportedError
from deltafmt.format.checksum import crc32c
from deltafmt.format.codec import compress, decompress
from deltafmt.format.envelope import pack_map, seal, unseal
from deltafmt.format.objects import (
    emit_manifest,
    parse_footer,
    parse_lineage,
    parse_manifest,
    parse_schema,
    parse_tiling,
)
from deltafmt.format.records import Manifest
from deltafmt.format.shard import read_footer
from deltafmt.format.validate import check_manifest
from deltafmt.schema import Schema
from deltafmt.tiling import Tiling

GOOD = Path(__file__).resolve().parents[2] / "spec" / "vectors" / "good"
ROOTS = [GOOD / name for name in ("many-boxes", "aliases-and-empties", "further-ways", "side-files")]
MANIFEST = (GOOD / "many-boxes" / "versions" / f"{1:020d}.dfm").read_bytes()
MAGIC_BYTES, HEAD_BYTES = 8, 24


def parse_all(root: Path, key: str, data: bytes) -> None:
    """Parse an object of a root as its name asks for, and check it against its neighbours."""
    folder = key.partition("/")[0]
    if key == "lineage.dfm":
        parse_lineage(data, where=key)
    elif folder == "schemas":
        parse_schema(data, where=key)
    elif folder == "tilings":
        parse_tiling(data, schema_of(root, data), where=key)
    elif folder in ("versions", "ways"):
        manifest = parse_manifest(data, way=folder == "ways", where=key)
        check_manifest(manifest, *context(root, manifest), where=key)
    else:
        read_footer(memoryview(data), where=key)


def schema_of(root: Path, tiling: bytes) -> Schema:
    digest = unseal(tiling, kind="tiling", where="tiling").get("schema")
    path = root / "schemas" / f"{digest.hex() if isinstance(digest, bytes) else ''}.dfm"
    return parse_schema((path if path.exists() else first(root, "schemas")).read_bytes(), where="schema")


def first(root: Path, folder: str) -> Path:
    return min((root / folder).glob("*.dfm"))


def context(root: Path, manifest: Manifest) -> tuple[Schema, Tiling]:
    names = {"schemas": manifest.schema, "tilings": manifest.tiling}
    paths = {folder: root / folder / f"{digest.hex()}.dfm" for folder, digest in names.items()}
    found = {
        folder: (path if path.exists() else first(root, folder)).read_bytes()
        for folder, path in paths.items()
    }
    schema = parse_schema(found["schemas"], where="schema")
    return schema, parse_tiling(found["tilings"], schema, where="tiling")


OBJECTS = [
    (root, path.relative_to(root).as_posix())
    for root in ROOTS
    for path in sorted(root.rglob("*"))
    if path.suffix in (".dfm", ".dfs")
]


def refusal(parse: Callable[[], object]) -> DeltafmtError | None:
    """The library's own error, if one was raised; any other goes on."""
    try:
        parse()
    except DeltafmtError as error:
        return error
    return None


def check_refusal(error: DeltafmtError | None) -> None:
    assert error is None or isinstance(error, FormatError | UnsupportedError)
    assert error is None or len(str(error)) < 1000


def resealed(data: bytes) -> bytes:
    """The object with length and checksum made right again."""
    head = data[8:12] + (len(data) - HEAD_BYTES).to_bytes(8, "little")
    checksum = crc32c(data[HEAD_BYTES:], crc32c(head))
    return data[:MAGIC_BYTES] + head + checksum.to_bytes(4, "little") + data[HEAD_BYTES:]


@given(st.sampled_from(OBJECTS), st.data())
def test_any_spoiled_bytes(place: tuple[Path, str], draw: st.DataObject) -> None:
    root, key = place
    data = bytearray((root / key).read_bytes())
    for _ in range(draw.draw(st.integers(1, 4))):
        at = draw.draw(st.integers(0, len(data) - 1))
        cut = draw.draw(st.integers(0, 3))
        data[at : at + cut] = draw.draw(st.binary(max_size=4))
    spoiled = bytes(data)
    if key.endswith(".dfm") and len(spoiled) > HEAD_BYTES and draw.draw(st.booleans()):
        spoiled = resealed(spoiled)
    check_refusal(refusal(lambda: parse_all(root, key, spoiled)))


NUMBERS = st.sampled_from([0, 1, 2, 3, 7, 16, 255, 256, 2**31, 2**32 - 1, 2**48, 2**62, 2**63, 2**64 - 1, -1])
VALUES = st.one_of(
    NUMBERS,
    st.none(),
    st.booleans(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=40),
    st.lists(NUMBERS, max_size=4),
    st.dictionaries(st.text(max_size=3), NUMBERS, max_size=3),
)


def columns_of(value: Any) -> list[list[Any]]:
    """Every column at any depth of a body."""
    if isinstance(value, dict):
        return [column for item in value.values() for column in columns_of(item)]
    return [value] if isinstance(value, list) and len(value) == 3 and isinstance(value[2], bytes) else []


@given(st.sampled_from([place for place in OBJECTS if place[1].endswith(".dfm")]), st.data())
def test_any_spoiled_fields(place: tuple[Path, str], draw: st.DataObject) -> None:
    root, key = place
    body = unseal((root / key).read_bytes(), kind=None, where=key)
    for _ in range(draw.draw(st.integers(1, 3))):
        columns, in_column = columns_of(body), draw.draw(st.booleans())
        if columns and in_column:
            spoil_column(draw.draw(st.sampled_from(columns)), draw)
            continue
        tables = [body, *(value for value in body.values() if isinstance(value, dict))]
        table = draw.draw(st.sampled_from(tables))
        if table:
            table[draw.draw(st.sampled_from(sorted(table)))] = draw.draw(VALUES)
    try:
        spoiled = seal(body)
    except OverflowError:
        return
    check_refusal(refusal(lambda: parse_all(root, key, spoiled)))


def spoil_column(column: list[Any], draw: st.DataObject) -> None:
    """Another element or two, or another length, in a column that is coded rightly otherwise."""
    try:
        raw = bytearray(decompress(column[0], memoryview(column[2]), column[1], where="").tobytes())
    except (DeltafmtError, TypeError):
        return
    at = draw.draw(st.integers(0, len(raw)))
    cut = draw.draw(st.sampled_from([0, 1, 4, 8]))
    raw[at : at + cut] = draw.draw(st.binary(min_size=cut, max_size=cut + 1))
    codec, stored = compress(np.frombuffer(bytes(raw), np.uint8))
    column[:] = [codec, len(raw), stored]


@given(st.binary(max_size=200))
def test_any_bytes_as_a_body(body: bytes) -> None:
    data = resealed(MANIFEST[:HEAD_BYTES] + body)
    for parse in (parse_lineage, parse_footer, parse_schema):
        check_refusal(refusal(partial(parse, data, where="object")))


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=6), st.integers(0, 2**63 - 1))
def test_what_was_emitted_is_parsed(meta: dict[str, Any], created: int) -> None:
    try:
        pack_map({"meta": meta})
    except OverflowError:
        return
    manifest = parse_manifest(MANIFEST, way=False, where="manifest")
    fields = {name: getattr(manifest, name) for name in manifest.__dataclass_fields__}
    changed = Manifest(**fields | {"meta": meta, "created": created})
    again = parse_manifest(emit_manifest(changed), way=False, where="manifest")
    assert again.created == created
    # As bytes, since a NaN is not equal to itself.
    assert pack_map(again.meta) == pack_map(meta)
    assert (again.chunks.offset == manifest.chunks.offset).all()
