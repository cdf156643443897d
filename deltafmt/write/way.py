"""One way, from bits to a manifest that is ready to be committed."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from deltafmt.errors import IncompleteError
from deltafmt.format import keys
from deltafmt.format.chunk import PackedChunk
from deltafmt.format.records import DigestTable, Footer, Manifest, Receipt
from deltafmt.format.signing import Signer
from deltafmt.format.validate import check_manifest
from deltafmt.kernels.diff import DiffScratch
from deltafmt.kernels.digest import Digest
from deltafmt.read.history import Stored
from deltafmt.store import Store
from deltafmt.write.commit import now_ms, sealed
from deltafmt.write.cut import Cut
from deltafmt.write.dense import encode_dense
from deltafmt.write.detect import Baseline, Detected, detect, digest_of, take_all
from deltafmt.write.encode import encode
from deltafmt.write.metrics import Gauge
from deltafmt.write.pack import DomainResult, Room, ShardWriter, WayParts, in_order, pack
from deltafmt.write.receipts import merged, moved_table, replica_table, sum_moved
from deltafmt.write.source import Source

_COLUMNS_BYTES = 6
"""Bytes per element that gaps, kinds, magnitudes and what compresses them take beside the result."""


@dataclass(frozen=True, kw_only=True)
class WayPlan:
    """What a way is to be, before any bit is read.

    `base` and `target` are stored manifests: the one that it starts from (None: an anchor), and for a
    further way the version that it leads to. `tensors` are digests of the base per tensor of the new
    schema, zero for what is new. A `signed` manifest, by whichever rank has the key, needs digests of all chunks. Of `writers` ranks this is `writer`; `shared` are the domains that others
    hold as well, `replicas` digests of those of them that another rank owns.
    """

    cut: Cut
    lineage: bytes
    version: int
    base: Stored | None
    target: Stored | None
    tensors: npt.NDArray[np.uint64]
    meta: dict[str, Any]
    files: dict[str, tuple[bytes, int]]
    data: bool = True
    signed: bool = False
    sign_with: Signer | None = None
    attempt: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    writer: int = 0
    writers: int = 1
    shared: frozenset[int] = frozenset()
    replicas: dict[int, Digest] = field(default_factory=dict)
    gauge: Gauge = field(default_factory=Gauge)

    @property
    def recut(self) -> bool:
        """Whether schema or tiling differ from the base's, so that every domain's digest is given."""
        if self.base is None:
            return True
        old = self.base.manifest
        return (old.schema, old.tiling) != (self.cut.schema_digest, self.cut.tiling_digest)

    @property
    def base_version(self) -> int | None:
        """The version that the way starts from."""
        return None if self.base is None else self.base.manifest.version

    @property
    def shard_key(self) -> str:
        """Where this writer's shard is put."""
        return keys.shard_key(
            version=self.version,
            base=self.base_version,
            attempt=self.attempt,
            writer=self.writer,
            further=self.target is not None,
        )

    @property
    def identity(self) -> dict[str, Any]:
        """The fields that the manifest, the footers and the receipts of a way share."""
        return {
            "lineage": self.lineage,
            "version": self.version,
            "base": self.base_version,
            "schema": self.cut.schema_digest,
            "tiling": self.cut.tiling_digest,
            "attempt": self.attempt,
            "writers": self.writers,
        }


def delta_results(
    plan: WayPlan, source: Source, baseline: Baseline, known: dict[int, Digest], threads: int
) -> Iterator[DomainResult]:
    """Detect and encode every domain. `known` holds digests of the baseline's domains, as far as known."""
    cut, scratch, room = plan.cut, threading.local(), Room()

    def work(domain: int) -> DomainResult:
        if not hasattr(scratch, "diff"):
            scratch.diff = DiffScratch()
        with plan.gauge.stage("detect"):
            detected = detect(cut, source, baseline, domain, known.get(domain), scratch.diff)
        wanted = plan.recut or domain in plan.shared
        if wanted and not detected.whole and detected.base is None:
            detected.base = digest_of(cut, baseline, domain)
            detected.result += detected.base
        if detected.whole or detected.crowded:
            room.take(domain, _large_bytes(cut, domain))
        with plan.gauge.stage("encode"):
            chunk = encode(cut, source, baseline, detected, scratch.diff)
        return _result(detected, chunk, plan.recut)

    return in_order(work, cut.domains, threads, room)


def anchor_results(plan: WayPlan, source: Source, threads: int) -> Iterator[DomainResult]:
    """Encode every domain whole (without data: only its digests)."""
    cut, room = plan.cut, Room()

    def work(domain: int) -> DomainResult:
        with plan.gauge.stage("detect"):
            detected = take_all(cut, source, domain)
        if not plan.data:
            return _result(detected, None, True)
        room.take(domain, _large_bytes(cut, domain))
        with plan.gauge.stage("encode"):
            chunk = encode_dense(cut, source, domain)
        return _result(detected, chunk, True)

    return in_order(work, cut.domains, threads, room)


def _large_bytes(cut: Cut, domain: int) -> int:
    """What coding a domain of which most is stored takes at most: its columns one by one, and the result."""
    volume = int(cut.tiling.volume[domain])
    return volume * (cut.width(domain) + _COLUMNS_BYTES)


def write_shard(
    store: Store, plan: WayPlan, results: Iterator[DomainResult] | list[DomainResult]
) -> tuple[Receipt, WayParts]:
    """Write this rank's shard; nothing refers to it yet."""
    base = plan.base_version
    shared = plan.identity | {"writer": plan.writer}

    def footer(*, changed: int | None, **tables: Any) -> Footer:
        return Footer(changed=None if base is None else changed, **shared, **tables)

    # An anchor is followed by copying the tensors, a further way by nothing.
    keep = base is not None and plan.target is None
    digests: list[bytes] | None = [] if plan.signed or plan.sign_with is not None else None
    shard = ShardWriter(store=store, key=plan.shard_key, digests=digests)
    waited = plan.gauge.waited
    before = time.monotonic()
    parts = pack(results, shard, len(plan.cut.schema), footer, keep=keep, shared=plan.shared)
    plan.gauge.spent["upload"] += time.monotonic() - before - (plan.gauge.waited - waited)
    receipt = Receipt(
        base_digest=None if plan.base is None else plan.base.digest,
        size=parts.size,
        changed=parts.changed,
        listed=parts.listed,
        chunks=parts.chunks,
        columns=parts.columns,
        domains=parts.domains,
        chunk_digests=parts.chunk_digests,
        moved=moved_table(parts.moved),
        replicas=replica_table(parts.digests | plan.replicas),
        **shared,
    )
    return receipt, parts


def _assembled(plan: WayPlan, receipts: Sequence[Receipt]) -> Manifest:
    """The manifest of a way out of all ranks' receipts, ascending by writer."""
    sums = _with_aliases(plan.cut, plan.tensors + sum_moved(receipts, len(plan.cut.schema)))
    tables = merged(receipts)
    changed = tables.pop("changed")
    return Manifest(
        base_digest=None if plan.base is None else plan.base.digest,
        target_digest=None if plan.target is None else plan.target.digest,
        created=now_ms(),
        data=plan.data,
        meta=plan.meta,
        files=plan.files,
        changed=None if plan.base is None else changed,
        tensors=DigestTable(digest0=sums[:, 0].copy(), digest1=sums[:, 1].copy()),
        **plan.identity,
        **tables,
    )


def manifest_of(plan: WayPlan, receipts: list[Receipt]) -> tuple[Stored, bytes]:
    """The manifest that all ranks' receipts add up to, checked, and its bytes."""
    if plan.sign_with is not None and any(receipt.chunk_digests is None for receipt in receipts):
        unsigned = [receipt.writer for receipt in receipts if receipt.chunk_digests is None]
        raise IncompleteError(
            "ranks have given no digests of their chunks, and a signed manifest needs them",
            kind="rank-disagrees",
            where=", ".join(f"rank {rank}" for rank in unsigned),
        )
    manifest = _assembled(plan, receipts)
    where = f"what the writers of version {plan.version} report"
    check_manifest(manifest, plan.cut.schema, plan.cut.tiling, where=where)
    return sealed(manifest, plan.sign_with)


def _with_aliases(cut: Cut, sums: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    for row, spec in enumerate(cut.schema):
        if spec.alias_of is not None:
            sums[row] = sums[cut.schema.index(spec.alias_of)]
    return sums


def _result(detected: Detected, chunk: PackedChunk | None, listed: bool) -> DomainResult:
    keep = chunk is not None and not (detected.whole or detected.crowded)
    return DomainResult(
        domain=detected.domain,
        chunks=() if chunk is None else (chunk,),
        changed=detected.changed,
        moved=detected.moved,
        result=detected.result,
        base=detected.base,
        listed=listed or chunk is not None,
        changes=(detected.positions.copy(), detected.new.copy()) if keep else None,
    )
