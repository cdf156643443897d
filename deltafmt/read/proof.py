"""Live bits held against the digests of a version: what is proven, and what only other ranks can prove."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltafmt.errors import ChecksumError, NotFoundError
from deltafmt.format.records import DomainTable, Manifest
from deltafmt.kernels.digest import Digest
from deltafmt.read.history import History, Stored
from deltafmt.read.live import LiveDomain
from deltafmt.read.pool import run_bounded
from deltafmt.read.replica import Replica
from deltafmt.read.views import View


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What a scan of the live bits has shown for a version.

    `proven_elements` agree with their digests; the others stand in domains of which this receiver holds a
    part only, and `unproven` names their tensors.
    """

    version: int
    proven_elements: int
    unproven_elements: int
    unproven: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether every local element is proven."""
        return not self.unproven_elements


def prove(replica: Replica, stored: Stored) -> Proof:
    """Digest every live element once; `ChecksumError` (`content-mismatch`) names the first tensor that differs.

    Tensors that are held whole are held against the version's tensor digests, the rest against digests of
    the domains that are held whole.
    """
    manifest = stored.manifest
    view = replica.views.view(manifest, manifest.schema)
    held = held_elements(view)
    volumes = view.schema.volumes
    whole = (held == volumes) & (volumes > 0)
    sums, partial = _scan(view, whole, replica.options.threads, np.flatnonzero(view.table.touched))
    expected = manifest.tensors.lanes
    wrong = whole & (sums != expected).any(axis=1)
    if wrong.any():
        raise _differs(manifest, repr(view.schema.names[int(wrong.argmax())]))
    domains = domain_digests(replica.history, stored, set(partial))
    proven = np.where(whole, volumes, 0)
    for domain, digest in partial.items():
        if domain not in domains:
            continue
        if (digest != domains[domain]).any():
            raise _differs(manifest, view.name(domain))
        boxes = view.tiling.box_rows(domain)
        rows = slice(boxes.start, boxes.stop)
        loose = ~whole[view.tiling.box_tensor[rows]]
        np.add.at(proven, view.tiling.box_tensor[rows][loose], view.tiling.box_volume[rows][loose])
    missing = held - proven
    return Proof(
        version=manifest.version,
        proven_elements=int(proven.sum()),
        unproven_elements=int(missing.sum()),
        unproven=tuple(view.schema.names[row] for row in np.flatnonzero(missing).tolist()),
    )


def audit(replica: Replica, stored: Stored, turn: int) -> None:
    """Digest a few of the domains that a version changed and that are held whole, other ones at each turn.

    A step cannot tell whether the bits that it moved were right; this finds out, a part at a time. Raises
    `ChecksumError` (`content-mismatch`) for a domain that is not the version's.
    """
    manifest, count = stored.manifest, replica.options.audit_domains
    view = replica.views.view(manifest, manifest.schema)
    listed = manifest.domains.domain
    rows = np.flatnonzero(view.table.full[listed])
    for k in range(min(count, len(rows))):
        row = int(rows[(turn * count + k) % len(rows)])
        domain = int(listed[row])
        found = view.domain(domain).digest()
        expected = (manifest.domains.digest0[row], manifest.domains.digest1[row])
        if tuple(found) != expected:
            raise _differs(manifest, view.name(domain))


def domain_digests(history: History, stored: Stored, domains: set[int]) -> dict[int, Digest]:
    """Digests of domains at a version, each from the newest manifest that lists it.

    Goes back along the versions' first ways while the tiling stays, as far as retention has left them, and
    there to an anchor; a domain whose manifest is gone is absent.
    """
    known: dict[int, Digest] = {}
    tiling = stored.manifest.tiling
    while len(known) < len(domains) and stored.manifest.tiling == tiling:
        _collect(stored.manifest.domains, domains, known)
        if stored.manifest.base is None:
            break
        try:
            base = history.first_way(stored.manifest.base)
        except NotFoundError:
            for way in history.further_ways(stored.manifest.version):
                if way.manifest.base is None and way.manifest.tiling == tiling:
                    _collect(way.manifest.domains, domains, known)
            break
        if base.digest != stored.manifest.base_digest:
            break
        stored = base
    return known


def _collect(table: DomainTable, domains: set[int], known: dict[int, Digest]) -> None:
    """Take those of `domains` that are not known yet from a manifest's table."""
    wanted = np.array(sorted(domains - known.keys()), np.int64)
    rows = np.flatnonzero(np.isin(table.domain, wanted))
    known.update(zip(table.domain[rows].tolist(), table.lanes[rows], strict=True))


def held_elements(view: View) -> npt.NDArray[np.int64]:
    """Elements of each tensor of the schema that are held here, second copies not counted."""
    table = view.table
    held = np.zeros(len(view.schema), np.int64)
    extent = np.prod(table.high - table.low, axis=1, dtype=np.int64)
    np.add.at(held, table.source[table.counted], extent[table.counted])
    return held


def scan_tensors(
    view: View, *, threads: int, only: npt.NDArray[np.bool_] | None = None
) -> npt.NDArray[np.uint64]:
    """Digest sums of the live elements of each tensor of the schema, two lanes each.

    With `only` just domains that hold one of these tensors are read: the others' sums then mean nothing.
    """
    domains = np.flatnonzero(view.table.touched)
    if only is not None:
        tiling = view.tiling
        chosen = np.zeros(len(tiling), bool)
        chosen[tiling.domains_of_boxes()[only[tiling.box_tensor]]] = True
        domains = domains[chosen[domains]]
    return _scan(view, np.ones(len(view.schema), bool), threads, domains)[0]


def _scan(
    view: View, whole: npt.NDArray[np.bool_], threads: int, domains: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint64], dict[int, Digest]]:
    """Digest sums per tensor, and digests of domains that are held whole and contain a tensor that is not."""
    table = view.table

    def scan(domain: int) -> tuple[int, npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        live = view.domain(domain)
        if not live.cast_exact:
            raise ChecksumError(
                "a live value is no image of the source dtype of its cast",
                kind="content-mismatch",
                where=view.name(domain),
            )
        segments = table.segment_rows(domain)
        segment = slice(segments.start, segments.stop)
        _check_copies(view, domain, live, segments)
        rows, of_segment = np.unique(table.source[segment], return_inverse=True)
        found = np.zeros((len(rows), 2), np.uint64)
        np.add.at(found, of_segment, live.scan())
        return domain, rows, found

    sums = np.zeros((len(view.schema), 2), np.uint64)
    partial: dict[int, Digest] = {}
    for domain, rows, found in run_bounded(scan, domains.tolist(), threads=threads):
        sums[rows] += found
        if table.full[domain] and not whole[rows].all():
            partial[domain] = found.sum(axis=0, dtype=np.uint64)
    return sums, partial


def _check_copies(view: View, domain: int, live: LiveDomain, segments: range) -> None:
    """Second copies of an element are not digested; they must be equal to the one that is."""
    table = view.table
    counted = table.counted[segments.start : segments.stop]
    copies = np.flatnonzero(~counted)
    if not len(copies):
        return
    shape = view.shape(domain)
    counts = np.zeros(shape.volume, shape.dtype)
    live.restricted(counted).read(counts)
    # Boxes share no element: the first copies in all of them are read at once, then the second ones.
    boxes = np.searchsorted(table.box_segment, copies + segments.start, side="right")
    turns = np.arange(len(copies)) - np.searchsorted(boxes, boxes)
    for turn in range(int(turns.max()) + 1):
        chosen = np.zeros(len(counted), bool)
        chosen[copies[turns == turn]] = True
        bits = counts.copy()
        live.restricted(chosen).read(bits)
        if (bits != counts).any():
            raise ChecksumError(
                "two live copies of one element differ", kind="content-mismatch", where=view.name(domain)
            )


def _differs(manifest: Manifest, where: str) -> ChecksumError:
    return ChecksumError(
        "live weights are not those of the version",
        kind="content-mismatch",
        where=f"version {manifest.version}, {where}",
    )
