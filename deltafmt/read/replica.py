"""Local tensors that follow a lineage: chunks onto live memory, checked, and undone where that fails."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltafmt.errors import BaseMismatchError, ChecksumError, LayoutError, UnsupportedError
from deltafmt.format.constants import DENSE
from deltafmt.format.records import Manifest
from deltafmt.kernels import apply as cpu
from deltafmt.kernels.digest import Digest, zero
from deltafmt.layout import Layout, Placement, TargetInfo
from deltafmt.read.decode import DomainShape, decode_chunk
from deltafmt.read.fetch import StagedChunk, fetch_chunks
from deltafmt.read.fold import Folded, fold
from deltafmt.read.history import History, Stored
from deltafmt.read.plan import LinkPlan, plan_link
from deltafmt.schema import Schema
from deltafmt.segments import SegmentTable, make_segments
from deltafmt.tensors import dtype_name
from deltafmt.tiling import Tiling

BATCH_BYTES = 256 << 20
"""Stored bytes that a chain from nothing holds at once; nothing is undone there, so nothing need wait."""


def default_threads() -> int:
    """Worker threads where the caller does not say."""
    return max(1, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """One tiling seen from the local tensors."""

    schema: Schema
    tiling: Tiling
    table: SegmentTable

    def shape(self, domain: int) -> DomainShape:
        rows = slice(int(self.tiling.domain_box[domain]), int(self.tiling.domain_box[domain + 1]))
        return DomainShape(
            width=int(self.tiling.widths[domain]),
            box_position=self.tiling.box_position[rows],
            box_volume=self.tiling.box_volume[rows],
        )


@dataclass(frozen=True, kw_only=True)
class StagedLink:
    """The chunks of one way, fetched and checked."""

    stored: Stored
    mapped: Mapped
    chunks: list[StagedChunk]

    @property
    def manifest(self) -> Manifest:
        return self.stored.manifest

    @property
    def undo_bytes(self) -> int:
        """What undoing this link may take at most."""
        return sum(
            chunk.head.listed * (chunk.head.width + (0 if chunk.head.operation == DENSE else 4))
            for chunk in self.chunks
        )


@dataclass(slots=True)
class Undo:
    """Old bits of what was written, in the order of writing."""

    actions: list[Callable[[], None]] = field(default_factory=list)

    def run(self) -> None:
        """Restore, last written first; the log is empty afterwards."""
        while self.actions:
            self.actions[-1]()
            self.actions.pop()


class Replica:
    """Local tensors, where canonical elements stand in them, and the machinery that moves versions in.

    `targets` are kept and written in place; they must stay where they are in memory. Which version they
    hold is the caller's business.
    """

    def __init__(
        self, history: History, targets: Mapping[str, torch.Tensor], layout: Layout | None = None, *, threads: int | None = None
    ) -> None:
        self.history = history
        self.targets, self._names = _distinct(targets)
        self.threads = threads or default_threads()
        self._layout = None if layout is None else _retarget(layout, self._names)
        self._mapped: dict[bytes, Mapped] = {}
        for name, tensor in self.targets.items():
            if tensor.device.type != "cpu":
                raise UnsupportedError(
                    "tensors on this device are not supported yet", kind="device-unsupported", where=f"{name!r} on {tensor.device}"
                )

    @cached_property
    def infos(self) -> dict[str, TargetInfo]:
        """What a layout is validated against."""
        return {
            name: TargetInfo(dtype_name(tensor), tuple(tensor.shape), tuple(tensor.stride()))
            for name, tensor in self.targets.items()
        }

    def addresses(self) -> npt.NDArray[np.int64]:
        """Addresses of the targets' first elements, as of now."""
        return np.array([tensor.data_ptr() for tensor in self.targets.values()], np.int64)

    def mapped(self, manifest: Manifest) -> Mapped:
        """The manifest's tiling through the layout, validated; computed once per tiling."""
        if manifest.tiling not in self._mapped:
            schema = self.history.schema(manifest.schema)
            tiling = self.history.tiling(manifest.tiling, manifest.schema)
            layout = self._layout if self._layout is not None else self._by_name(schema)
            layout.validate(schema, self.infos)
            self._mapped[manifest.tiling] = Mapped(
                schema=schema, tiling=tiling, table=make_segments(schema, tiling, layout, self.infos)
            )
        return self._mapped[manifest.tiling]

    def _by_name(self, schema: Schema) -> Layout:
        infos = {name: self.infos[self._names[name]] for name in self._names}
        return _retarget(Layout.by_name(schema, infos), self._names)

    def plan(self, stored: Stored) -> LinkPlan:
        """The chunks of a way that these tensors need."""
        return plan_link(stored.manifest, self.mapped(stored.manifest).table)

    def stage(self, path: Iterable[Stored]) -> list[StagedLink]:
        """Fetch and check every needed chunk of a path; live tensors are not touched."""
        plans = [(stored, self.plan(stored)) for stored in path]
        return [self._staged(stored, plan) for stored, plan in plans]

    def _staged(self, stored: Stored, plan: LinkPlan) -> StagedLink:
        chunks = list(fetch_chunks(self.history.store, plan))
        return StagedLink(stored=stored, mapped=self.mapped(stored.manifest), chunks=chunks)

    def apply(self, links: Sequence[StagedLink], undo: Undo | None) -> None:
        """Write staged links, consecutive ones of one tiling folded into one pass over memory.

        With `undo`, a failure restores every bit before it is raised. Raises `ChecksumError` where a fully
        held domain does not end as its digest says, `BaseMismatchError` for a value behind a cast that is
        no image of its source, `FormatError` for a chunk that cannot be decoded.
        """
        try:
            for run in _runs(links):
                self._apply_run(run, undo)
        except BaseException:
            if undo is not None:
                undo.run()
            raise

    def load(self, path: Sequence[Stored]) -> None:
        """Write a whole path that begins with an anchor, chunk by chunk as they arrive.

        Nothing can be undone: after a failure the tensors hold no version.
        """
        for stored in path:
            self.mapped(stored.manifest)
        anchor, *deltas = path
        self._load_anchor(anchor)
        for batch in self._batches(deltas):
            self.apply([self._staged(stored, plan) for stored, plan in batch], None)

    def _batches(self, path: Sequence[Stored]) -> Iterator[list[tuple[Stored, LinkPlan]]]:
        batch: list[tuple[Stored, LinkPlan]] = []
        size = 0
        for stored in path:
            plan = self.plan(stored)
            if batch and size + plan.nbytes > BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append((stored, plan))
            size += plan.nbytes
        if batch:
            yield batch

    def _load_anchor(self, stored: Stored) -> None:
        mapped, addresses = self.mapped(stored.manifest), self.addresses()

        def load(chunk: StagedChunk) -> None:
            domain = chunk.head.domain
            decoded = decode_chunk(chunk.head, chunk.columns, chunk.data, mapped.shape(domain), where=chunk.where)
            view = cpu.DomainView(mapped.table, domain, addresses, chunk.head.width)
            cpu.apply_dense(view, decoded.values)
            self._check_result(mapped, view, domain, stored.manifest, decoded.values)

        run_bounded(load, fetch_chunks(self.history.store, self.plan(stored)), self.threads)

    def _apply_run(self, run: Sequence[StagedLink], undo: Undo | None) -> None:
        mapped, addresses = run[0].mapped, self.addresses()
        by_domain: dict[int, list[list[StagedChunk]]] = defaultdict(lambda: [[] for _ in run])
        for number, link in enumerate(run):
            for chunk in link.chunks:
                by_domain[chunk.head.domain][number].append(chunk)

        def work(item: tuple[int, list[list[StagedChunk]]]) -> None:
            domain, links = item
            shape = mapped.shape(domain)
            folded = fold(
                (
                    [decode_chunk(c.head, c.columns, c.data, shape, where=c.where) for c in chunks]
                    for chunks in links
                    if chunks
                ),
                where=f"version {run[-1].manifest.version}, domain {domain}",
            )
            view = cpu.DomainView(mapped.table, domain, addresses, shape.width)
            digest = self._write(mapped, view, domain, folded, shape, undo)
            expected = _expected_change([link.manifest for link in run], domain)
            if folded.dense is not None or expected is None:
                self._check_result(mapped, view, domain, run[-1].manifest, np.empty(0, shape.dtype))
            elif mapped.table.full[domain] and (digest != expected).any():
                raise _content_mismatch(run[-1].manifest, mapped, domain)

        run_bounded(work, by_domain.items(), self.threads)

    def _write(
        self, mapped: Mapped, view: cpu.DomainView, domain: int, folded: Folded, shape: DomainShape, undo: Undo | None
    ) -> Digest:
        digest = zero()
        if not cpu.cast_exact(view, np.empty(0, shape.dtype)):
            raise BaseMismatchError(
                "a live value is no image of the source dtype of its cast",
                kind="cast-inexact",
                where=_first_name(mapped, domain),
            )
        if folded.dense is not None:
            if undo is not None:
                old = np.zeros(shape.volume, shape.dtype)
                cpu.gather_dense(view, old)
                undo.actions.append(lambda: cpu.apply_dense(view, old))
            cpu.apply_dense(view, folded.dense)
            return digest
        for changes, steps in ((folded.set, False), (folded.step, True)):
            if changes is None:
                continue
            positions, values = changes
            before = None if undo is None else np.zeros_like(values)
            if steps:
                cpu.apply_step(view, positions, values, folded.order, before, digest)
            else:
                cpu.apply_set(view, positions, values, before, digest)
            if undo is not None:
                undo.actions.append(_restore(view, positions, before))
        return digest

    def _check_result(self, mapped: Mapped, view: cpu.DomainView, domain: int, manifest: Manifest, like: Any) -> None:
        if not mapped.table.full[domain]:
            return
        expected = result_digest(manifest, domain)
        found = zero()
        cpu.scan(view, found, like[:0])
        if expected is not None and (found != expected).any():
            raise _content_mismatch(manifest, mapped, domain)

    def scan_tensors(self, manifest: Manifest) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_], dict[int, Digest]]:
        """Digest every live element, once.

        Returns sums per tensor of the schema (tensors, 2), which tensors are held whole, and the digests of
        fully held domains that contain a tensor held in part.
        """
        mapped, addresses = self.mapped(manifest), self.addresses()
        table = mapped.table
        held = np.zeros(len(mapped.schema), np.int64)
        extent = np.prod((table.high - table.low), axis=1, dtype=np.int64)
        np.add.at(held, table.source[table.counted], extent[table.counted])
        whole = np.array([n == spec.volume for n, spec in zip(held.tolist(), mapped.schema, strict=True)], bool)
        sums = np.zeros((len(mapped.schema), 2), np.uint64)
        parts: dict[int, Digest] = {}

        def work(domain: int) -> list[tuple[int, Digest]]:
            view = cpu.DomainView(table, domain, addresses, int(mapped.tiling.widths[domain]))
            like = np.empty(0, f"<u{view.width}")
            found = []
            rows = np.array(table.segment_rows(domain), np.int64)
            for row in np.unique(table.source[rows]).tolist():
                digest = zero()
                cpu.scan(view.only(table.source[rows] == row), digest, like)
                found.append((row, digest))
            if table.full[domain] and not whole[table.source[rows]].all():
                parts[domain] = np.sum([digest for _, digest in found], axis=0, dtype=np.uint64)
            return found

        for found in run_bounded(work, np.flatnonzero(table.touched).tolist(), self.threads):
            for row, digest in found:
                sums[row] += digest
        return sums, whole, parts


def result_digest(manifest: Manifest, domain: int) -> Digest | None:
    """The digest that a domain has after this way; None where the manifest does not list it."""
    row = int(np.searchsorted(manifest.domains.domain, domain))
    if row == len(manifest.domains) or int(manifest.domains.domain[row]) != domain:
        return None
    return np.array([manifest.domains.digest0[row], manifest.domains.digest1[row]], np.uint64)


def _expected_change(manifests: Sequence[Manifest], domain: int) -> Digest | None:
    """By how much the digest of a domain moves over several ways; None where a base is unknown."""
    total = zero()
    for manifest in manifests:
        domains = manifest.domains
        row = int(np.searchsorted(domains.domain, domain))
        if row == len(domains) or int(domains.domain[row]) != domain:
            continue
        if not domains.base_known[row]:
            return None
        total += np.array(
            [domains.digest0[row] - domains.base0[row], domains.digest1[row] - domains.base1[row]], np.uint64
        )
    return total


def _restore(view: cpu.DomainView, positions: Any, before: Any) -> Callable[[], None]:
    return lambda: cpu.apply_set(view, positions, before, None, zero())


def _content_mismatch(manifest: Manifest, mapped: Mapped, domain: int) -> ChecksumError:
    return ChecksumError(
        "the weights would not be those of the version: what was live is not the base, or the version is damaged",
        kind="content-mismatch",
        where=f"version {manifest.version}, domain {domain}, {_first_name(mapped, domain)}",
    )


def _first_name(mapped: Mapped, domain: int) -> str:
    return repr(mapped.schema.tensors[int(mapped.tiling.box_tensor[mapped.tiling.domain_box[domain]])].name)


def _runs(links: Sequence[StagedLink]) -> Iterator[list[StagedLink]]:
    """Consecutive links that may be folded: one tiling, and one order of bit patterns in each domain."""
    run: list[StagedLink] = []
    orders: dict[int, int] = {}
    for link in links:
        own = {chunk.head.domain: chunk.head.order for chunk in link.chunks}
        differs = any(orders.get(domain, order) != order for domain, order in own.items())
        if run and (differs or link.manifest.tiling != run[-1].manifest.tiling):
            yield run
            run, orders = [], {}
        run.append(link)
        orders.update(own)
    if run:
        yield run


def _distinct(targets: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Targets by one name per piece of memory, and for every given name the one that stands for it."""
    owner: dict[object, str] = {}
    kept: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
    for name, tensor in targets.items():
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        names[name] = owner.setdefault(place, name) if tensor.numel() else name
        if names[name] == name:
            kept[name] = tensor
    _refuse_overlap(kept)
    return kept, names


def _refuse_overlap(targets: Mapping[str, torch.Tensor]) -> None:
    """Two contiguous tensors that share some memory would each undo the other's elements."""
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size(), name)
        for name, tensor in targets.items()
        if tensor.numel() and tensor.is_contiguous()
    )
    for (_, stop, first), (start, _, second) in zip(spans, spans[1:], strict=False):
        if start < stop:
            raise LayoutError(
                "two local tensors share memory without being the same tensor",
                kind="target-strides",
                where=f"{first!r} and {second!r}",
            )


def _retarget(layout: Layout, names: Mapping[str, str]) -> Layout:
    """The layout with every target under the name that stands for its memory."""
    if all(name == own for name, own in names.items()):
        return layout
    placements = (
        Placement(p.source, p.source_box, names.get(p.target, p.target), p.offset, p.strides) for p in layout.placements
    )
    return Layout(
        placements,
        untouched=((names.get(name, name), box) for name, box in layout.untouched),
        casts={names.get(name, name): source for name, source in layout.casts.items()},
    )


def run_bounded(work: Callable[[Any], Any], items: Iterable[Any], threads: int) -> list[Any]:
    """Results of `work` on all items, by worker threads, few items ahead; order is that of completion.

    The first failure stops the rest and is raised when every task under way has ended.
    """
    results: list[Any] = []
    with ThreadPoolExecutor(threads, "deltafmt-work") as pool:
        pending: set[Future[Any]] = set()
        try:
            for item in items:
                pending.add(pool.submit(work, item))
                if len(pending) >= 2 * threads:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    results += [future.result() for future in done]
            results += [future.result() for future in wait(pending).done]
        finally:
            for future in pending:
                future.cancel()
    return results
