"""A delta between any two stored versions: both are read, some domains at a time, and compared."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltafmt.addresses import contiguous_strides
from deltafmt.errors import ChecksumError
from deltafmt.format.chunk import PackedChunk
from deltafmt.kernels.diff import DiffScratch, diff
from deltafmt.kernels.digest import Digest, zero
from deltafmt.kernels.steps import step_between
from deltafmt.layout import Layout, Placement
from deltafmt.read.history import History, Stored
from deltafmt.read.materialize import materialize
from deltafmt.read.views import goes_on
from deltafmt.schema import Schema
from deltafmt.tensors import empty, numpy_bits
from deltafmt.write.batches import batches
from deltafmt.write.cut import Bits, Cut
from deltafmt.write.dense import encode_dense, or_dense
from deltafmt.write.detect import add_piece
from deltafmt.write.encode import encode_given_steps
from deltafmt.write.pack import DomainResult, in_order
from deltafmt.write.source import GivenSource
from deltafmt.write.state import check_dtypes
from deltafmt.write.way import WayPlan

BATCH_BYTES = 32 << 20
"""Elements of each of the two versions that are in memory together, unless a single domain takes more."""

Progress = Callable[[int, int], None]


def compared_results(
    history: History, plan: WayPlan, threads: int, progress: Progress | None = None
) -> Iterator[DomainResult]:
    """Every domain of `plan`'s tiling, from the bits that it has at the base and at the version.

    Raises `NotFoundError` where one of them cannot be read, `SchemaError` (`dtype-mismatch`) for a tensor
    of another dtype, `ChecksumError` where what was read is not the base.
    """
    assert plan.base is not None
    before = history.schema(plan.base.manifest.schema)
    kept = _kept(before, plan.cut.schema)
    compare = Comparison(cut=plan.cut, kept=kept, recut=plan.recut, scratch=threading.local())
    read: dict[int, tuple[Bits, Bits]] = {}
    sums = np.zeros((len(plan.cut.schema), 2), np.uint64)
    domains = _reading(history, plan, kept, read, progress)
    for found, base_sums in in_order(lambda domain: compare(domain, *read.pop(domain)), domains, threads):
        for row, digest in base_sums.items():
            sums[row] += digest
        yield found
    _check_base(sums, kept, plan.cut.schema, before, plan.base)


def _kept(before: Schema, after: Schema) -> list[bool]:
    """Which tensors of the later schema start from their old elements."""
    check_dtypes(
        before,
        after,
        message="a delta cannot change a dtype, and the versions between change one; use an anchor",
    )
    return [spec.alias_of is None and goes_on(before, spec) for spec in after]


def _reading(
    history: History,
    plan: WayPlan,
    kept: list[bool],
    into: dict[int, tuple[Bits, Bits]],
    progress: Progress | None,
) -> Iterator[int]:
    """All domains, their elements at both versions put into a dictionary; not initialised where the base has
    none.
    """
    assert plan.base is not None
    tiling = plan.cut.tiling
    sizes = tiling.volume * tiling.widths
    total = int(sizes.sum())
    for domains in batches(sizes.tolist(), BATCH_BYTES):
        new = stored_bits(history, plan.version, plan.cut, domains, [True] * len(kept))
        old = stored_bits(history, plan.base.manifest.version, plan.cut, domains, kept)
        for domain in domains:
            into[domain] = old.pop(domain), new.pop(domain)
            yield domain
        if progress is not None:
            progress(int(sizes[: domains.stop].sum()), total)


def stored_bits(
    history: History, version: int, cut: Cut, domains: range, wanted: list[bool]
) -> dict[int, Bits]:
    """Some domains at a version, as far as their tensors are wanted."""
    tensors: dict[str, torch.Tensor] = {}
    placements = []
    for domain in domains:
        for row in cut.tiling.box_rows(domain):
            tensor, box = cut.tiling.box(row, cut.schema)
            if wanted[tensor]:
                spec = cut.schema.tensors[tensor]
                tensors[str(row)] = empty(spec.dtype, box.shape)
                placements.append(Placement(spec.name, box, str(row), 0, contiguous_strides(box.shape)))
    if tensors:
        materialize(history, version, tensors, layout=Layout(placements))
    found = {}
    for domain in domains:
        bits: npt.NDArray[Any] = np.empty(int(cut.tiling.volume[domain]), cut.dtype(domain))
        for row in cut.tiling.box_rows(domain):
            part = tensors.pop(str(row), None)
            if part is not None:
                position = int(cut.tiling.box_position[row])
                bits[position : position + part.numel()] = numpy_bits(part).reshape(-1)
        found[domain] = bits
    return found


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Turns a domain's elements at both versions into its result and the digests of the base's tensors in it."""

    cut: Cut
    kept: list[bool]
    recut: bool
    scratch: threading.local

    def __call__(self, domain: int, old: Bits, new: Bits) -> tuple[DomainResult, dict[int, Digest]]:
        whole = all(self.kept[row] for row in self.cut.tensors_of(domain))
        before, after = self._digests(old, domain), self._digests(new, domain)
        before = {row: digest for row, digest in before.items() if self.kept[row]}
        chunk, changed = self._chunk(domain, old, new, whole)
        result = DomainResult(
            domain=domain,
            chunks=() if chunk is None else (chunk,),
            changed=changed,
            moved=after,
            result=_sum(after),
            base=_sum(before) if whole else None,
            listed=self.recut or chunk is not None,
            changes=None,
        )
        return result, before

    def _digests(self, bits: Bits, domain: int) -> dict[int, Digest]:
        """Digest of each tensor's part."""
        found: dict[int, Digest] = {}
        for piece, part in GivenSource(self.cut, {domain: bits}).pieces(domain):
            add_piece(self.cut, piece, part, found.setdefault(piece.tensor, zero()))
        return found

    def _chunk(self, domain: int, old: Bits, new: Bits, whole: bool) -> tuple[PackedChunk | None, int]:
        """The smaller chunk of what differs, and how many elements do; those without a base count, too."""
        if not hasattr(self.scratch, "diff"):
            self.scratch.diff = DiffScratch()
        cut, source = self.cut, GivenSource(self.cut, {domain: new})
        positions, steps, changed = [], [], 0
        for piece in cut.pieces(domain):
            here = slice(piece.position, piece.position + piece.volume)
            if not self.kept[piece.tensor]:
                changed += piece.volume
                continue
            for at, was, now in diff(old[here], new[here], piece.position, self.scratch.diff):
                positions.append(at)
                steps.append(step_between(was, now, cut.order(domain)))
                changed += len(at)
        if whole and not changed:
            return None, 0
        if not whole:
            return encode_dense(cut, source, domain), changed
        step = encode_given_steps(cut, domain, np.concatenate(positions), np.concatenate(steps))
        return or_dense(cut, source, step), changed


def _sum(digests: dict[int, Digest]) -> Digest:
    total = zero()
    for digest in digests.values():
        total += digest
    return total


def _check_base(
    sums: npt.NDArray[np.uint64], kept: list[bool], after: Schema, before: Schema, base: Stored
) -> None:
    expected = base.manifest.tensors.lanes
    for row, spec in enumerate(after):
        if kept[row] and (sums[row] != expected[before.index(spec.name)]).any():
            raise ChecksumError(
                "what was read is not the base",
                kind="content-mismatch",
                where=f"version {base.manifest.version}, {spec.name!r}",
            )
