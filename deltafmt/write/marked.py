"""A delta from marks: what is marked, and what marks cannot say, found from storage."""

from __future__ import annotations

import threading
from bisect import bisect_right
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from deltafmt.kernels import marks
from deltafmt.kernels.digest import Digest, zero
from deltafmt.read.history import History
from deltafmt.write.compare import Comparison, stored_bits
from deltafmt.write.cut import Bits, Cut
from deltafmt.write.dense import or_dense
from deltafmt.write.detect import add_piece
from deltafmt.write.encode import encode_set
from deltafmt.write.pack import DomainResult
from deltafmt.write.source import Place, PlacedBits
from deltafmt.write.way import WayPlan

Parts = dict[int, Digest]
"""Digests of the parts that tensors have in a domain, by the tensors' rows."""


@dataclass(slots=True)
class Marks:
    """One live tensor, and which of its elements may differ from the base; bit i is its i-th in memory.

    They tell of bits in the dtype named, in which the tensor is published. `taken` are marks that a publish under way has used; they come back unless it ends well. `known` says
    whether marks name every difference.
    """

    name: str
    tensor: torch.Tensor
    dtype: str
    words: marks.Words
    known: bool = False
    taken: marks.Words | None = None
    taken_known: bool = False

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, *, dtype: str) -> Marks:
        return cls(name=name, tensor=tensor, dtype=dtype, words=marks.words_for(tensor.numel()))

    def first_of(self, tensor: torch.Tensor) -> int | None:
        """Which element a tensor in this one's memory begins with; None for a tensor elsewhere."""
        apart, size = tensor.data_ptr() - self.tensor.data_ptr(), tensor.element_size()
        same = tensor.dtype == self.tensor.dtype and tensor.device == self.tensor.device
        if not same or apart % size or not 0 <= apart // size <= self.tensor.numel() - tensor.numel():
            return None
        return apart // size

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


@dataclass(frozen=True, kw_only=True)
class MarkedDelta:
    """One delta in the making."""

    history: History
    plan: WayPlan
    source: PlacedBits
    known: dict[int, Digest]
    kept: list[bool]
    marks: list[Marks]
    parts: dict[int, Parts]
    found: dict[int, Parts]
    compare: Comparison
    _reading: threading.Lock = field(default_factory=threading.Lock)

    def domain(self, domain: int) -> DomainResult:
        """The domain's result; `found` gets the digests of its parts."""
        now = digests_of(self.plan.cut, self.source, domain)
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
        if before is None or not all(self.kept[row] for row in now):
            return self._compared(domain, now)
        still = {row for row in now if (now[row] == before[row]).all()}
        listed = self._listed(domain, still)
        if listed is None or not len(listed[0]):
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

    def _listed(self, domain: int, still: set[int]) -> tuple[npt.NDArray[np.uint32], Bits] | None:
        """Marked positions and their new bits; None where marks do not tell all. Tensors `still` are unchanged."""
        positions, values = [], []
        for piece, bits in self.source.pieces(domain):
            if piece.tensor in still:
                continue
            here = [self._marked(piece.tensor, place) for place in self.source.places(piece)]
            known = [found for found in here if found is not None]
            if len(known) < len(here):
                return None
            at = np.sort(known[0]) if len(known) == 1 else np.unique(np.concatenate(known))
            positions.append(at)
            values.append(bits[at - np.uint32(piece.position)])
        if not positions:
            return np.empty(0, np.uint32), np.empty(0, self.plan.cut.dtype(domain))
        return np.concatenate(positions), np.concatenate(values)

    def _marked(self, tensor: int, place: Place) -> npt.NDArray[np.uint32] | None:
        """Positions of what is marked at a place; None where that is not known."""
        at = bisect_right(self.marks, place.tensor.data_ptr(), key=lambda each: each.tensor.data_ptr()) - 1
        if at < 0 or not self.marks[at].taken_known:
            return None
        own = self.marks[at]
        first = own.first_of(place.tensor)
        if first is None or int(place.starts.max()) + first + place.length > own.tensor.numel():
            return None
        if own.taken is None or own.dtype != self.plan.cut.schema.tensors[tensor].dtype:
            return None
        return marks.marked(own.taken, place.starts + first, place.positions, place.length)

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


def digests_of(cut: Cut, source: PlacedBits, domain: int) -> Parts:
    """Digests of the parts of a domain, by reading it."""
    found: Parts = {}
    for piece, bits in source.pieces(domain):
        add_piece(cut, piece, bits, found.setdefault(piece.tensor, zero()))
    return found


def _sum(parts: Parts) -> Digest:
    total = zero()
    for digest in parts.values():
        total += digest
    return total
