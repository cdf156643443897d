"""Metadata objects and shards as plain data and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from deltafmt.cli.hexdump import LINE_BYTES, hex_lines
from deltafmt.cli.output import Output, table
from deltafmt.cli.targets import Target
from deltafmt.errors import FormatError
from deltafmt.format.body import parse
from deltafmt.format.constants import (
    CODECS,
    COLUMNS,
    ENVELOPE_BYTES,
    OBJECT_MAGIC,
    OPERATIONS,
    SHARD_MAGIC,
    TRAILER_BYTES,
)
from deltafmt.format.envelope import unseal
from deltafmt.format.objects import parse_footer
from deltafmt.format.records import RECORDS, Footer, Table, described
from deltafmt.format.shard import footer_offset
from deltafmt.store import Range, Store

_NAMES: dict[str, dict[int, str]] = {"operation": OPERATIONS, "column": COLUMNS, "codec": CODECS}
"""Columns of tables whose numbers have names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The object that is dumped, and the store that it lies in."""

    store: Store
    target: Target

    @property
    def key(self) -> str:
        return self.target.key

    def head(self) -> bytes:
        """The object's first 8 bytes, or all that it has."""
        return self.part(0, min(8, self.size()))

    def size(self) -> int:
        return self.store.size(self.key)

    def part(self, start: int, stop: int, key: str | None = None) -> bytes:
        """Bytes `[start, stop)` of the object, or of another one of the same store."""
        (data,) = self.store.read_ranges([Range(key or self.key, start, stop)])
        return bytes(data)


def dump(source: Source, out: Output, limit: int | None) -> None:
    """Print fields and tables of a metadata object or of a shard; any other object as hex."""
    magic = source.head()
    if magic == SHARD_MAGIC:
        out.give(_shard(source, limit), lambda data: _render(data, limit))
    elif magic == OBJECT_MAGIC:
        out.give(_object(source, limit), lambda data: _render(data, limit))
    elif source.key.endswith((".dfm", ".dfs")):
        raise FormatError(
            "neither a metadata object nor a shard (look with --hex)",
            kind="magic-wrong",
            where=source.key,
            found=magic.hex(),
        )
    else:
        dump_hex(source, out, limit)


def dump_hex(source: Source, out: Output, limit: int | None) -> None:
    """Print the object's bytes; `limit` counts lines."""
    size = source.size()
    wanted = size if limit is None else min(size, limit * LINE_BYTES)
    data = source.part(0, wanted)
    result = {"key": source.key, "bytes": size, "hex": data.hex()}
    out.give(result, lambda _: _hex_text(source.key, data, size))


def _hex_text(key: str, data: bytes, size: int) -> Iterator[str]:
    yield f"{key}  {size:,} bytes"
    yield from hex_lines(data)
    if len(data) < size:
        yield f"... {size - len(data):,} more bytes (--all shows them)"


def read_shard_footer(source: Source, key: str | None = None) -> tuple[Footer, int, int]:
    """(footer, its first byte, the shard's size), read without the chunks."""
    name = key or source.key
    size = source.store.size(name)
    trailer = source.part(max(0, size - TRAILER_BYTES), size, name)
    offset = footer_offset(trailer, size, where=name)
    footer = parse_footer(source.part(offset, size - TRAILER_BYTES, name), where=f"{name}, footer")
    return footer, offset, size


def _shard(source: Source, limit: int | None) -> dict[str, Any]:
    footer, offset, size = read_shard_footer(source)
    frame = {"key": source.key, "bytes": size, "kind": "shard", "footer_offset": offset}
    return frame | {"fields": _fields(footer, limit)}


def _object(source: Source, limit: int | None) -> dict[str, Any]:
    data = source.store.read(source.key)
    body = unseal(data, kind=None, where=source.key, limit=len(data))
    kind = body["kind"]
    frame = {"key": source.key, "bytes": len(data), "kind": kind, "body_bytes": len(data) - ENVELOPE_BYTES}
    if kind not in RECORDS:
        return frame | {"fields": body}
    record = parse(data, kind, where=source.key, limit=len(data))
    known = {name for name, _, _ in described(RECORDS[kind])} | {"kind", "required"}
    unknown = {name: value for name, value in body.items() if name not in known}
    return frame | {"fields": _fields(record, limit) | unknown}


def _fields(record: Any, limit: int | None) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, wire, _ in described(type(record)):
        value = getattr(record, name)
        if isinstance(value, Table):
            result[name] = _table(value, limit)
        elif wire == "column u1":
            result[name] = bytes(value).decode(errors="replace")
        elif isinstance(value, np.ndarray):
            result[name] = value.tolist() if limit is None else value[:limit].tolist()
        elif name == "files":
            result[name] = {
                file: {"digest": digest.hex(), "bytes": size} for file, (digest, size) in value.items()
            }
        elif name == "signature" and value is not None:
            result[name] = [value[0], value[1].hex(), value[2].hex()]
        else:
            result[name] = value.hex() if isinstance(value, bytes) else value
    return result


def _table(value: Table, limit: int | None) -> dict[str, Any]:
    shown = value if limit is None else value.take(slice(0, limit))
    columns = {}
    for name, _ in value.column_types():
        cells = getattr(shown, name).tolist()
        names = _NAMES.get(name, {})
        columns[name] = [names.get(cell, cell) for cell in cells]
    return {"rows": len(value), "columns": columns}


def _render(data: dict[str, Any], limit: int | None) -> Iterator[str]:
    yield f"{data['key']}  {data['kind']}, {data['bytes']:,} bytes"
    if "footer_offset" in data:
        yield f"footer at byte {data['footer_offset']:,}"
    for name, value in data["fields"].items():
        if isinstance(value, dict) and set(value) == {"rows", "columns"}:
            yield from _render_table(name, value)
        else:
            yield f"{name}: {_short(value, limit)}"


def _render_table(name: str, value: dict[str, Any]) -> Iterator[str]:
    columns, rows = value["columns"], value["rows"]
    shown = len(next(iter(columns.values())))
    yield f"{name}: {rows:,} rows"
    if shown:
        cells = zip(range(shown), *columns.values(), strict=True)
        lines = table(("row", *columns), [[_cell(cell) for cell in row] for row in cells])
        yield from (f"  {line}" for line in lines)
    if shown < rows:
        yield f"  ... {rows - shown:,} more rows (--all shows them)"


def _cell(value: Any) -> str:
    # Digests and checksums do not fit a narrow table as decimals.
    return f"{value:016x}" if isinstance(value, int) and value >= 2**40 else str(value)


def _short(value: Any, limit: int | None) -> str:
    text = str(value)
    longest = 480
    return text if limit is None or len(text) <= longest else f"{text[:longest]} ... (--all shows the rest)"
