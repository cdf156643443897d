"""Whether a manifest or footer makes sense against its schema and tiling: every rule, over whole columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deltafmt.errors import FormatError
from deltafmt.format.checksum import DIGEST_BYTES
from deltafmt.format.column_rules import check_column_table, check_columns_fit
from deltafmt.format.constants import (
    DENSE,
    MAX_BLOCK_LOG2,
    MAX_SHIFT,
    MAX_VERSION,
    MAX_WRITERS,
    MIN_BLOCK_LOG2,
    SET,
    SHARD_MAGIC,
    STEP,
)
from deltafmt.format.records import ChunkTable, ColumnTable, DomainTable, Manifest, ShardTable
from deltafmt.schema import Schema
from deltafmt.tiling import Tiling


def check_manifest(manifest: Manifest, schema: Schema, tiling: Tiling, *, where: object) -> None:
    """Raise `FormatError` by reason unless the manifest obeys every rule that needs no chunk's bytes."""
    _check_head(manifest, where)
    _check_shards(manifest.shards, manifest.writers, where)
    _check_chunks(manifest.chunks, tiling, where)
    columns = f"{where}, columns"
    check_column_table(manifest.chunks, manifest.columns, where=columns)
    _check_chunk_digests(manifest, where)
    _check_places(manifest, where)
    _check_domains(manifest.domains, len(tiling), where)
    if len(manifest.tensors) != len(schema):
        raise FormatError(
            "digests of another number of tensors",
            kind="digest-rows",
            where=where,
            expected=len(schema),
            found=len(manifest.tensors),
        )
    known = np.zeros(len(tiling), bool)
    known[manifest.domains.domain] = True
    _refuse(~known[manifest.chunks.domain], "chunk without a digest of its domain", "digest-rows", where)
    _check_untouched(manifest, len(tiling), where)
    if manifest.base is None:
        _check_anchor(manifest, len(tiling), where)
    elif not manifest.data:
        raise FormatError("delta without data", kind="anchor-incomplete", where=where)
    total = int(tiling.volume.sum())
    listed = int(manifest.chunks.listed.sum(dtype=np.int64))
    if manifest.listed != listed or not 0 <= (manifest.changed or 0) <= total:
        raise FormatError(
            "statistics disagree with the chunks",
            kind="statistics",
            where=where,
            expected=listed,
            found=manifest.listed,
        )
    check_columns_fit(manifest.chunks, manifest.columns, tiling, where=columns)


def chunk_bytes(chunks: ChunkTable, columns: ColumnTable) -> npt.NDArray[np.int64]:
    """Stored bytes of each chunk."""
    before = np.concatenate(([0], np.cumsum(columns.stored.astype(np.int64))))
    ends = np.cumsum(chunks.columns.astype(np.int64))
    return before[ends] - before[ends - chunks.columns]


def _check_head(manifest: Manifest, where: object) -> None:
    if manifest.version >= MAX_VERSION or not 1 <= manifest.writers <= MAX_WRITERS:
        raise FormatError("version or number of writers is out of range", kind="index-range", where=where)
    if (manifest.base is None) != (manifest.base_digest is None):
        raise FormatError("base and base digest go together", kind="base-digest", where=where)
    if manifest.base is not None and manifest.base >= manifest.version:
        raise FormatError(
            "base is not older than the version",
            kind="base-order",
            where=where,
            expected=f"a base below {manifest.version}",
            found=manifest.base,
        )


def _check_shards(shards: ShardTable, writers: int, where: object) -> None:
    writer = shards.writer.astype(np.int64)
    _refuse(writer >= writers, "shard of an unknown writer", "index-range", where)
    _refuse(np.diff(writer) <= 0, "shards are not in order", "shard-order", where)
    _refuse(shards.size >= 2**62, "shard size is out of range", "index-range", where)


def _check_chunks(chunks: ChunkTable, tiling: Tiling, where: object) -> None:
    domain, operation = chunks.domain.astype(np.int64), chunks.operation.astype(np.int64)
    _refuse(domain >= len(tiling), "chunk of a domain that the tiling lacks", "index-range", where)
    _refuse((operation < SET) | (operation > DENSE), "unknown operation", "operation-unknown", where)
    _refuse(chunks.order > 1, "unknown order of bit patterns", "order-unknown", where)
    _refuse(chunks.width != tiling.widths[domain], "chunk of another element width", "width-mismatch", where)
    _refuse(np.diff(domain * 4 + operation) <= 0, "chunks are not in order", "chunk-order", where)
    same = np.diff(domain) == 0
    pair = (operation[:-1] == SET) & (operation[1:] == STEP)
    _refuse(same & ~pair, "domain covered by two chunks that exclude each other", "chunk-overlap", where)
    volume, listed = tiling.volume[domain], chunks.listed.astype(np.int64)
    dense = operation == DENSE
    _refuse((listed < 1) | (listed > volume), "impossible number of elements", "chunk-listed", where)
    _refuse(dense & (listed != volume), "dense chunk that is not complete", "chunk-listed", where)
    together = same & (listed[:-1] + listed[1:] > volume[:-1]) if len(listed) else same
    _refuse(together, "chunks of a domain list more elements than it has", "chunk-listed", where)
    odd = (chunks.shift > MAX_SHIFT) | (chunks.block < MIN_BLOCK_LOG2) | (chunks.block > MAX_BLOCK_LOG2)
    _refuse(~dense & odd, "shift or block size is out of range", "chunk-coding", where)
    _refuse(
        dense & ((chunks.shift != 0) | (chunks.block != 0)),
        "dense chunk with positions",
        "chunk-coding",
        where,
    )


def _check_places(manifest: Manifest, where: object) -> None:
    chunks = manifest.chunks
    _refuse(chunks.shard >= max(1, len(manifest.shards)), "chunk in an unknown shard", "index-range", where)
    if len(chunks) and not len(manifest.shards):
        raise FormatError("chunks without shards", kind="index-range", where=where)
    order = np.lexsort((chunks.offset, chunks.shard))
    shard, start = chunks.shard[order], chunks.offset[order]
    _refuse(start >= 2**62, "chunk offset is out of range", "chunk-place", where)
    stop = start.astype(np.int64) + chunk_bytes(chunks, manifest.columns)[order]
    outside = (start < len(SHARD_MAGIC)) | (stop > manifest.shards.size.astype(np.int64)[shard])
    _refuse(outside, "chunk lies outside its shard", "chunk-place", where)
    clash = (shard[1:] == shard[:-1]) & (start[1:].astype(np.int64) < stop[:-1])
    _refuse(clash, "chunks share bytes", "chunk-place", where)


def _check_domains(domains: DomainTable, count: int, where: object) -> None:
    domain = domains.domain.astype(np.int64)
    _refuse(domain >= count, "digest of a domain that the tiling lacks", "index-range", where)
    _refuse(np.diff(domain) <= 0, "digests are not in order", "digest-rows", where)
    unknown = domains.base_known == 0
    odd = (domains.base_known > 1) | (unknown & ((domains.base0 != 0) | (domains.base1 != 0)))
    _refuse(odd, "base digest that is neither given nor zero", "digest-rows", where)


def _check_chunk_digests(manifest: Manifest, where: object) -> None:
    found = manifest.chunk_digests
    if found is not None and len(found) != DIGEST_BYTES * len(manifest.chunks):
        raise FormatError(
            "digests of another number of chunks",
            kind="column-length",
            where=where,
            expected=DIGEST_BYTES * len(manifest.chunks),
            found=len(found),
        )


def _check_untouched(manifest: Manifest, count: int, where: object) -> None:
    """A domain without a chunk keeps its content, so that its digest is its base's."""
    domains = manifest.domains
    touched = np.zeros(count, bool)
    touched[manifest.chunks.domain] = True
    moved = (domains.digest0 != domains.base0) | (domains.digest1 != domains.base1)
    odd = ~touched[domains.domain] & (domains.base_known == 1) & moved
    _refuse(odd, "domain without a chunk changes its digest", "content-mismatch", where)


def _check_anchor(manifest: Manifest, domains: int, where: object) -> None:
    _refuse(manifest.chunks.operation != DENSE, "anchor with a delta chunk", "anchor-chunk", where)
    _refuse(manifest.domains.base_known != 0, "anchor with a base digest", "digest-rows", where)
    if len(manifest.domains) != domains:
        raise FormatError(
            "anchor without a digest of every domain",
            kind="digest-rows",
            where=where,
            expected=domains,
            found=len(manifest.domains),
        )
    expected = domains if manifest.data else 0
    if len(manifest.chunks) != expected:
        raise FormatError(
            "anchor is not complete",
            kind="anchor-incomplete",
            where=where,
            expected=expected,
            found=len(manifest.chunks),
        )


def _refuse(bad: npt.NDArray[Any], message: str, kind: str, where: object) -> None:
    if bad.any():
        raise FormatError(message, kind=kind, where=f"{where}, row {int(bad.argmax())}")
