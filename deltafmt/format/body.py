"""Records to msgpack bodies and back, derived from the records' own field descriptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from deltafmt.errors import FormatError
from deltafmt.format.checksum import blake2b
from deltafmt.format.codec import compress, decompress
from deltafmt.format.constants import MAX_OBJECT_BYTES, RAW, table_limit
from deltafmt.format.envelope import pack_map, seal, shown, unseal
from deltafmt.format.keys import check_name
from deltafmt.format.records import RECORDS, TABLES, Table, described, optional
from deltafmt.format.signing import Signer


def emit(record: Any, kind: str, *, decoded_bytes: int = 0, signer: Signer | None = None) -> bytes:
    """The whole object of a record; `decoded_bytes` where a reader makes more of it than its raw columns."""
    data = seal(_body(record, kind, compressed=True), signer)
    if max(_raw_bytes(record), decoded_bytes) > table_limit(len(data)):
        # Compressed so well that readers would take it for a bomb.
        return seal(_body(record, kind, compressed=False), signer)
    return data


def content_digest(record: Any, kind: str) -> bytes:
    """BLAKE2b-256 over the body with every column raw: the same whatever compressor wrote the object."""
    return blake2b(pack_map(_body(record, kind, compressed=False)))


def parse(data: bytes | memoryview, kind: str, *, where: object, limit: int = MAX_OBJECT_BYTES) -> Any:
    """The record of an object of the given kind; unknown optional keys are ignored."""
    body = unseal(data, kind=kind, where=where, limit=limit)
    budget = _Budget(len(data))
    values = {}
    may_lack = optional(RECORDS[kind])
    for name, wire, _ in described(RECORDS[kind]):
        if name not in body and name in may_lack:
            continue
        if name not in body:
            raise FormatError("field is missing", kind="field-missing", where=f"{where}, field `{name}`")
        values[name] = _parse_field(body[name], wire, budget, f"{where}, field `{name}`")
    return RECORDS[kind](**values)


def _body(record: Any, kind: str, *, compressed: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"kind": kind, "required": []}
    may_lack = optional(type(record))
    for name, wire, _ in described(type(record)):
        value = getattr(record, name)
        if value is not None or name not in may_lack:
            body[name] = _emit_field(value, wire, compressed)
    return body


def _emit_field(value: Any, wire: str, compressed: bool) -> Any:
    if wire in TABLES:
        columns = {
            name: _emit_column(getattr(value, name), dtype, compressed)
            for name, dtype in value.column_types()
        }
        return {"rows": len(value), **columns}
    if wire.startswith("column"):
        return _emit_column(value, _column_dtype(wire), compressed)
    if wire == "files":
        return {name: [digest, size] for name, (digest, size) in value.items()}
    return value


def _emit_column(values: Any, dtype: np.dtype[Any], compressed: bool) -> list[Any]:
    raw = np.ascontiguousarray(values, dtype).view(np.uint8).reshape(-1)
    codec, stored = compress(raw) if compressed else (RAW, raw.tobytes())
    return [codec, raw.size, stored]


def _raw_bytes(record: Any) -> int:
    """Raw bytes of all columns of a record."""
    total = 0
    for name, wire, _ in described(type(record)):
        value = getattr(record, name)
        if wire in TABLES:
            total += len(value) * sum(dtype.itemsize for _, dtype in value.column_types())
        elif wire.startswith("column"):
            total += len(value) * _column_dtype(wire).itemsize
    return total


class _Budget:
    """What the columns of one object may still take when decoded."""

    def __init__(self, object_bytes: int) -> None:
        self.limit = self.left = table_limit(object_bytes)

    def take(self, raw_bytes: int, where: object) -> None:
        self.left -= raw_bytes
        if self.left < 0:
            raise FormatError(
                "columns of the object are too large",
                kind="table-too-large",
                where=where,
                expected=f"at most {self.limit} bytes",
            )


def _parse_field(value: Any, wire: str, budget: _Budget, where: str) -> Any:
    if wire in TABLES:
        return _parse_table(value, TABLES[wire], budget, where)
    if wire.startswith("column"):
        return _parse_column(value, _column_dtype(wire), None, budget, where)
    if wire.endswith("?"):
        return None if value is None else _parse_field(value, wire[:-1], budget, where)
    if not _SCALARS[wire](value):
        raise FormatError(
            "field is not what the format says",
            kind="field-type",
            where=where,
            expected=wire,
            found=shown(value),
        )
    if wire == "signature":
        return tuple(value)
    if wire == "files":
        return {check_name(name, where=where): (digest, size) for name, (digest, size) in value.items()}
    return value


def _parse_table(value: Any, table: type[Table], budget: _Budget, where: str) -> Table:
    if not isinstance(value, dict) or not _is_int(value.get("rows")):
        raise FormatError("not a table", kind="field-type", where=where, found=shown(value))
    arrays = {}
    for name, dtype in table.column_types():
        place = f"{where}, column `{name}`"
        if name not in value:
            raise FormatError("column is missing", kind="field-missing", where=place)
        arrays[name] = _parse_column(value[name], dtype, value["rows"], budget, place)
    return table(**arrays)


def _parse_column(value: Any, dtype: np.dtype[Any], rows: int | None, budget: _Budget, where: str) -> Any:
    fits = isinstance(value, list) and len(value) == 3
    if not fits or not (_is_int(value[0]) and _is_int(value[1]) and isinstance(value[2], bytes)):
        raise FormatError("not a column", kind="field-type", where=where, found=shown(value))
    codec, raw_bytes, stored = value
    expected = raw_bytes // dtype.itemsize * dtype.itemsize if rows is None else rows * dtype.itemsize
    if raw_bytes != expected:
        raise FormatError(
            "column length does not fit its rows",
            kind="column-length",
            where=where,
            expected=expected,
            found=raw_bytes,
        )
    budget.take(raw_bytes, where)
    return decompress(codec, memoryview(stored), raw_bytes, where=where).view(dtype)


def _column_dtype(wire: str) -> np.dtype[Any]:
    return np.dtype("<" + wire.removeprefix("column "))


def _is_int(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_signature(value: Any) -> bool:
    fits = isinstance(value, list) and [type(part) for part in value] == [str, bytes, bytes]
    return fits and len(value[2]) > 0


def _is_file(name: Any, entry: Any) -> bool:
    fits = isinstance(name, str) and isinstance(entry, list) and len(entry) == 2
    return fits and isinstance(entry[0], bytes) and len(entry[0]) == 32 and _is_int(entry[1])


_SCALARS: dict[str, Callable[[Any], bool]] = {
    "int": _is_int,
    "bool": lambda value: isinstance(value, bool),
    "bin": lambda value: isinstance(value, bytes),
    "bin16": lambda value: isinstance(value, bytes) and len(value) == 16,
    "bin32": lambda value: isinstance(value, bytes) and len(value) == 32,
    "texts": lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    "signature": _is_signature,
    "map": lambda value: isinstance(value, dict) and all(isinstance(key, str) for key in value),
    "files": lambda value: isinstance(value, dict) and all(_is_file(k, v) for k, v in value.items()),
}
