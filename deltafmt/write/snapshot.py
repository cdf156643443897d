"""Detection by comparing with a copy of what was published last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from deltafmt.format.chunk import ColumnHead, PackedChunk
from deltafmt.kernels.digest import Digest
from deltafmt.layout import Layout
from deltafmt.read.fetch import StagedChunk
from deltafmt.read.history import History, Stored
from deltafmt.read.materialize import follow, materialize
from deltafmt.read.views import goes_on
from deltafmt.schema import TensorSpec
from deltafmt.tensors import empty, numpy_bits
from deltafmt.write.cut import Bits, Cut
from deltafmt.write.detect import Baseline, copy_live, put_changes
from deltafmt.write.pack import DomainResult, Kept, WayParts, in_order
from deltafmt.write.part import copy_layout
from deltafmt.write.source import CopiedSource, PlacedBits, Source
from deltafmt.write.way import WayPlan, delta_results


class SnapshotDetector:
    """Compares with a copy of what was published last: exact for every change, whoever made it.

    Costs the memory of the published tensors, or of a rank's own part of them.
    """

    reason: str | None = None
    """Why `detector_for` has chosen it."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def __repr__(self) -> str:
        return f"SnapshotDetector({len(self.tensors)} tensors, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def fits(self, before: Cut, after: Cut) -> bool:
        """Copies of whole tensors serve any cut, that of a rank's own part only the one it was made for."""
        return before is after or (before.part is None and after.part is None)

    def results(
        self,
        _history: History,
        plan: WayPlan,
        source: PlacedBits,
        known: dict[int, Digest],
        threads: int,
    ) -> Iterator[DomainResult]:
        """Every domain compared and encoded."""
        return delta_results(plan, source, self.flats(plan.cut), known, threads)

    def read(self, history: History, stored: Stored, cut: Cut, threads: int) -> None:
        """Copy a version from storage, as far as its tensors go on under the cut's schema."""
        old = history.schema(stored.manifest.schema)
        copies = self._copies(cut, [spec for spec in _owners(cut) if goes_on(old, spec)])
        self.tensors = {}
        full = _held(cut, copies)
        if full:
            layout = _layout(cut, full)
            materialize(history, stored.manifest.version, full, layout=layout, threads=threads)
        self.tensors = copies

    def take(self, cut: Cut, source: PlacedBits, threads: int) -> list[dict[int, Digest]]:
        """Copy live bits; returns what each tensor's digest gains by each domain."""
        copies = self._copies(cut, _owners(cut))
        self.tensors = {}
        gained = list(in_order(lambda domain: copy_live(cut, source, copies, domain), cut.domains, threads))
        self.tensors = copies
        return gained

    def follow(self, history: History, stored: Stored, cut: Cut, parts: WayParts, threads: int) -> None:
        """Bring the copy to a version just committed: by changes, by chunks, or by reading these back."""
        copies = self._copies(cut, _owners(cut))
        kept = parts.kept or Kept()
        baseline = self.flats(cut)
        self.tensors = {}
        # Domains of which changes were kept have no part that is new: all of it is in the copy.
        changes = kept.changes
        for _ in in_order(lambda d: put_changes(cut, baseline, d, *changes[d]), changes, threads):
            pass
        if kept.chunks or not kept.complete:
            chunks = [_staged(chunk) for chunk in kept.chunks] if kept.complete else None
            full = _held(cut, copies)
            layout = _layout(cut, full)
            follow(
                history, stored, full, layout=layout, chunks=chunks, without=changes.keys(), threads=threads
            )
        self.tensors = copies

    def source(self, cut: Cut) -> Source | None:
        """The copy."""
        return CopiedSource(cut, self.flats(cut))

    def drop(self) -> None:
        """Give the copy back."""
        self.tensors = {}

    def flats(self, cut: Cut) -> Baseline:
        """The copy of each tensor of a schema as flat bits; None where there is none of that dtype and shape."""
        flats: Baseline = []
        for row, spec in enumerate(cut.schema):
            copy = self._copy(spec, cut.copy_shape(row)) if spec.alias_of is None else None
            flats.append(None if copy is None else _flat(copy))
        return flats

    def _copy(self, spec: TensorSpec, shape: tuple[int, ...]) -> torch.Tensor | None:
        tensor = self.tensors.get(spec.name)
        if tensor is None or (str(tensor.dtype), tuple(tensor.shape)) != (f"torch.{spec.dtype}", shape):
            return None
        return tensor

    def _copies(self, cut: Cut, specs: Iterable[TensorSpec]) -> dict[str, torch.Tensor]:
        """The copies that are there, new ones for the rest."""
        copies = {}
        for spec in specs:
            shape = cut.copy_shape(cut.schema.index(spec.name))
            tensor = self._copy(spec, shape)
            copies[spec.name] = empty(spec.dtype, shape) if tensor is None else tensor
        return copies


def _owners(cut: Cut) -> list[TensorSpec]:
    return [cut.schema.tensors[row] for row in cut.schema.owners]


def _held(cut: Cut, copies: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The copies of which a rank's own part has elements; all of those that are whole."""
    return {name: tensor for name, tensor in copies.items() if tensor.numel() or cut.part is None}


def _layout(cut: Cut, full: Iterable[str]) -> Layout | None:
    return None if cut.part is None else copy_layout(cut, full)


def _flat(tensor: torch.Tensor) -> Bits:
    return numpy_bits(tensor).reshape(-1)


def _staged(chunk: PackedChunk) -> StagedChunk:
    names = ("column", "codec", "stored", "raw", "crc")
    columns = tuple(ColumnHead(**dict(zip(names, row, strict=True))) for row in chunk.columns)
    return StagedChunk(
        head=chunk.head, columns=columns, data=memoryview(b"".join(chunk.buffers)), where="own chunk"
    )
