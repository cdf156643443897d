"""Which elements of a domain differ from what was published last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from deltafmt.kernels.changes import digest_changes, digest_rows, scatter
from deltafmt.kernels.diff import DiffScratch, find
from deltafmt.kernels.digest import Digest, digest_run, zero
from deltafmt.tensors import numpy_bits
from deltafmt.write.cut import Bits, Cut, Piece
from deltafmt.write.source import Source

_CROWDED = 128
"""A domain of which more than one element in so many changed may be too much to hold."""


Baseline = list[Bits | None]
"""Flat bits of each tensor of a schema, as published last; None for an alias or a tensor that is new."""


Found = tuple[npt.NDArray[np.uint32], Bits, Bits]
"""Positions, old bits and new bits of what differs."""


@dataclass(slots=True, kw_only=True)
class Detected:
    """What one domain turned out to be.

    `positions`, `old` and `new` say what differs; they may lie in scratch that the thread's next detection
    uses again. They are empty where that is too much to hold (`crowded`), and where a part of the domain
    has no base (`whole`). `counted` is the number of changed elements then. `moved` is the change of each
    tensor's digest, `result` the domain's own, `base` that of what was published last.
    """

    domain: int
    positions: npt.NDArray[np.uint32]
    old: Bits
    new: Bits
    whole: bool = False
    crowded: bool = False
    counted: int = 0
    moved: dict[int, Digest] = field(default_factory=dict)
    result: Digest
    base: Digest | None

    @property
    def changed(self) -> int:
        """Elements whose bits differ from the base's; elements without a base count as well."""
        return self.counted if self.whole or self.crowded else len(self.positions)


def detect(
    cut: Cut, source: Source, baseline: Baseline, domain: int, base: Digest | None, scratch: DiffScratch
) -> Detected:
    """Compare a domain with the baseline. `base` is the baseline's digest of the domain, if it is known."""
    if any(baseline[row] is None for row in cut.tensors_of(domain)):
        return _detect_new(cut, source, baseline, domain, scratch)
    moved: dict[int, Digest] = {}
    into = buffers(cut, domain, scratch)
    counted = stop = 0
    for piece, start, stop in changes(cut, source, baseline, domain, into):
        digest = moved.setdefault(piece.tensor, zero())
        _add_changes(cut, piece, _part(into, start, stop), digest)
        counted += stop - start
    if base is None and counted:
        base = digest_of(cut, baseline, domain)
    total = zero() if base is None else base.copy()
    for digest in moved.values():
        total += digest
    crowded = counted > stop
    positions, old, new = _part(into, 0, 0 if crowded else stop)
    return Detected(
        domain=domain,
        positions=positions,
        old=old,
        new=new,
        crowded=crowded,
        counted=counted,
        moved=moved,
        result=total,
        base=base,
    )


def buffers(cut: Cut, domain: int, scratch: DiffScratch) -> Found:
    """Room for the changes of a domain; what does not fit is `crowded`, and dense enough for plain gaps."""
    return scratch.buffers(cut.dtype(domain), int(cut.tiling.volume[domain]) // _CROWDED)


def changes(
    cut: Cut, source: Source, baseline: Baseline, domain: int, into: Found
) -> Iterator[tuple[Piece, int, int]]:
    """What differs in a domain: (piece, start, stop) of places in the buffers, in order of position.

    Each part is put behind the one before, and at the beginning again when the buffers are full; it is
    there until then.
    """
    count = 0
    for piece, bits in source.pieces(domain):
        old, low = _old(cut, piece, baseline), 0
        while True:
            low, stop = find(old, bits, low, piece.position, into, count)
            if stop > count:
                yield piece, count, stop
            if low == len(bits):
                count = stop
                break
            count = 0


def _part(into: Found, start: int, stop: int) -> Found:
    position, old, new = into
    return position[start:stop], old[start:stop], new[start:stop]


def _add_changes(cut: Cut, piece: Piece, here: Found, digest: Digest) -> None:
    positions, old, new = here
    salt = cut.salts[piece.tensor]
    if piece.is_run:
        digest_changes(positions, old, new, salt, digest, int(piece.starts[0]) - piece.position)
    else:
        digest_changes(piece.flat(positions), old, new, salt, digest)


def take_all(cut: Cut, source: Source, domain: int) -> Detected:
    """A domain of which everything is stored, for an anchor."""
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


def copy_live(cut: Cut, source: Source, into: Mapping[str, torch.Tensor], domain: int) -> dict[int, Digest]:
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
            if piece.is_run or piece.local is not None:
                first = int(piece.starts[0]) if piece.local is None else piece.local
                scatter(flat, positions[low:high], first - piece.position, new[low:high])
            else:
                scatter(flat, piece.place(positions[low:high]), 0, new[low:high])


def _detect_new(cut: Cut, source: Source, baseline: Baseline, domain: int, scratch: DiffScratch) -> Detected:
    """A domain with a part that has no base."""
    total = zero()
    moved: dict[int, Digest] = {}
    into = buffers(cut, domain, scratch)
    counted = 0
    for piece, bits in source.pieces(domain):
        own = zero()
        add_piece(cut, piece, bits, own)
        total += own
        tensor = moved.setdefault(piece.tensor, zero())
        if baseline[piece.tensor] is None:
            tensor += own
            counted += piece.volume
            continue
        old, low = _old(cut, piece, baseline), 0
        while low < len(bits):
            low, stop = find(old, bits, low, piece.position, into, 0)
            _add_changes(cut, piece, _part(into, 0, stop), tensor)
            counted += stop
    positions, nothing, _ = _part(into, 0, 0)
    return Detected(
        domain=domain,
        positions=positions,
        old=nothing,
        new=nothing,
        whole=True,
        counted=counted,
        moved=moved,
        result=total,
        base=None,
    )


def _old(cut: Cut, piece: Piece, baseline: Baseline) -> Bits:
    flat = baseline[piece.tensor]
    assert flat is not None
    return piece.copied(flat, cut.schema.tensors[piece.tensor].shape)
