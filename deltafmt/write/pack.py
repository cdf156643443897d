"""Encoded domains into a shard, and the tables that a manifest and a footer hold of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from deltafmt.format.checksum import blake2b
from deltafmt.format.chunk import PackedChunk
from deltafmt.format.constants import SHARD_MAGIC
from deltafmt.format.records import ChunkTable, ColumnTable, DomainTable, Footer
from deltafmt.format.shard import shard_tail
from deltafmt.kernels.digest import Digest
from deltafmt.store import Sink, Store
from deltafmt.write.cut import Bits

T = TypeVar("T")
R = TypeVar("R")

KEPT_BYTES = 64 << 20
"""Stored chunks that are kept in memory until the commit; beyond that they are read back."""
CHANGES_BYTES = 64 << 20
"""Detected changes that are kept until the commit; beyond that they are decoded from the chunks again."""

Changes = tuple[npt.NDArray[np.uint32], Bits]


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainResult:
    """One domain, detected and encoded.

    `listed` says whether the manifest gives its digests; `changes` are the positions and new bits of what
    changed, None where all bits were taken.
    """

    domain: int
    chunk: PackedChunk | None
    changed: int
    moved: dict[int, Digest]
    result: Digest
    base: Digest | None
    listed: bool
    changes: Changes | None


@dataclass(slots=True, kw_only=True)
class WayParts:
    """What a finished shard (of `size` bytes; 0: not written) contributes to a manifest, and what brings a
    copy of the base to the result.

    `digests` are those of the domains asked for. The copy is brought on by `changes`, by domain, or else by
    `kept`, the chunks; either is None where it was too much to keep.
    """

    size: int
    chunks: ChunkTable
    columns: ColumnTable
    domains: DomainTable
    chunk_digests: bytes | None
    digests: dict[int, Digest]
    moved: npt.NDArray[np.uint64]
    changed: int
    listed: int
    changes: dict[int, Changes] | None
    kept: list[PackedChunk] | None


def in_order(work: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """Results of `work` in the items' order, by worker threads, few items ahead of the consumer."""
    if threads <= 1:
        yield from map(work, items)
        return
    pending: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads, "deltafmt-write") as pool:
        try:
            for item in items:
                pending.append(pool.submit(work, item))
                if len(pending) > threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


@dataclass(kw_only=True)
class ShardWriter:
    """Writes chunks one behind another as they come; opens nothing before the first one.

    `digests`, a list or None, collects the BLAKE2b-256 of each chunk.
    """

    store: Store
    key: str
    digests: list[bytes] | None = None
    offset: int = 0
    _sink: Sink | None = None
    _chunks: list[tuple[int, ...]] = field(default_factory=list)
    _columns: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, chunk: PackedChunk) -> None:
        if self._sink is None:
            self._sink = self.store.open_sink(self.key)
            self._write(SHARD_MAGIC)
        head = chunk.head
        row = (0, head.domain, head.operation, head.order, head.width, head.shift, head.block, head.listed)
        self._chunks.append((*row, self.offset, len(chunk.columns)))
        self._columns += chunk.columns
        for buffer in chunk.buffers:
            self._write(buffer)
        if self.digests is not None:
            self.digests.append(blake2b(*chunk.buffers))

    def tables(self) -> tuple[ChunkTable, ColumnTable]:
        return ChunkTable.of_rows(self._chunks), ColumnTable.of_rows(self._columns)

    def finish(self, footer: Footer) -> int:
        """Write footer and trailer, flush; returns the shard's size."""
        assert self._sink is not None, "a shard without chunks is not written"
        self._write(shard_tail(footer, self.offset))
        self._sink.close()
        self._sink = None
        return self.offset

    @property
    def empty(self) -> bool:
        return not self._chunks

    def abort(self) -> None:
        """Remove what was written, unless it was finished."""
        if self._sink is not None:
            self._sink.abort()
            self._sink = None

    def _write(self, data: bytes) -> None:
        assert self._sink is not None
        self._sink.write(data)
        self.offset += len(data)


def bounded(results: Iterable[DomainResult]) -> Iterator[DomainResult]:
    """The results, without their changes once these take more than `CHANGES_BYTES`."""
    total = 0
    for result in results:
        total += sum(part.nbytes for part in result.changes or ())
        yield result if total <= CHANGES_BYTES else replace(result, changes=None)


def pack(
    results: Iterable[DomainResult],
    shard: ShardWriter,
    tensors: int,
    make_footer: Callable[..., Footer],
    *,
    keep: bool,
    shared: Container[int] = (),
) -> WayParts:
    """Write the results (ascending by domain) to a shard; nothing is left behind if that fails.

    `make_footer` completes a footer from tables and statistics. Without `keep` neither chunks nor changes
    are kept. `shared` domains have their digests in `digests`.
    """
    digests: dict[int, Digest] = {}
    rows: list[tuple[int, ...]] = []
    moved = np.zeros((tensors, 2), np.uint64)
    changed = listed = kept_bytes = 0
    kept: list[PackedChunk] | None = [] if keep else None
    changes: dict[int, Changes] | None = {} if keep else None
    try:
        for result in results:
            for tensor, digest in result.moved.items():
                moved[tensor] += digest
            changed += result.changed
            if result.domain in shared:
                digests[result.domain] = result.result
            if result.listed:
                rows.append(_domain_row(result))
            if result.chunk is None:
                continue
            shard.add(result.chunk)
            listed += result.chunk.head.listed
            kept_bytes += result.chunk.nbytes
            kept = _keep(kept, result.chunk, kept_bytes)
            changes = _keep_changes(changes, result, changed)
        chunks, columns = shard.tables()
        domains: DomainTable = DomainTable.of_rows(rows)
        tables: dict[str, Any] = {"chunks": chunks, "columns": columns, "domains": domains}
        size = 0
        if not shard.empty:
            size = shard.finish(make_footer(changed=changed, listed=listed, **tables))
    except BaseException:
        shard.abort()
        raise
    return WayParts(
        size=size,
        chunk_digests=None if shard.digests is None else b"".join(shard.digests),
        digests=digests,
        moved=moved,
        changed=changed,
        listed=listed,
        changes=changes,
        kept=kept,
        **tables,
    )


def _keep(kept: list[PackedChunk] | None, chunk: PackedChunk, total: int) -> list[PackedChunk] | None:
    if kept is None or total > KEPT_BYTES:
        return None
    kept.append(chunk)
    return kept


def _keep_changes(
    changes: dict[int, Changes] | None, result: DomainResult, total: int
) -> dict[int, Changes] | None:
    if changes is None or result.changes is None:
        return None
    positions, new = result.changes
    if total * (positions.itemsize + new.itemsize) > CHANGES_BYTES:
        return None
    changes[result.domain] = result.changes
    return changes


def _domain_row(result: DomainResult) -> tuple[int, ...]:
    base = (0, 0, 0) if result.base is None else (int(result.base[0]), int(result.base[1]), 1)
    return (result.domain, int(result.result[0]), int(result.result[1]), *base)
