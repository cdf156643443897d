"""Detection by marks, one bit per element, that hooks of an optimizer set while it steps.

What marks cannot say is found from storage: a domain whose digest is no longer the base's, and whose changes
are not known, is read from the base and compared.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

from deltafmt.kernels import marks
from deltafmt.kernels.digest import Digest
from deltafmt.read.history import History, Stored
from deltafmt.read.views import goes_on
from deltafmt.write.compare import Comparison
from deltafmt.write.cut import Cut
from deltafmt.write.marked import MarkedDelta, Marks, Parts, digests_of
from deltafmt.write.pack import DomainResult, WayParts, in_order
from deltafmt.write.source import PlacedBits, Source
from deltafmt.write.way import WayPlan

_LOG = logging.getLogger("deltafmt")


class MarkDetector:
    """Publishes what is marked; subclasses mark it, in memory of one bit per element.

    Old bits are not known: marked elements are stored as `set`. Tensors that are not marked at all (buffers,
    frozen parameters) are held against the base by digest, which costs a read of them, and only where that
    differs are the base's bits read from storage.
    """

    reason: str | None = None
    """Why `detector_for` has chosen it."""

    def __init__(self) -> None:
        self._marks: dict[int, Marks] = {}
        self._parts: dict[int, Parts] = {}
        self._parts_of: bytes | None = None
        self._found: dict[int, Parts] = {}
        self.lost = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._marks)} tensors, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Bytes of the marks."""
        return sum(
            m.words.nbytes + (0 if m.taken is None else m.taken.nbytes) for m in list(self._marks.values())
        )

    @property
    def marked(self) -> int:
        """Elements marked since the last publish."""
        return sum(marks.count(m.words) for m in self._marks.values())

    def settle(self) -> None:
        """Look for writes that no mark tells of, before marks are used."""

    def fits(self, _before: Cut, _after: Cut) -> bool:
        """Marks are by live tensor, however it is cut."""
        return True

    def results(
        self, history: History, plan: WayPlan, source: PlacedBits, known: dict[int, Digest], threads: int
    ) -> Iterator[DomainResult]:
        """Every domain of which something is marked, or whose digest has changed, encoded."""
        assert plan.base is not None
        self.settle()
        with self._lock:
            for each in self._marks.values():
                each.take()
            self._found = {}
        before = history.schema(plan.base.manifest.schema)
        kept = [spec.alias_of is None and goes_on(before, spec) for spec in plan.cut.schema]
        publish = MarkedDelta(
            history=history,
            plan=plan,
            source=source,
            known=known,
            kept=kept,
            marks=sorted(self._marks.values(), key=lambda each: each.tensor.data_ptr()),
            parts=self._parts if self._parts_of == plan.cut.tiling_digest else {},
            found=self._found,
            compare=Comparison(cut=plan.cut, kept=kept, recut=plan.recut, scratch=threading.local()),
        )
        return in_order(publish.domain, plan.cut.domains, threads)

    def read(self, _history: History, _stored: Stored, _cut: Cut, _threads: int) -> None:
        """Take a version in storage for the base: nothing is known of how the live tensors differ from it."""
        self._forget(known=False)

    def take(self, cut: Cut, source: PlacedBits, threads: int) -> list[dict[int, Digest]]:
        """Take the live tensors for the base; returns what each tensor's digest gains by each domain."""
        self._forget(known=False)
        gained = list(in_order(lambda domain: digests_of(cut, source, domain), cut.domains, threads))
        self._parts_of = cut.tiling_digest
        self._parts = {d: parts for d, parts in zip(cut.domains, gained, strict=True) if len(parts) > 1}
        self._forget_marks(known=True)
        return gained

    def follow(self, _history: History, _stored: Stored, cut: Cut, _parts: WayParts, _threads: int) -> None:
        """The version published is the base: its marks are used up."""
        with self._lock:
            if self._parts_of != cut.tiling_digest:
                self._parts = {}
            self._parts_of = cut.tiling_digest
            self._parts.update(self._found)
            self._found = {}
            for each in self._marks.values():
                each.taken = None

    def source(self, _cut: Cut) -> Source | None:
        """The bits of the base are not at hand."""
        return None

    def drop(self) -> None:
        """There is no base any more."""
        self._forget(known=False)

    def _forget(self, *, known: bool) -> None:
        self._parts, self._parts_of, self._found = {}, None, {}
        self._forget_marks(known=known)

    def _forget_marks(self, *, known: bool) -> None:
        with self._lock:
            for each in self._marks.values():
                each.reset(known=known)

    def _lose(self, each: Marks, why: str) -> None:
        """A tensor has changed in a way that no mark tells of."""
        if each.known:
            self.lost += 1
            _LOG.info("%s: %s; what changed is found from storage", each.name, why)
        each.known = False
