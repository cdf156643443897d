"""Ranks prove together that their live tensors are a version: the digests of all parts add up to its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from deltafmt.errors import BaseMismatchError, IncompleteError
from deltafmt.format.ranks import DONE
from deltafmt.format.records import ChunkTable, ColumnTable, DomainTable, Receipt
from deltafmt.kernels.digest import Digest, zero
from deltafmt.read.history import Stored
from deltafmt.write.leader import Leader
from deltafmt.write.part import live_digests, take_part
from deltafmt.write.ranks import Agreed, Follower
from deltafmt.write.receipts import moved_table, replica_table, sum_moved
from deltafmt.write.source import Source
from deltafmt.write.state import Base, check_sums, summed

Copies = dict[str, torch.Tensor]


def own_proof(
    agreed: Agreed, stored: Stored, source: Source, *, rank: int, threads: int
) -> tuple[Receipt, Base, Copies]:
    """What one rank has to say, and its copy of its own part with the base that it is, if all agree."""
    cut = agreed.cut
    if agreed.call.base_digest != stored.digest or cut.schema_digest != stored.manifest.schema:
        raise BaseMismatchError(
            "the tensors are not those of the version",
            kind="schema-differs",
            where=f"version {stored.manifest.version}",
        )
    copies, found = take_part(cut, source, threads)
    digests = {
        domain: sum(gained.values(), zero()) for domain, gained in zip(cut.domains, found, strict=True)
    }
    replicas = live_digests(cut, source, agreed.replicas.tolist(), threads)
    receipt = _receipt(agreed, rank, found, {d: digests[d] for d in agreed.shared} | replicas)
    return receipt, Base(stored=stored, cut=cut, digests=digests), copies


def agree_on_proof(team: Leader | Follower, agreed: Agreed, receipt: Receipt, stored: Stored) -> None:
    """Raise on all ranks unless what they hold adds up to the version."""
    if isinstance(team, Leader):
        _check(team, agreed, receipt, stored)
    elif team.close(agreed, receipt) != DONE:
        raise IncompleteError(
            "rank 0 has not told whether the tensors are the version's", kind="rank-missing", where="rank 0"
        )


def _receipt(
    agreed: Agreed, rank: int, found: list[dict[int, Digest]], shared: Mapping[int, Digest]
) -> Receipt:
    sums = summed(found, len(agreed.cut.schema))
    return agreed.receipt(
        writer=rank,
        size=0,
        changed=0,
        listed=0,
        chunks=ChunkTable.empty(),
        columns=ColumnTable.empty(),
        domains=DomainTable.empty(),
        moved=moved_table(sums),
        replicas=replica_table(dict(shared)),
    )


def _check(team: Leader, agreed: Agreed, receipt: Receipt, stored: Stored) -> None:
    receipts = team.gather(agreed, receipt)
    if receipts is None:
        raise IncompleteError(
            "ranks hold something else than before; resume again", kind="rank-disagrees", where="ranks"
        )
    schema = agreed.cut.schema
    try:
        check_sums(schema, sum_moved(receipts, len(schema)), stored.manifest)
    except BaseMismatchError as error:
        team.fail(agreed, error)
        raise
    team.end(agreed, DONE)
