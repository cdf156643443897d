"""Which bytes of a way a receiver needs: its touched domains, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltafmt.format import keys
from deltafmt.format.chunk import ChunkHead, ColumnHead
from deltafmt.format.records import Manifest
from deltafmt.format.validate import chunk_bytes
from deltafmt.segments import SegmentTable
from deltafmt.store import Range

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LinkPlan:
    """The chunks of one way that a receiver reads, in the order of their places in the shards.

    `rows` are rows of the manifest's chunk table, `ranges` the bytes of each, `first_column` the row of
    its first column.
    """

    manifest: Manifest
    rows: Ints
    ranges: tuple[Range, ...]
    first_column: Ints

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.ranges)

    @property
    def listed(self) -> int:
        """Elements that the chunks list."""
        return int(self.manifest.chunks.listed[self.rows].sum(dtype=np.int64))


def plan_link(manifest: Manifest, segments: SegmentTable) -> LinkPlan:
    """Choose the chunks of the domains that are held here; pure."""
    chunks = manifest.chunks
    rows = np.flatnonzero(segments.touched[chunks.domain])
    order = np.lexsort((chunks.offset[rows], chunks.shard[rows]))
    rows = rows[order]
    starts = chunks.offset[rows].astype(np.int64)
    stops = starts + chunk_bytes(chunks, manifest.columns)[rows]
    names = [
        keys.shard_key(
            version=manifest.version,
            base=manifest.base,
            attempt=manifest.attempt,
            writer=writer,
            further=manifest.is_way,
        )
        for writer in manifest.shards.writer.tolist()
    ]
    shards = chunks.shard[rows].tolist()
    ranges = tuple(
        Range(names[shard], start, stop)
        for shard, start, stop in zip(shards, starts.tolist(), stops.tolist(), strict=True)
    )
    before = np.concatenate(([0], np.cumsum(chunks.columns.astype(np.int64))))
    return LinkPlan(manifest=manifest, rows=rows, ranges=ranges, first_column=before[rows])


def chunk_head(manifest: Manifest, row: int) -> ChunkHead:
    """One row of the chunk table."""
    chunks = manifest.chunks
    return ChunkHead(
        domain=int(chunks.domain[row]),
        operation=int(chunks.operation[row]),
        order=int(chunks.order[row]),
        width=int(chunks.width[row]),
        shift=int(chunks.shift[row]),
        block=int(chunks.block[row]),
        listed=int(chunks.listed[row]),
    )


def column_heads(manifest: Manifest, row: int, first_column: int) -> tuple[ColumnHead, ...]:
    """The column rows of one chunk."""
    columns = manifest.columns
    return tuple(
        ColumnHead(
            column=int(columns.column[k]),
            codec=int(columns.codec[k]),
            stored=int(columns.stored[k]),
            raw=int(columns.raw[k]),
            crc=int(columns.crc[k]),
        )
        for k in range(first_column, first_column + int(manifest.chunks.columns[row]))
    )
