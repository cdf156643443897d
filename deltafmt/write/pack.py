"""Encoded domains into a shard, and the tables that a manifest and a footer hold of it."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import Future
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
from deltafmt.threads import pool_of
from deltafmt.write.cut import Bits

R = TypeVar("R")

CHANGES_BYTES = 32 << 20
"""Detected changes that are kept until the commit; of the domains beyond that, the chunks are."""
KEPT_BYTES = 16 << 20
"""Chunks that are kept until the commit; beyond that they are read back."""
LARGE_BYTES = 96 << 20
"""What large chunks may take while they are made and until they are written."""

Changes = tuple[npt.NDArray[np.uint32], Bits]


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainResult:
    """One domain, detected and encoded.

    `chunks` ascend by operation. `changed` is None where the old bits are not known. `listed` says whether
    the manifest gives the digests; `changes` are the positions and new bits of what changed, None where all
    bits were taken.
    """

    domain: int
    chunks: tuple[PackedChunk, ...]
    changed: int | None
    moved: dict[int, Digest]
    result: Digest
    base: Digest | None
    listed: bool
    changes: Changes | None


class Kept:
    """What brings a copy of the base to the result, as far as it is kept in memory.

    `changes` of some domains, `chunks` of the others; `complete` tells whether any chunk is missing.
    """

    def __init__(self) -> None:
        self.changes: dict[int, Changes] = {}
        self.chunks: list[PackedChunk] = []
        self.complete = True
        self._changes_left, self._chunks_left = CHANGES_BYTES, KEPT_BYTES

    def add(self, chunk: PackedChunk, changes: Changes | None) -> None:
        """Keep one domain's changes, or its chunk, or neither."""
        size = sum(part.nbytes for part in changes or ())
        if changes is not None and size <= self._changes_left:
            self.changes[chunk.head.domain] = changes
            self._changes_left -= size
        elif chunk.nbytes <= self._chunks_left and self.complete:
            self.chunks.append(chunk)
            self._chunks_left -= chunk.nbytes
        else:
            # Storage is read anyhow.
            self.complete = False
            self.chunks = []


@dataclass(slots=True, kw_only=True)
class WayParts:
    """What a finished shard (of `size` bytes; 0: not written) contributes to a manifest, and what brings a
    copy of the base to the result.

    `digests` are those of the domains asked for; `kept` is None where nothing is to follow.
    """

    size: int
    chunks: ChunkTable
    columns: ColumnTable
    domains: DomainTable
    chunk_digests: bytes | None
    digests: dict[int, Digest]
    moved: npt.NDArray[np.uint64]
    changed: int | None
    listed: int
    kept: Kept | None


class Room:
    """Memory for work on large items, shared by worker threads; items are numbered in order.

    The first item that is not finished always gets what it asks for, so that nobody waits for ever.
    """

    def __init__(self, most: int = LARGE_BYTES) -> None:
        self._most, self._first = most, -1
        self._held: dict[int, int] = {}
        self._changed = threading.Condition()

    def take(self, item: int, nbytes: int) -> None:
        """Wait until an item may take so much."""
        with self._changed:
            self._changed.wait_for(
                lambda: item <= self._first or sum(self._held.values()) + nbytes <= self._most
            )
            self._held[item] = nbytes

    def reach(self, item: int) -> None:
        """All items before this one are finished."""
        with self._changed:
            self._first = item
            for done in [held for held in self._held if held < item]:
                del self._held[done]
            self._changed.notify_all()


def in_order(
    work: Callable[[int], R], items: Iterable[int], threads: int, room: Room | None = None
) -> Iterator[R]:
    """Results of `work` in the items' order (ascending), by worker threads, few items ahead of the consumer."""
    room = room or Room()
    if threads <= 1:
        for item in items:
            room.reach(item)
            yield work(item)
        return
    pending: deque[tuple[int, Future[R]]] = deque()
    with pool_of(threads, "deltafmt-write") as pool:

        def take() -> R:
            item, future = pending.popleft()
            room.reach(item)
            return future.result()

        try:
            for item in items:
                pending.append((item, pool.submit(work, item)))
                if len(pending) > threads:
                    yield take()
            while pending:
                yield take()
        finally:
            room.reach(sys.maxsize)


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
    changed: int | None = 0
    listed = 0
    kept = Kept() if keep else None
    try:
        for result in results:
            for tensor, digest in result.moved.items():
                moved[tensor] += digest
            changed = None if changed is None or result.changed is None else changed + result.changed
            if result.domain in shared:
                digests[result.domain] = result.result
            if result.listed:
                rows.append(_domain_row(result))
            for chunk in result.chunks:
                shard.add(chunk)
                listed += chunk.head.listed
                if kept is not None:
                    kept.add(chunk, result.changes)
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
        kept=kept,
        **tables,
    )


def _domain_row(result: DomainResult) -> tuple[int, ...]:
    base = (0, 0, 0) if result.base is None else (int(result.base[0]), int(result.base[1]), 1)
    return (result.domain, int(result.result[0]), int(result.result[1]), *base)
