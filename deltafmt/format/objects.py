"""Schemas, tilings, manifests, footers and the lineage descriptor as objects.

Emitting gives an object's whole bytes; parsing raises `FormatError`, `ChecksumError` or `UnsupportedError`.
`where` names the object in errors.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from deltafmt.dtypes import DTYPES
from deltafmt.errors import DeltafmtError, FormatError
from deltafmt.format.body import content_digest, emit, parse
from deltafmt.format.constants import (
    MAX_LEASE_SECONDS,
    MAX_OBJECT_BYTES,
    MAX_TENSORS,
    MAX_VERSION,
    WIDTHS,
    table_limit,
)
from deltafmt.format.envelope import shown
from deltafmt.format.records import (
    BoxTable,
    DomainShapeTable,
    FloorRecord,
    Footer,
    LatestRecord,
    LeaseRecord,
    LineageRecord,
    Manifest,
    SchemaRecord,
    TensorTable,
    TilingRecord,
)
from deltafmt.format.signing import Signer
from deltafmt.schema import Schema
from deltafmt.schema_check import MAX_RANK
from deltafmt.tiling import Tiling

Data = bytes | memoryview


def emit_lineage(record: LineageRecord) -> bytes:
    return emit(record, "lineage")


def parse_lineage(data: Data, *, where: object) -> LineageRecord:
    return cast("LineageRecord", parse(data, "lineage", where=where))


def emit_manifest(manifest: Manifest, signer: Signer | None = None) -> bytes:
    """The manifest as an object; a `signer` puts its signature in place of what the manifest has."""
    return emit(manifest, "way" if manifest.is_way else "version", signer=signer)


def parse_manifest(data: Data, *, way: bool, where: object, limit: int = MAX_OBJECT_BYTES) -> Manifest:
    """A version's manifest, or with `way` that of a further way."""
    manifest = cast("Manifest", parse(data, "way" if way else "version", where=where, limit=limit))
    if manifest.is_way != way:
        raise FormatError(
            "a further way names its target's digest, a version does not", kind="target-digest", where=where
        )
    return manifest


def emit_footer(footer: Footer) -> bytes:
    return emit(footer, "footer")


def parse_footer(data: Data, *, where: object) -> Footer:
    return cast("Footer", parse(data, "footer", where=where))


def emit_latest(record: LatestRecord) -> bytes:
    return emit(record, "latest")


def parse_latest(data: Data, *, where: object) -> LatestRecord:
    record = cast("LatestRecord", parse(data, "latest", where=where))
    _check_below(record.version, MAX_VERSION, f"{where}, field `version`")
    return record


def emit_floor(record: FloorRecord) -> bytes:
    return emit(record, "floor")


def parse_floor(data: Data, *, where: object) -> FloorRecord:
    record = cast("FloorRecord", parse(data, "floor", where=where))
    _check_below(record.version, MAX_VERSION, f"{where}, field `version`")
    return record


def emit_lease(record: LeaseRecord) -> bytes:
    return emit(record, "lease")


def parse_lease(data: Data, *, where: object) -> LeaseRecord:
    record = cast("LeaseRecord", parse(data, "lease", where=where))
    _check_below(record.start, MAX_VERSION, f"{where}, field `start`")
    _check_below(record.seconds, MAX_LEASE_SECONDS + 1, f"{where}, field `seconds`")
    return record


def emit_schema(schema: Schema) -> bytes:
    return emit(schema_record(schema), "schema")


def digest_of_schema(schema: Schema) -> bytes:
    """Digest under which the schema is stored."""
    return content_digest(schema_record(schema), "schema")


def parse_schema(data: Data, *, where: object, digest: bytes | None = None) -> Schema:
    """The schema of an object; with `digest` its content is checked against that name."""
    record = cast("SchemaRecord", parse(data, "schema", where=where))
    _check_digest(record, "schema", digest, where)
    return schema_of(record, where=where)


def schema_of(record: SchemaRecord, *, where: object) -> Schema:
    """The schema that a record holds, checked."""
    if len(record.tensors) > MAX_TENSORS:
        raise FormatError(
            "too many tensors",
            kind="table-too-large",
            where=where,
            expected=MAX_TENSORS,
            found=len(record.tensors),
        )
    ranks = record.tensors.rank.astype(np.int64)
    lengths = record.tensors.name_length.astype(np.int64)
    if (ranks > MAX_RANK).any():
        raise FormatError("rank is out of bounds", kind="shape-overflow", where=where, expected=MAX_RANK)
    if int(ranks.sum()) != len(record.shapes) or int(lengths.sum()) != len(record.names):
        raise FormatError("columns disagree with the table of tensors", kind="column-length", where=where)
    if (record.shapes >= 2**63).any():
        raise FormatError("extent is out of bounds", kind="shape-overflow", where=where)
    for name in record.dtypes:
        if name not in DTYPES:
            raise FormatError("unknown dtype", kind="dtype-unknown", where=where, found=shown(name))
    if (record.tensors.dtype >= len(record.dtypes)).any():
        raise FormatError("dtype index is out of range", kind="index-range", where=where)
    if (record.tensors.alias > len(ranks)).any():
        raise FormatError("alias row is out of range", kind="index-range", where=where)
    try:
        return Schema.of_columns(*_columns(record, ranks, lengths, where))
    except FormatError:
        raise
    except DeltafmtError as error:
        raise FormatError(
            error.message,
            kind=error.kind,
            where=f"{where}, tensor {error.where}",
            expected=error.expected,
            found=error.found,
        ) from error


def _columns(
    record: SchemaRecord, ranks: Any, lengths: Any, where: object
) -> tuple[list[str], list[str], list[tuple[int, ...]], list[str | None]]:
    """Names, dtypes, shapes and aliases, row by row; equal ones are one object."""
    names = _names(record.names, np.cumsum(lengths), where)
    extents = record.shapes.tobytes()
    packed = list(map(extents.__getitem__, _slices(8 * np.cumsum(ranks))))
    shapes = {key: struct.unpack(f"<{len(key) // 8}Q", key) for key in set(packed)}
    aliases: list[str | None] = [None] * len(names)
    for row in np.flatnonzero(record.tensors.alias).tolist():
        aliases[row] = names[int(record.tensors.alias[row]) - 1]
    dtypes = list(map(record.dtypes.__getitem__, record.tensors.dtype.tolist()))
    return names, dtypes, list(map(shapes.__getitem__, packed)), aliases


def _names(packed: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64], where: object) -> list[str]:
    blob = packed.tobytes()
    if blob.isascii() and len(ends):
        # A byte that no ASCII name holds between any two of them: one split makes all the strings.
        return np.insert(packed, ends[:-1], 0xFF).tobytes().decode("latin-1").split("\xff")
    try:
        return [blob[place].decode() for place in _slices(ends)]
    except UnicodeDecodeError as error:
        raise FormatError("tensor name is not UTF-8", kind="name-invalid", where=where) from error


def _slices(ends: npt.NDArray[np.int64]) -> Iterator[slice]:
    stops = ends.tolist()
    return map(slice, [0, *stops], stops)


def schema_record(schema: Schema) -> SchemaRecord:
    dtypes = {name: number for number, name in enumerate(dict.fromkeys(schema.dtypes))}
    names = [name.encode() for name in schema.names]
    alias = np.zeros(len(schema), "<u4")
    for row, name in enumerate(schema.aliases):
        if name is not None:
            alias[row] = 1 + schema.rows[name]
    return SchemaRecord(
        dtypes=list(dtypes),
        tensors=TensorTable(
            name_length=np.fromiter(map(len, names), "<u4", len(names)),
            dtype=np.fromiter(map(dtypes.__getitem__, schema.dtypes), "<u1", len(names)),
            rank=schema.ranks.astype("<u1"),
            alias=alias,
        ),
        names=np.frombuffer(b"".join(names), np.uint8),
        shapes=np.fromiter(itertools.chain.from_iterable(schema.shapes), "<u8"),
    )


def emit_tiling(tiling: Tiling, schema: Schema) -> bytes:
    return emit(
        _tiling_record(tiling, schema), "tiling", decoded_bytes=_corner_bytes(schema, tiling.box_tensor)
    )


def digest_of_tiling(tiling: Tiling, schema: Schema) -> bytes:
    """Digest under which the tiling is stored."""
    return content_digest(_tiling_record(tiling, schema), "tiling")


def parse_tiling(
    data: Data,
    schema: Schema,
    *,
    where: object,
    digest: bytes | None = None,
    schema_digest: bytes | None = None,
) -> Tiling:
    """The tiling of an object, checked to cover the schema exactly once.

    `schema_digest` is the schema's digest where the caller has it at hand.
    """
    record = cast("TilingRecord", parse(data, "tiling", where=where))
    _check_digest(record, "tiling", digest, where)
    if record.schema != (schema_digest or digest_of_schema(schema)):
        raise FormatError("tiling of another schema", kind="schema-mismatch", where=where)
    if _corner_bytes(schema, record.boxes.tensor) > table_limit(len(data)):
        # Corners are padded to the widest tensor's rank, which must not make much out of little.
        raise FormatError("too many boxes", kind="table-too-large", where=where, found=len(record.boxes))
    tensors = record.boxes.tensor.astype(np.int64)
    if (tensors >= len(schema)).any():
        raise FormatError("box of a tensor that the schema lacks", kind="box-tensor", where=where)
    if not np.isin(record.domains.width, WIDTHS).all():
        raise FormatError("element width is out of range", kind="width-mismatch", where=where)
    counts = record.domains.boxes.astype(np.int64)
    ranks = schema.ranks[tensors]
    if int(counts.sum()) != len(tensors):
        raise FormatError("domains and boxes disagree", kind="column-length", where=where)
    if not int(ranks.sum()) == len(record.starts) == len(record.stops):
        raise FormatError("box corners and ranks disagree", kind="column-length", where=where)
    if (record.stops >= 2**63).any() or (record.starts >= 2**63).any():
        raise FormatError("box corner is out of range", kind="box-outside", where=where)
    used = _used_dims(ranks, schema.padded_shapes.shape[1])
    start, stop = np.zeros(used.shape, np.int64), np.ones(used.shape, np.int64)
    start[used], stop[used] = record.starts, record.stops
    tiling = Tiling(
        widths=record.domains.width,
        domain_box=np.concatenate(([0], np.cumsum(counts))),
        box_tensor=tensors,
        box_start=start,
        box_stop=stop,
    )
    tiling.check(schema, where=where)
    return tiling


def _tiling_record(tiling: Tiling, schema: Schema) -> TilingRecord:
    ranks = schema.ranks[tiling.box_tensor]
    used = _used_dims(ranks, tiling.box_start.shape[1])
    return TilingRecord(
        schema=digest_of_schema(schema),
        domains=DomainShapeTable(width=tiling.widths, boxes=np.diff(tiling.domain_box).astype("<u4")),
        boxes=BoxTable(tensor=tiling.box_tensor.astype("<u4")),
        starts=tiling.box_start[used].astype("<u8"),
        stops=tiling.box_stop[used].astype("<u8"),
    )


def _corner_bytes(schema: Schema, box_tensor: npt.NDArray[Any]) -> int:
    """Bytes of all boxes' corners at the rank of the widest tensor."""
    return 16 * int(schema.padded_shapes.shape[1]) * len(box_tensor)


def _used_dims(ranks: npt.NDArray[np.int64], rank: int) -> npt.NDArray[np.bool_]:
    return np.arange(rank) >= rank - ranks[:, None]


def _check_below(value: int, bound: int, where: str) -> None:
    if value >= bound:
        raise FormatError(
            "number is out of range", kind="field-type", where=where, expected=f"below {bound}", found=value
        )


def _check_digest(record: Any, kind: str, digest: bytes | None, where: object) -> None:
    if digest is None:
        return
    found = content_digest(record, kind)
    if found != digest:
        raise FormatError(
            "content differs from its name",
            kind="digest-mismatch",
            where=where,
            expected=digest.hex(),
            found=found.hex(),
        )
