"""Ranks prove together that their live tensors are a version: the digests of all parts add up to its own."""

from __future__ import annotations

from collections.abc import Mapping

from deltafmt.errors import BaseMismatchError
from deltafmt.format.records import ChunkTable, ColumnTable, DomainTable, Receipt
from deltafmt.kernels.digest import Digest, zero
from deltafmt.read.history import Stored
from deltafmt.schema import Schema
from deltafmt.write.detector import Detector
from deltafmt.write.part import live_digests
from deltafmt.write.ranks import Agreed
from deltafmt.write.receipts import moved_table, replica_table
from deltafmt.write.source import PlacedBits
from deltafmt.write.state import Base, summed


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
