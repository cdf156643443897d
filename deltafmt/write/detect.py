"""Which elements of a domain differ from what was published last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from deltafmt.kernels.changes import digest_changes, digest_rows, scatter
from deltafmt.kernels.diff import DiffScratch, diff
from deltafmt.kernels.digest import Digest, digest_run, zero
from deltafmt.schema import TensorSpec
from deltafmt.tensors import numpy_bits
from deltafmt.write.cut import Bits, Cut, Piece
from deltafmt.write.source import LiveSource


class SnapshotDetector:
    """Compares with a copy of what was published last: exact for every change, whoever made it.

    Costs the memory of the published tensors.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def __repr__(self) -> str:
        return f"SnapshotDetector({len(self.tensors)} tensors, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def flats(self, cut: Cut) -> Baseline:
        """The copy of each tensor of a schema as flat bits; None where there is none of that dtype and shape."""
        return [
            self._flat(spec, cut.copy_shape(row)) if spec.alias_of is None else None
            for row, spec in enumerate(cut.schema)
        ]

    def _flat(self, spec: TensorSpec, shape: tuple[int, ...]) -> Bits | None:
        tensor = self.tensors.get(spec.name)
        same = tensor is not None and tuple(tensor.shape) == shape
        if tensor is None or not same or str(tensor.dtype).removeprefix("torch.") != spec.dtype:
            return None
        return numpy_bits(tensor).reshape(-1)


Baseline = list[Bits | None]
"""Flat bits of each tensor of a schema, as published last; None for an alias or a tensor that is new."""


@dataclass(slots=True, kw_only=True)
class Detected:
    """What one domain turned out to be.

    `dense` holds all bits of the result where a part of the domain has no base, and `dense_changed` counts
    what changed then. `moved` is the change of
    each tensor's digest, `result` the domain's own, `base` that of what was published last.
    """

    domain: int
    positions: npt.NDArray[np.uint32]
    old: Bits
    new: Bits
    dense: Bits | None = None
    moved: dict[int, Digest] = field(default_factory=dict)
    result: Digest
    base: Digest | None
    dense_changed: int = 0

    @property
    def changed(self) -> int:
        """Elements whose bits differ from the base's; elements without a base count as well."""
        return len(self.positions) if self.dense is None else self.dense_changed


def detect(
    cut: Cut, source: LiveSource, baseline: Baseline, domain: int, base: Digest | None, scratch: DiffScratch
) -> Detected:
    """Compare a domain with the baseline. `base` is the baseline's digest of the domain, if it is known."""
    if any(baseline[row] is None for row in cut.tensors_of(domain)):
        return _detect_new(cut, source, baseline, domain, scratch)
    found: list[tuple[npt.NDArray[np.uint32], Bits, Bits]] = []
    moved: dict[int, Digest] = {}
    for piece, bits in source.pieces(domain):
        changes = diff(_old(cut, piece, baseline), bits, piece.position, scratch)
        for positions, old, new in changes:
            digest = moved.setdefault(piece.tensor, zero())
            digest_changes(piece.flat(positions), old, new, cut.salts[piece.tensor], digest)
        found += changes
    positions, old, new = _joined(found, cut, domain)
    if base is None and found:
        base = digest_of(cut, baseline, domain)
    total = zero() if base is None else base.copy()
    for digest in moved.values():
        total += digest
    return Detected(
        domain=domain, positions=positions, old=old, new=new, moved=moved, result=total, base=base
    )


def take_all(cut: Cut, source: LiveSource, domain: int) -> Detected:
    """All elements of a domain, for an anchor."""
    return _detect_new(cut, source, [None] * len(cut.schema), domain, DiffScratch())


def digest_of(cut: Cut, baseline: Baseline, domain: int) -> Digest:
    """The digest of a domain of the baseline, by reading all of it."""
    digest = zero()
    for piece in cut.pieces(domain):
        add_piece(cut, piece, _old(cut, piece, baseline), digest)
    return digest


def add_piece(cut: Cut, piece: Piece, bits: Bits, digest: Digest) -> None:
    """Add the digest of a piece with the given bits."""
    if piece.is_run:
        digest_run(bits, int(piece.starts[0]), cut.salts[piece.tensor], digest)
    else:
        digest_rows(bits, piece.starts, piece.length, cut.salts[piece.tensor], digest)


def copy_live(
    cut: Cut, source: LiveSource, into: Mapping[str, torch.Tensor], domain: int
) -> dict[int, Digest]:
    """Copy a domain's live bits into flat tensors; returns what each tensor's digest gained."""
    sums: dict[int, Digest] = {}
    for piece, bits in source.pieces(domain):
        spec = cut.schema.tensors[piece.tensor]
        flat = numpy_bits(into[spec.name]).reshape(-1)
        if piece.is_run or piece.local is not None:
            target = piece.copied(flat, spec.shape)
            target[:] = bits
        else:
            inside = (piece.starts[:, None] + np.arange(piece.length)).reshape(-1)
            flat[inside] = bits
            target = bits
        add_piece(cut, piece, target, sums.setdefault(piece.tensor, zero()))
    return sums


def put_changes(
    cut: Cut, baseline: Baseline, domain: int, positions: npt.NDArray[np.uint32], new: Bits
) -> None:
    """Write detected changes into the baseline."""
    for piece in cut.pieces(domain):
        low, high = np.searchsorted(positions, (piece.position, piece.position + piece.volume))
        flat = baseline[piece.tensor]
        if high > low:
            assert flat is not None
            scatter(flat, piece.place(positions[low:high]), new[low:high])


def _detect_new(
    cut: Cut, source: LiveSource, baseline: Baseline, domain: int, scratch: DiffScratch
) -> Detected:
    """A domain with a part that has no base: all bits are taken."""
    dense = np.empty(int(cut.tiling.volume[domain]), cut.dtype(domain))
    total = zero()
    moved: dict[int, Digest] = {}
    changed = 0
    for piece, bits in source.pieces(domain):
        here = slice(piece.position, piece.position + piece.volume)
        dense[here] = bits
        own = zero()
        add_piece(cut, piece, dense[here], own)
        total += own
        tensor = moved.setdefault(piece.tensor, zero())
        if baseline[piece.tensor] is None:
            tensor += own
            changed += piece.volume
            continue
        for at, old, new in diff(_old(cut, piece, baseline), dense[here], piece.position, scratch):
            digest_changes(piece.flat(at), old, new, cut.salts[piece.tensor], tensor)
            changed += len(at)
    nothing = dense[:0]
    return Detected(
        domain=domain,
        positions=np.empty(0, np.uint32),
        old=nothing,
        new=nothing,
        dense=dense,
        dense_changed=changed,
        moved=moved,
        result=total,
        base=None,
    )


def _old(cut: Cut, piece: Piece, baseline: Baseline) -> Bits:
    flat = baseline[piece.tensor]
    assert flat is not None
    return piece.copied(flat, cut.schema.tensors[piece.tensor].shape)


def _joined(
    found: list[tuple[npt.NDArray[np.uint32], Bits, Bits]], cut: Cut, domain: int
) -> tuple[npt.NDArray[np.uint32], Bits, Bits]:
    if not found:
        empty = np.empty(0, cut.dtype(domain))
        return np.empty(0, np.uint32), empty, empty
    if len(found) == 1:
        return found[0]
    positions, old, new = zip(*found, strict=True)
    return np.concatenate(positions), np.concatenate(old), np.concatenate(new)
