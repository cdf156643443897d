"""What a writer asks of a detector: which elements changed since the version published last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from deltafmt.kernels.digest import Digest
from deltafmt.read.history import History, Stored
from deltafmt.write.cut import Cut
from deltafmt.write.pack import DomainResult, WayParts
from deltafmt.write.source import PlacedBits, Source
from deltafmt.write.way import WayPlan


class Detector(Protocol):
    """Whatever it keeps of the version published last, its base, is brought along by these calls alone.

    Cuts, results and digests are those of one rank's own domains. After an error in `read`, `take` or `follow`
    it has no base, and the writer has it read before it asks for results again.
    """

    def fits(self, before: Cut, after: Cut) -> bool:
        """Whether a base that is there under one cut can be compared under another one."""

    def results(
        self, history: History, plan: WayPlan, source: PlacedBits, known: dict[int, Digest], threads: int
    ) -> Iterator[DomainResult]:
        """Every domain detected and encoded; `known` holds digests of the base's domains, as far as known.

        The base stays as it is until `follow`.
        """

    def read(self, history: History, stored: Stored, cut: Cut, threads: int) -> None:
        """Take a version in storage for the base, as far as its tensors go on under the cut's schema."""

    def take(self, cut: Cut, source: PlacedBits, threads: int) -> list[dict[int, Digest]]:
        """Take live bits for the base; returns what each tensor's digest gains by each domain."""

    def follow(self, history: History, stored: Stored, cut: Cut, parts: WayParts, threads: int) -> None:
        """Go on from the base to a version just committed, by what was stored of it."""

    def source(self, cut: Cut) -> Source | None:
        """The bits of the base; None for a detector that does not have them."""

    def drop(self) -> None:
        """Give the memory back."""
