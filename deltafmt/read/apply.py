"""Changes of one domain onto live memory: written, proven, and undone where a step fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from deltafmt.errors import BaseMismatchError, ChecksumError
from deltafmt.format.constants import DENSE
from deltafmt.format.records import Manifest
from deltafmt.kernels.digest import Digest, zero
from deltafmt.read.decode import decode_chunk
from deltafmt.read.fetch import StagedChunk
from deltafmt.read.fold import Folded, fold
from deltafmt.read.live import LiveDomain
from deltafmt.read.views import View

_DECODED_BYTES = 12
"""Positions and what decoding them needs, per element listed."""


@dataclass(slots=True)
class Undo:
    """Old bits of what was written, in the order of writing; filled by several threads."""

    actions: list[Callable[[], None]] = field(default_factory=list)

    def run(self) -> None:
        """Restore, last written first; the log is empty afterwards."""
        while self.actions:
            self.actions[-1]()
            self.actions.pop()


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Digests of domains before and after ways of one tiling, by domain number, two lanes each."""

    before: npt.NDArray[np.uint64]
    known: npt.NDArray[np.bool_]
    after: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, manifests: Sequence[Manifest], domains: int) -> Expected:
        """Raises `ChecksumError` where one way does not start from the content that another led to."""
        before, after = np.zeros((domains, 2), np.uint64), np.zeros((domains, 2), np.uint64)
        known, seen = np.zeros(domains, bool), np.zeros(domains, bool)
        for manifest in manifests:
            table = manifest.domains
            rows = table.domain.astype(np.int64)
            base = np.stack((table.base0, table.base1), axis=1)
            given, fresh = table.base_known == 1, ~seen[rows]
            differ = given & ~fresh & (after[rows] != base).any(axis=1)
            if differ.any():
                raise ChecksumError(
                    "way starts from other content than the way before it leads to",
                    kind="content-mismatch",
                    where=f"version {manifest.version}, domain {int(rows[differ.argmax()])}",
                )
            before[rows[fresh]], known[rows[fresh]] = base[fresh], given[fresh]
            after[rows] = table.lanes
            seen[rows] = True
        return cls(before=before, known=known, after=after)


@dataclass(frozen=True, kw_only=True)
class DomainTask:
    """One domain's chunks of one or more consecutive ways of one tiling, oldest way first."""

    domain: int
    links: Sequence[Sequence[StagedChunk]]
    version: int

    @property
    def weight(self) -> int:
        """Bytes that decoding it takes, about."""
        total = 0
        for chunk in (chunk for link in self.links for chunk in link):
            extra = chunk.head.width if chunk.head.operation == DENSE else _DECODED_BYTES
            total += chunk.head.listed * (chunk.head.width + extra)
        return total


def apply_domain(view: View, task: DomainTask, expected: Expected, undo: Undo | None) -> None:
    """Decode, fold and write one domain, then hold the result against its digest as far as it is held here.

    What was written is in `undo` when this returns or raises. Raises `FormatError` for a chunk that cannot
    be decoded, `BaseMismatchError` for a value behind a cast that is no image of its source (both before
    a write), `ChecksumError` where the outcome is not the version's.
    """
    shape, domain = view.shape(task.domain), task.domain
    decoded = (
        [decode_chunk(c.head, c.columns, c.data, shape, where=c.where) for c in chunks]
        for chunks in task.links
        if chunks
    )
    folded = fold(decoded, where=f"version {task.version}, domain {domain}")
    live = view.domain(domain)
    if folded.dense is None or undo is not None:
        _check_casts(view, live, domain)
    if folded.dense is not None:
        _write_dense(live, folded.dense, undo)
        digest = None
    else:
        digest = _write_changes(live, folded, undo)
    if not view.table.full[domain]:
        return
    if digest is not None and expected.known[domain]:
        wrong = digest != expected.after[domain] - expected.before[domain]
    else:
        wrong = live.digest() != expected.after[domain]
    if wrong.any():
        raise ChecksumError(
            "the weights would not be those of the version: what was live is not the base, or the version is damaged",
            kind="content-mismatch",
            where=f"version {task.version}, {view.name(domain)}",
        )


def _check_casts(view: View, live: LiveDomain, domain: int) -> None:
    if not live.cast_exact:
        raise BaseMismatchError(
            "a live value is no image of the source dtype of its cast",
            kind="cast-inexact",
            where=view.name(domain),
        )


def _write_dense(live: LiveDomain, bits: npt.NDArray[Any], undo: Undo | None) -> None:
    if undo is None:
        live.write(bits)
        return
    old = np.zeros_like(bits)
    live.read(old)
    undo.actions.append(lambda: live.write(old))
    live.write(bits)


def _write_changes(live: LiveDomain, folded: Folded, undo: Undo | None) -> Digest:
    """By how much the digest of the domain has moved."""
    digest = zero()
    for changes, steps in ((folded.set, False), (folded.step, True)):
        if changes is None:
            continue
        positions, values = changes
        old = None if undo is None else np.zeros_like(values)
        if steps:
            live.step(positions, values, folded.order, old, digest)
        else:
            live.set(positions, values, old, digest)
        if undo is not None:
            undo.actions.append(_restore(live, positions, old))
    return digest


def _restore(live: LiveDomain, positions: Any, old: Any) -> Callable[[], None]:
    return lambda: live.set(positions, old, None, zero())
