"""Detection by marks, one bit per element, that hooks of an optimizer set while it steps.

What marks cannot say is found from storage: a domain whose digest is no longer the base's, and whose changes
are not known, is read from the base and compared.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from deltafmt.kernels import marks
from deltafmt.kernels.digest import Digest, zero
from deltafmt.read.history import History, Stored
from deltafmt.read.views import goes_on
from deltafmt.write.compare import Comparison, stored_bits
from deltafmt.write.cut import Bits, Cut
from deltafmt.write.dense import or_dense
from deltafmt.write.detect import add_piece
from deltafmt.write.encode import encode_set
from deltafmt.write.pack import DomainResult, WayParts, in_order
from deltafmt.write.source import PlacedBits, Source
from deltafmt.write.way import WayPlan

_LOG = logging.getLogger("deltafmt")
Parts = dict[int, Digest]
"""Digests of the parts that tensors have in a domain, by the tensors' rows."""


@dataclass(slots=True)
class Marks:
    """One live tensor, and which of its elements may differ from the base; bit i is its i-th in memory.

    `taken` are marks that a publish under way has used; they come back unless it ends well. `known` says
    whether marks name every difference.
    """

    name: str
    tensor: torch.Tensor
    words: marks.Words
    known: bool = False
    taken: marks.Words | None = None
    taken_known: bool = False

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Marks:
        return cls(name=name, tensor=tensor, words=marks.words_for(tensor.numel()))

    def take(self) -> None:
        """Begin anew; what is marked up to here is for the publish that begins."""
        self.restore()
        self.taken, self.taken_known = self.words, self.known
        self.words, self.known = marks.words_for(self.tensor.numel()), True

    def restore(self) -> None:
        """A publish has failed: its marks count again."""
        if self.taken is not None:
            self.words |= self.taken
            self.known &= self.taken_known
            self.taken = None

    def reset(self, *, known: bool) -> None:
        """Forget all marks."""
        self.words.fill(0)
        self.taken, self.known = None, known


class MarkDetector:
    """Publishes what is marked; subclasses mark it, in memory of one bit per element.

    Old bits are not known: marked elements are stored as `set`. Tensors that are not marked at all (buffers,
    frozen parameters) are held against the base by digest, which costs a read of them, and only where that
    differs are the base's bits read from storage.
    """

    def __init__(self) -> None:
        self._marks: dict[int, Marks] = {}
        self._parts: dict[int, Parts] = {}
        self._parts_of: bytes | None = None
        self._found: dict[int, Parts] = {}
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
        publish = _Publish(
            history=history,
            plan=plan,
            source=source,
            known=known,
            kept=kept,
            marks={m.tensor.data_ptr(): m for m in self._marks.values()},
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
        gained = list(in_order(lambda domain: _digests(cut, source, domain), cut.domains, threads))
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
        """Somebody else has written to a tensor."""
        if each.known:
            _LOG.info("%s: %s; what changed is found from storage", each.name, why)
        each.known = False


@dataclass(frozen=True, kw_only=True)
class _Publish:
    """One delta in the making."""

    history: History
    plan: WayPlan
    source: PlacedBits
    known: dict[int, Digest]
    kept: list[bool]
    marks: dict[int, Marks]
    parts: dict[int, Parts]
    found: dict[int, Parts]
    compare: Comparison
    _reading: threading.Lock = field(default_factory=threading.Lock)

    def domain(self, domain: int) -> DomainResult:
        """The domain's result; `found` gets the digests of its parts."""
        now = _digests(self.plan.cut, self.source, domain)
        total, base = _sum(now), self.known.get(domain)
        if len(now) > 1:
            self.found[domain] = now
        if base is not None and (total == base).all():
            return DomainResult(
                domain=domain,
                chunks=(),
                changed=0,
                moved={},
                result=total,
                base=base,
                listed=self.plan.recut,
                changes=None,
            )
        before = {next(iter(now)): base} if base is not None and len(now) == 1 else self.parts.get(domain)
        listed = self._listed(domain) if all(self.kept[row] for row in now) else None
        if listed is None or before is None or not len(listed[0]):
            return self._compared(domain, now)
        return DomainResult(
            domain=domain,
            chunks=(or_dense(self.plan.cut, self.source, encode_set(self.plan.cut, domain, *listed)),),
            changed=None,
            moved={row: now[row] - before[row] for row in now},
            result=total,
            base=_sum(before),
            listed=True,
            changes=None,
        )

    def _listed(self, domain: int) -> tuple[npt.NDArray[np.uint32], Bits] | None:
        """Marked positions and their new bits; None where marks do not tell all."""
        positions, values = [], []
        for piece, bits in self.source.pieces(domain):
            here = []
            for place in self.source.places(piece):
                own = self.marks.get(place.tensor.data_ptr())
                if own is None or not own.taken_known or not _is(own.tensor, place.tensor):
                    return None
                assert own.taken is not None
                here.append(marks.marked(own.taken, place.starts, place.positions, place.length))
            at = here[0] if len(here) == 1 else np.unique(np.concatenate(here))
            if len(at):
                at = np.sort(at)
                positions.append(at)
                values.append(bits[at - np.uint32(piece.position)])
        if not positions:
            return np.empty(0, np.uint32), np.empty(0, self.plan.cut.dtype(domain))
        return np.concatenate(positions), np.concatenate(values)

    def _compared(self, domain: int, now: Parts) -> DomainResult:
        """The domain against its base in storage."""
        cut, base = self.plan.cut, self.plan.base
        assert base is not None
        new: Bits = np.empty(int(cut.tiling.volume[domain]), cut.dtype(domain))
        for piece, bits in self.source.pieces(domain):
            new[piece.position : piece.position + piece.volume] = bits
        with self._reading:
            version, wanted = base.manifest.version, range(domain, domain + 1)
            old = stored_bits(self.history, version, cut, wanted, self.kept)[domain]
        result, before = self.compare(domain, old, new)
        moved = {row: digest - before[row] if row in before else digest for row, digest in now.items()}
        return replace(result, moved=moved)


def _is(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors show the same memory in the same order."""
    return one.numel() == other.numel() and one.dtype == other.dtype and other.is_contiguous()


def _digests(cut: Cut, source: PlacedBits, domain: int) -> Parts:
    found: Parts = {}
    for piece, bits in source.pieces(domain):
        add_piece(cut, piece, bits, found.setdefault(piece.tensor, zero()))
    return found


def _sum(parts: Parts) -> Digest:
    total = zero()
    for digest in parts.values():
        total += digest
    return total
