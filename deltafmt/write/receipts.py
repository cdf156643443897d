"""Receipts of ranks, and the manifest that they add up to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deltafmt.format.checksum import DIGEST_BYTES
from deltafmt.format.records import (
    ChunkTable,
    ColumnTable,
    DomainTable,
    MovedTable,
    Receipt,
    ReplicaTable,
    ShardTable,
    Table,
)
from deltafmt.joins import expanded
from deltafmt.kernels.digest import Digest


def moved_table(moved: npt.NDArray[np.uint64]) -> MovedTable:
    """The rows that are not zero of differences per tensor, shape (tensors, 2)."""
    rows = np.flatnonzero(moved.any(axis=1))
    return MovedTable(tensor=rows.astype("<u4"), digest0=moved[rows, 0], digest1=moved[rows, 1])


def replica_table(digests: dict[int, Digest]) -> ReplicaTable:
    rows = [(domain, int(lanes[0]), int(lanes[1])) for domain, lanes in sorted(digests.items())]
    table: ReplicaTable = ReplicaTable.of_rows(rows)
    return table


def sum_moved(receipts: Sequence[Receipt], tensors: int) -> npt.NDArray[np.uint64]:
    """What all ranks together add to the digests of the tensors, shape (tensors, 2)."""
    total = np.zeros((tensors, 2), np.uint64)
    for receipt in receipts:
        moved = receipt.moved
        total[moved.tensor] += np.stack((moved.digest0, moved.digest1), axis=1)
    return total


def merged(receipts: Sequence[Receipt]) -> dict[str, Any]:
    """The tables and statistics of a manifest out of all ranks' receipts, which ascend by writer."""
    with_shard = [receipt for receipt in receipts if receipt.size]
    number = {receipt.writer: row for row, receipt in enumerate(with_shard)}
    parts = [
        receipt.chunks.replaced(shard=np.full(len(receipt.chunks), number.get(receipt.writer, 0), "<u4"))
        for receipt in receipts
    ]
    chunks: ChunkTable = _joined(ChunkTable, parts)
    columns: ColumnTable = _joined(ColumnTable, [receipt.columns for receipt in receipts])
    domains: DomainTable = _joined(DomainTable, [receipt.domains for receipt in receipts])
    order = np.lexsort((chunks.operation, chunks.domain))
    counts = chunks.columns.astype(np.int64)
    _, column_rows = expanded((np.cumsum(counts) - counts)[order], counts[order])
    return {
        "shards": ShardTable.of_rows([(receipt.writer, receipt.size) for receipt in with_shard]),
        "chunks": chunks.take(order),
        "chunk_digests": _joined_digests(receipts, order),
        "columns": columns.take(column_rows),
        "domains": domains.take(np.argsort(domains.domain, kind="stable")),
        "changed": sum(receipt.changed for receipt in receipts),
        "listed": sum(receipt.listed for receipt in receipts),
    }


def _joined_digests(receipts: Sequence[Receipt], order: npt.NDArray[np.int64]) -> bytes | None:
    """Digests of all chunks in the manifest's order; None unless every rank gives its own."""
    parts = [receipt.chunk_digests for receipt in receipts]
    if any(part is None for part in parts):
        return None
    rows = np.frombuffer(b"".join(part or b"" for part in parts), np.uint8).reshape(-1, DIGEST_BYTES)
    return rows[order].tobytes()


def _joined(table: type[Table], parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return table(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name, _ in table.column_types()}
    )
