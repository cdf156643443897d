"""One chunk of a shard or manifest: its columns, their checksums, their bytes, its first elements."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltafmt.cli.dump_elements import element_lines, elements
from deltafmt.cli.dump_object import Source, read_shard_footer
from deltafmt.cli.failures import UsageError
from deltafmt.cli.hexdump import LINE_BYTES, hex_lines
from deltafmt.cli.output import Output, table
from deltafmt.errors import ChecksumError, DeltafmtError, FormatError, NotFoundError
from deltafmt.format.checksum import crc32c
from deltafmt.format.chunk import ChunkHead, ColumnHead
from deltafmt.format.codec import decompress
from deltafmt.format.constants import CODECS, COLUMNS, OPERATIONS, SHARD_MAGIC
from deltafmt.format.objects import parse_manifest
from deltafmt.format.records import Footer, Manifest

MOST_RAW_BYTES = 512 << 20
"""A column that announces more is shown as stored; dumping must not exhaust memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One stored column of the chunk. `raw` is None where `problem` says why it cannot be decoded."""

    name: str
    number: int
    codec: int
    offset: int
    stored: bytes
    raw_bytes: int
    crc: int
    raw: npt.NDArray[np.uint8] | None
    problem: DeltafmtError | None


def dump(source: Source, options: argparse.Namespace, out: Output, limit: int | None) -> None:
    """Print the chunk that `options.chunk` names, or with `options.column` one of its columns.

    Raises the first problem found, after everything that can be shown has been.
    """
    record = _record(source)
    row = options.chunk
    if not 0 <= row < len(record.chunks):
        raise UsageError(f"there is no chunk {row}", f"chunks are numbered 0 to {len(record.chunks) - 1}")
    key = source.key if isinstance(record, Footer) else _shard_of(record, row)
    columns = list(_columns(source, record, row, key))
    if options.column is None:
        result = _chunk(record, row, key, columns)
        sound = all(column.problem is None and column.raw is not None for column in columns)
        if sound and source.target.in_lineage:
            most = result["listed"] if limit is None else limit
            result["elements"] = _elements(source, record, row, columns, most)
        out.give(result, _render)
    else:
        _dump_column(_pick(columns, options.column), options, out, limit)
    for column in columns:
        if column.problem is not None and options.column in (None, column.name):
            raise column.problem


def _elements(
    source: Source, record: Manifest | Footer, row: int, columns: list[Column], most: int
) -> list[dict[str, Any]] | None:
    """The first elements; None where schema or tiling are not to be had."""
    names = ("domain", "operation", "order", "width", "shift", "block", "listed")
    head = ChunkHead(**{name: int(getattr(record.chunks, name)[row]) for name in names})
    heads = tuple(
        ColumnHead(
            column=column.number,
            codec=column.codec,
            stored=len(column.stored),
            raw=column.raw_bytes,
            crc=column.crc,
        )
        for column in columns
    )
    data = b"".join(column.stored for column in columns)
    try:
        return elements(source, record, head, heads, data, most)
    except NotFoundError:
        return None


def _record(source: Source) -> Manifest | Footer:
    if source.head() == SHARD_MAGIC:
        footer, _, _ = read_shard_footer(source)
        return footer
    if not source.key.startswith(("versions/", "ways/")):
        raise UsageError(
            f"{source.key} has no chunks", "name a shard (.dfs), versions/....dfm or ways/....dfm"
        )
    return parse_manifest(source.store.read(source.key), way=source.key.startswith("ways/"), where=source.key)


def _shard_of(manifest: Manifest, row: int) -> str:
    shard = int(manifest.chunks.shard[row])
    if shard >= len(manifest.shards):
        raise FormatError("chunk of a shard that is not listed", kind="index-range", where=f"chunk {row}")
    return manifest.shard_keys[shard]


def _columns(source: Source, record: Manifest | Footer, row: int, key: str) -> Iterator[Column]:
    chunks, columns = record.chunks, record.columns
    first = int(chunks.columns[:row].astype(np.int64).sum())
    offset = int(chunks.offset[row])
    for index in range(first, first + int(chunks.columns[row])):
        size, raw_bytes = int(columns.stored[index]), int(columns.raw[index])
        number, codec, crc = (int(getattr(columns, name)[index]) for name in ("column", "codec", "crc"))
        name = COLUMNS.get(number, str(number))
        stored = source.part(offset, offset + size, key)
        raw, problem = _decoded(stored, codec, raw_bytes, crc, f"{key}, chunk {row}, column {name}")
        yield Column(
            name=name,
            number=number,
            codec=codec,
            offset=offset,
            stored=stored,
            raw_bytes=raw_bytes,
            crc=crc,
            raw=raw,
            problem=problem,
        )
        offset += size


def _decoded(
    stored: bytes, codec: int, raw_bytes: int, crc: int, where: str
) -> tuple[npt.NDArray[np.uint8] | None, DeltafmtError | None]:
    if (found := crc32c(stored)) != crc:
        return None, ChecksumError(
            "column does not match its CRC32C",
            kind="crc-mismatch",
            where=where,
            expected=f"{crc:08x}",
            found=f"{found:08x}",
        )
    if raw_bytes > MOST_RAW_BYTES:
        return None, None
    try:
        return decompress(codec, memoryview(stored), raw_bytes, where=where), None
    except DeltafmtError as error:
        return None, error


def _pick(columns: list[Column], name: str) -> Column:
    for column in columns:
        if column.name == name:
            return column
    raise NotFoundError(
        "the chunk has no such column",
        kind="name-unknown",
        where=name,
        expected=", ".join(column.name for column in columns),
    )


def _chunk(record: Manifest | Footer, row: int, key: str, columns: list[Column]) -> dict[str, Any]:
    chunks = record.chunks
    operation = int(chunks.operation[row])
    return {
        "shard": key,
        "chunk": row,
        "domain": int(chunks.domain[row]),
        "operation": OPERATIONS.get(operation, operation),
        "order": int(chunks.order[row]),
        "width": int(chunks.width[row]),
        "shift": int(chunks.shift[row]),
        "block": int(chunks.block[row]),
        "listed": int(chunks.listed[row]),
        "columns": [
            {
                "column": column.name,
                "codec": CODECS.get(column.codec, column.codec),
                "offset": column.offset,
                "stored_bytes": len(column.stored),
                "raw_bytes": column.raw_bytes,
                "crc": f"{column.crc:08x}",
                "problem": None if column.problem is None else str(column.problem),
            }
            for column in columns
        ],
    }


def _render(data: dict[str, Any]) -> Iterator[str]:
    yield f"chunk {data['chunk']} of {data['shard']}"
    yield "  " + ", ".join(
        f"{name} {data[name]}"
        for name in ("domain", "operation", "order", "width", "shift", "block", "listed")
    )
    yield from table(
        ("column", "codec", "offset", "stored", "raw", "crc", "state"),
        (
            (
                column["column"],
                str(column["codec"]),
                str(column["offset"]),
                str(column["stored_bytes"]),
                str(column["raw_bytes"]),
                column["crc"],
                "damaged" if column["problem"] else "ok",
            )
            for column in data["columns"]
        ),
        left=["column", "codec", "state"],
    )
    if data.get("elements"):
        yield ""
        yield from element_lines(data["elements"], data["listed"])


def _dump_column(column: Column, options: argparse.Namespace, out: Output, limit: int | None) -> None:
    as_stored = options.stored or column.raw is None
    data = column.stored if column.raw is None or options.stored else column.raw.tobytes()
    most = None if limit is None else limit * LINE_BYTES
    result = {
        "column": column.name,
        "as": "stored" if as_stored else "decoded",
        "bytes": len(data),
        "hex": (data if most is None else data[:most]).hex(),
    }

    def render(facts: dict[str, Any]) -> Iterator[str]:
        yield f"column {column.name}, {facts['as']}: {facts['bytes']:,} bytes"
        if options.hex:
            yield from hex_lines(data, start=column.offset if as_stored else 0, limit=most)
        else:
            shown = data if most is None else data[:most]
            yield " ".join(map(str, shown)) + (" ..." if len(shown) < len(data) else "")

    out.give(result, render)
