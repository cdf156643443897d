"""What a writer may be told."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from deltafmt.format.signing import Signer, Verifier, check_signer, check_verifiers
from deltafmt.layout import Layout
from deltafmt.write.metrics import OnPublish


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    """Settings of a `Writer`; the defaults suit most.

    `domain_elements` is what a domain aims at (None: 4 Mi, or as the lineage has it). `anchor_every` adds
    an anchor way to every version whose number it divides. `squash` adds ways that replace up to so many
    deltas, in a dyadic pattern, so that a receiver that is k versions behind reads few objects, and few bytes
    more than one way over all of them would take; 64 is a good value, and costs about five times the bytes
    of the deltas. Both are added before `publish` returns, or behind `publish_async`. `tile_for` holds the receivers' layouts, one per
    rank: tensors are then cut where they cut, so that each rank reads little but its own share. `threads`
    is the number of domains worked on at once (None: one per core, at most eight). `sign_with` signs every
    manifest; versions that are gone on from must then be signed with the same key, or with one of `trust`.

    `on_publish` is called with the `PublishMetrics` of each version once it is committed (behind
    `publish_async`, in its thread); what it raises is logged.

    Of several ranks, rank 0's options count for what a version gets. `rank_timeout_seconds` is how long they wait for one another. Ranks without a process
    group find one another by `job`, a name that they share with no other job on the root, nor with an earlier
    start of their own (None: what torchrun or Slurm say of the job; without those, one job at a time).
    """

    domain_elements: int | None = None
    anchor_every: int | None = None
    squash: int | None = None
    tile_for: Sequence[Layout] = field(default=())
    threads: int | None = None
    sign_with: Signer | None = None
    trust: Sequence[Verifier] = ()
    rank_timeout_seconds: float = 600.0
    job: str | None = None
    on_publish: OnPublish | None = None

    def __post_init__(self) -> None:
        for name in ("domain_elements", "anchor_every", "squash", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if not self.rank_timeout_seconds > 0:
            raise ValueError(f"rank_timeout_seconds must be above 0, not {self.rank_timeout_seconds}")
        check_verifiers(self.trust)
        if self.sign_with is not None:
            check_signer(self.sign_with)

    @property
    def trusted(self) -> tuple[Verifier, ...]:
        """Keys with which versions that are read must be signed; none: they need not be."""
        own = () if self.sign_with is None else (self.sign_with.verifier,)
        return (*own, *self.trust)

    @property
    def workers(self) -> int:
        return self.threads or min(8, os.cpu_count() or 1)
