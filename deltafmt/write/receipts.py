"""Receipts of ranks, and the manifest that they add up to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deltafmt.errors import IncompleteError
from deltafmt.format.checksum import DIGEST_BYTES
from deltafmt.format.ranks import ANCHOR
from deltafmt.format.records import (
    Attempt,
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
from deltafmt.write.cut import Cut


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
        total[moved.tensor] += moved.lanes
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
        "changed": _total([receipt.changed for receipt in receipts]),
        "listed": sum(receipt.listed for receipt in receipts),
    }


def _joined_digests(receipts: Sequence[Receipt], order: npt.NDArray[np.int64]) -> bytes | None:
    """Digests of all chunks in the manifest's order; None unless every rank gives its own."""
    parts = [receipt.chunk_digests for receipt in receipts]
    if any(part is None for part in parts):
        return None
    rows = np.frombuffer(b"".join(part or b"" for part in parts), np.uint8).reshape(-1, DIGEST_BYTES)
    return rows[order].tobytes()


def _total(changed: list[int | None]) -> int | None:
    known = [count for count in changed if count is not None]
    return sum(known) if len(known) == len(changed) else None


def _joined(table: type[Table], parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return table(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name, _ in table.column_types()}
    )


def check_receipts(receipts: Sequence[Receipt], call: Attempt, cut: Cut) -> None:
    """Raise unless every rank delivered what the call asked for, and replicas are equal.

    What a manifest must obey besides is checked on the manifest.
    """
    wanted = (call.version, call.base, call.base_digest, call.schema, call.tiling, call.writers)
    for rank, receipt in enumerate(receipts):
        found = (
            receipt.version, receipt.base, receipt.base_digest, receipt.schema, receipt.tiling, receipt.writers
        )  # fmt: skip
        domains = np.concatenate((receipt.domains.domain, receipt.chunks.domain)).astype(np.int64)
        inside = (domains < len(call.owner)).all() and (call.owner[domains] == rank).all()
        if found != wanted or not inside or (receipt.moved.tensor >= len(cut.schema)).any():
            raise IncompleteError(
                "a rank delivered something else than it was asked for",
                kind="rank-disagrees",
                where=f"rank {rank}",
            )
    if call.purpose != ANCHOR:
        _check_replicas(receipts, call, cut)


def _check_replicas(receipts: Sequence[Receipt], call: Attempt, cut: Cut) -> None:
    """Every rank that holds a domain with others reports one digest of it, and all are equal."""
    tables = [receipt.replicas for receipt in receipts]
    domain = np.concatenate([table.domain for table in tables]).astype(np.int64)
    rank = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    lanes = np.stack(
        [np.concatenate([getattr(table, name) for table in tables]) for name in ("digest0", "digest1")],
        axis=1,
    )
    order = np.lexsort((rank, domain))
    domain, rank, lanes = domain[order], rank[order], lanes[order]
    expected = np.where(call.holders > 1, call.holders, 0)
    count = np.bincount(domain, minlength=len(expected))
    if len(count) != len(expected) or (count != expected).any():
        raise IncompleteError(
            "ranks that hold one part of a tensor have not all reported on it",
            kind="rank-disagrees",
            where="replicas",
        )
    first = np.searchsorted(domain, domain)
    differ = (lanes != lanes[first]).any(axis=1)
    if differ.any():
        at = int(differ.argmax())
        others = sorted({int(r) for r in rank[(domain == domain[at]) & differ]})
        tensor, box = cut.tiling.box(int(cut.tiling.domain_box[domain[at]]), cut.schema)
        raise IncompleteError(
            "ranks hold one part of a tensor with different bits; if it is no replica, give it a name of its own",
            kind="replicas-differ",
            where=f"{cut.schema.tensors[tensor].name!r} {box.start} to {box.stop}, "
            f"ranks {int(rank[first[at]])} and {', '.join(map(str, others))}",
        )
