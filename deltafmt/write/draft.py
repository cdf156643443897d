"""A version on its way, as one rank sees it: from what was agreed to a shard, and from all receipts to a manifest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from deltafmt.format.signing import Signer
from deltafmt.read.history import History, Stored
from deltafmt.write.detector import Detector
from deltafmt.write.metrics import Gauge
from deltafmt.write.ownership import Holding
from deltafmt.write.pack import DomainResult, bounded
from deltafmt.write.part import live_digests
from deltafmt.write.ranks import Agreed
from deltafmt.write.source import PlacedBits
from deltafmt.write.state import Base, base_sums
from deltafmt.write.way import WayPlan, anchor_results

FileTable = dict[str, tuple[bytes, int]]


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What was agreed, what remains to be written, and the bits it is made from.

    `results` are detected and encoded while they are taken; `holding` is what this rank told the others.
    Once `behind`, the tensors may change: `source` must not be read any more.
    """

    agreed: Agreed
    holding: Holding
    plan: WayPlan
    results: Iterator[DomainResult] | list[DomainResult]
    source: PlacedBits
    behind: bool = False

    def encoded(self) -> Draft:
        """The same with all of its results at hand, so that the tensors may change."""
        return replace(self, results=list(bounded(self.results)), behind=True)


def plan_of(
    agreed: Agreed,
    source: PlacedBits,
    base: Stored | None,
    history: History,
    *,
    rank: int,
    labels: dict[str, Any],
    files: FileTable,
    sign_with: Signer | None,
    gauge: Gauge,
    threads: int,
) -> WayPlan:
    """What this rank is to write of the version that was agreed on."""
    call, cut = agreed.call, agreed.cut
    sums = np.zeros((len(cut.schema), 2), np.uint64)
    if base is not None:
        sums = base_sums(history.schema(base.manifest.schema), base.manifest, cut.schema)
    return WayPlan(
        cut=cut,
        lineage=call.lineage,
        version=call.version,
        base=base,
        target=None,
        tensors=sums,
        meta=labels,
        files=files,
        data=call.data,
        signed=call.signed,
        sign_with=sign_with,
        gauge=gauge,
        attempt=call.attempt,
        writer=rank,
        writers=call.writers,
        shared=agreed.shared,
        replicas=live_digests(cut, source, agreed.replicas.tolist(), threads),
    )


def results_of(
    history: History,
    plan: WayPlan,
    source: PlacedBits,
    base: Base | None,
    detector: Detector,
    threads: int,
) -> Iterator[DomainResult]:
    """Every domain of a plan, detected against the base (None: taken whole) and encoded."""
    if base is None:
        found = anchor_results(plan, source, threads)
    else:
        known = base.digests if base.cut.tiling_digest == plan.cut.tiling_digest else {}
        found = detector.results(history, plan, source, known, threads)
    return plan.gauge.watch(plan.cut, found)
