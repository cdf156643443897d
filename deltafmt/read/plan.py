"""Which bytes of a way a receiver needs: its touched domains, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from deltafmt.errors import ChecksumError
from deltafmt.format.checksum import DIGEST_BYTES
from deltafmt.format.chunk import ChunkHead, ColumnHead
from deltafmt.format.constants import DENSE
from deltafmt.format.records import Manifest
from deltafmt.format.validate import chunk_bytes
from deltafmt.segments import SegmentTable
from deltafmt.store import Range

Ints = npt.NDArray[np.int64]

_POSITION_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class LinkPlan:
    """The chunks of one way that a receiver reads, in the order of their places in the shards.

    `rows` are rows of the manifest's chunk table; chunk `rows[k]` is the bytes `[starts[k], stops[k])` of
    its shard, and its columns begin in row `first_column[k]` of the column table.
    """

    manifest: Manifest
    rows: Ints
    starts: Ints
    stops: Ints
    first_column: Ints

    def without(self, domains: Collection[int]) -> LinkPlan:
        """The plan for the other domains."""
        if not domains:
            return self
        left = ~np.isin(self.manifest.chunks.domain[self.rows], list(domains))
        return replace(
            self,
            rows=self.rows[left],
            starts=self.starts[left],
            stops=self.stops[left],
            first_column=self.first_column[left],
        )

    @property
    def nbytes(self) -> int:
        """Stored bytes that are read."""
        return int((self.stops - self.starts).sum())

    @property
    def undo_bytes(self) -> int:
        """What the log of old bits may take at most."""
        chunks = self.manifest.chunks
        each = chunks.width[self.rows] + np.where(chunks.operation[self.rows] == DENSE, 0, _POSITION_BYTES)
        return int((chunks.listed[self.rows].astype(np.int64) * each).sum())

    @property
    def ranges(self) -> list[Range]:
        """Bytes of each chunk; the store joins neighbours."""
        shards = self.manifest.shard_keys
        numbers = self.manifest.chunks.shard[self.rows].tolist()
        places = zip(numbers, self.starts.tolist(), self.stops.tolist(), strict=True)
        return [Range(shards[number], start, stop) for number, start, stop in places]

    @property
    def chunk_digests(self) -> list[bytes]:
        """BLAKE2b-256 of each chunk's bytes; `ChecksumError` (`signature-missing`) if there are none."""
        found = self.manifest.chunk_digests
        if found is None and len(self.rows):
            raise ChecksumError(
                "digests of chunks are demanded, and the manifest has none",
                kind="signature-missing",
                where=f"version {self.manifest.version}",
            )
        starts = (DIGEST_BYTES * self.rows).tolist()
        return [] if found is None else [found[start : start + DIGEST_BYTES] for start in starts]

    def take(self, part: npt.NDArray[Any]) -> LinkPlan:
        """Some of the chunks, given by their numbers or by a mask."""
        rows, starts, stops, first = (
            column[part] for column in (self.rows, self.starts, self.stops, self.first_column)
        )
        return replace(self, rows=rows, starts=starts, stops=stops, first_column=first)

    def heads(self) -> Iterator[tuple[ChunkHead, tuple[ColumnHead, ...]]]:
        """Chunk and column rows of each chunk, in order."""
        chunks, columns = self.manifest.chunks.take(self.rows), self.manifest.columns
        fields = ("domain", "operation", "order", "width", "shift", "block", "listed")
        chunk_rows = zip(*(getattr(chunks, name).tolist() for name in fields), strict=True)
        # Taken as lists once: reading single elements out of arrays costs more than decoding some chunks.
        picked = _picked(self.first_column, chunks.columns.astype(np.int64))
        lists = [getattr(columns, name)[picked].tolist() for name, _ in columns.column_types()]
        column_rows = map(ColumnHead._make, zip(*lists, strict=True))
        for row, count in zip(chunk_rows, chunks.columns.tolist(), strict=True):
            head = ChunkHead(**dict(zip(fields, row, strict=True)))
            yield head, tuple(itertools.islice(column_rows, count))


def plan_link(manifest: Manifest, segments: SegmentTable) -> LinkPlan:
    """Choose the chunks of the domains that are held here; pure."""
    return plan_rows(manifest, np.flatnonzero(segments.touched[manifest.chunks.domain]))


def plan_rows(manifest: Manifest, rows: Ints) -> LinkPlan:
    """The given rows of the chunk table; pure."""
    chunks = manifest.chunks
    rows = rows[np.lexsort((chunks.offset[rows], chunks.shard[rows]))]
    starts = chunks.offset[rows].astype(np.int64)
    before = np.concatenate(([0], np.cumsum(chunks.columns.astype(np.int64))))
    return LinkPlan(
        manifest=manifest,
        rows=rows,
        starts=starts,
        stops=starts + chunk_bytes(chunks, manifest.columns)[rows],
        first_column=before[rows],
    )


def _picked(first: Ints, counts: Ints) -> Ints:
    """Rows `first[k] .. first[k] + counts[k]` of all k, one behind another."""
    return np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
