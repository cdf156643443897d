"""Ranks prove together that their live tensors are a version: the digests of all parts add up to its own."""

from __future__ import annotations

from collections.abc import Mapping

from deltafmt.errors import BaseMismatchError, IncompleteError
from deltafmt.format.ranks import AGAIN, DONE
from deltafmt.format.records import ChunkTable, ColumnTable, DomainTable, Receipt
from deltafmt.kernels.digest import Digest, zero
from deltafmt.read.history import Stored
from deltafmt.schema import Schema
from deltafmt.write.detector import Detector
from deltafmt.write.part import live_digests
from deltafmt.write.ranks import Agreed, Team
from deltafmt.write.receipts import moved_table, replica_table, sum_moved
from deltafmt.write.source import PlacedBits
from deltafmt.write.state import Base, check_sums, summed


def own_proof(
    agreed: Agreed,
    stored: Stored,
    schema: Schema,
    source: PlacedBits,
    detector: Detector,
    *,
    rank: int,
    threads: int,
) -> tuple[Receipt, Base]:
    """What one rank has to say of its live tensors, which the detector takes for the base.

    They are the base only once all ranks' receipts add up to the version. `schema` is the version's.
    """
    cut = agreed.cut
    if agreed.call.base_digest != stored.digest or cut.schema_digest != stored.manifest.schema:
        differ = sorted({spec.name for spec in set(schema) ^ set(cut.schema)})
        raise BaseMismatchError(
            "the tensors are not those of the version",
            kind="schema-differs",
            where=", ".join([f"version {stored.manifest.version}", *differ[:5]]),
        )
    found = detector.take(cut, source, threads)
    digests = {
        domain: sum(gained.values(), zero()) for domain, gained in zip(cut.domains, found, strict=True)
    }
    replicas = live_digests(cut, source, agreed.replicas.tolist(), threads)
    receipt = _receipt(agreed, rank, found, {d: digests[d] for d in agreed.shared} | replicas)
    return receipt, Base(stored=stored, cut=cut, digests=digests)


def agree_on_proof(team: Team, agreed: Agreed, receipt: Receipt, schema: Schema, stored: Stored) -> None:
    """Raise on all ranks unless what they hold adds up to the version, whose schema is given."""

    def check(receipts: list[Receipt]) -> None:
        check_sums(schema, sum_moved(receipts, len(schema)), stored.manifest)

    outcome = team.close(agreed, receipt, assemble=check, create=lambda _: DONE)
    if outcome != DONE:
        again = outcome == AGAIN
        raise IncompleteError(
            "ranks hold something else than before, or rank 0 has not told how it ended; resume again",
            kind="rank-disagrees" if again else "rank-missing",
            where="ranks" if again else "rank 0",
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
