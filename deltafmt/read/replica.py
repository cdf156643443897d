"""Local tensors that follow a lineage: whole ways moved onto live memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from deltafmt.errors import FormatError
from deltafmt.format.links import check_recut
from deltafmt.layout import Layout
from deltafmt.read.apply import DomainTask, Expected, Undo, apply_domain
from deltafmt.read.fetch import StagedChunk, fetch_chunks
from deltafmt.read.history import History, Stored
from deltafmt.read.options import ReadOptions
from deltafmt.read.plan import LinkPlan, plan_link
from deltafmt.read.pool import run_bounded
from deltafmt.read.targets import Targets
from deltafmt.read.views import View, Views

BATCH_BYTES = 64 << 20
"""Stored bytes that are staged at once where nothing has to be on this machine beforehand."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """One way of a path, and what these tensors need of it."""

    stored: Stored
    view: View
    plan: LinkPlan


@dataclass(frozen=True, kw_only=True)
class StagedLink:
    """A link whose chunks are on this machine, checked."""

    link: Link
    chunks: list[StagedChunk]

    @property
    def nbytes(self) -> int:
        return sum(len(chunk.data) for chunk in self.chunks)


class Replica:
    """Local tensors, where canonical elements stand in them, and the machinery that moves versions in.

    Which version they hold is the caller's business.
    """

    def __init__(
        self, history: History, targets: Targets, layout: Layout | None = None, *, options: ReadOptions
    ) -> None:
        self.history = history
        self.views = Views(history, targets, layout)
        self.options = options

    def links(self, path: Sequence[Stored], held: Stored | None = None) -> list[Link]:
        """Plan a path (from `held` where it begins with a delta); targets and layout are validated, and
        nothing is fetched but metadata.
        """
        final = path[-1].manifest.schema
        self.views.check(final)
        result = []
        for before, stored in zip((held, *path), path, strict=False):
            if before is not None and stored.manifest.base is not None:
                self._check_base(stored, before)
            view = self.views.view(stored.manifest, final)
            result.append(Link(stored=stored, view=view, plan=plan_link(stored.manifest, view.table)))
        return result

    def stage(self, links: Iterable[Link], had: Sequence[StagedLink] = ()) -> list[StagedLink]:
        """Fetch and check every needed chunk; live tensors are not touched.

        Of `had`, links staged before, those are taken over that the path still goes through.
        """
        before = {(staged.link.stored.digest, id(staged.link.view)): staged for staged in had}
        return [before.get((link.stored.digest, id(link.view))) or self._staged(link) for link in links]

    def _staged(self, link: Link) -> StagedLink:
        return StagedLink(link=link, chunks=list(self._fetched(link)))

    def _fetched(self, link: Link) -> Iterator[StagedChunk]:
        return fetch_chunks(self.history.store, link.plan, digests=bool(self.history.trust))

    def apply(self, staged: Sequence[StagedLink], undo: Undo | None) -> None:
        """Write staged links, consecutive ones of one tiling folded into one pass over memory.

        With `undo`, a failure restores every bit before it is raised.
        """
        self.views.targets.check_in_place()
        with _restoring(undo):
            for run in _runs(staged):
                self._apply_run(run, undo)
            self.views.targets.synchronize()

    def stream(self, links: Sequence[Link], undo: Undo | None) -> None:
        """Write links as their chunks arrive, each checked before use.

        With `undo`, a failure restores every bit before it is raised; without one the tensors then hold no
        version.
        """
        self.views.targets.check_in_place()
        with _restoring(undo):
            for batch in _batches(links):
                if len(batch) == 1:
                    self._stream_link(batch[0], undo)
                else:
                    self.apply(self.stage(batch), undo)
            self.views.targets.synchronize()

    def _stream_link(self, link: Link, undo: Undo | None) -> None:
        self._run(link.view, [link], _by_domain(self._fetched(link), link), undo)

    def _apply_run(self, run: Sequence[StagedLink], undo: Undo | None) -> None:
        by_domain: dict[int, list[list[StagedChunk]]] = defaultdict(lambda: [[] for _ in run])
        for number, staged in enumerate(run):
            for chunk in staged.chunks:
                by_domain[chunk.head.domain][number].append(chunk)
        version = run[-1].link.stored.manifest.version
        tasks = (DomainTask(domain=d, links=links, version=version) for d, links in by_domain.items())
        self._run(run[-1].link.view, [staged.link for staged in run], tasks, undo)

    def _run(self, view: View, links: Sequence[Link], tasks: Iterable[DomainTask], undo: Undo | None) -> None:
        expected = Expected.of([link.stored.manifest for link in links], len(view.tiling))
        run_bounded(
            lambda task: apply_domain(view, task, expected, undo),
            tasks,
            threads=self.options.threads,
            weigh=lambda task: task.weight,
        )

    def _check_base(self, stored: Stored, held: Stored) -> None:
        # What is held may have come by a further way, cut otherwise than the version itself.
        base = self.history.first_way(held.manifest.version) if held.manifest.is_way else held
        manifest = stored.manifest
        domains = len(self.history.tiling(manifest.tiling, manifest.schema))
        check_recut(manifest, base.manifest, domains, where=stored.key)
        new = self.views.lacks_data(stored.manifest, base.manifest)
        if new is not None:
            raise FormatError(
                "a tensor is new in the way and not dense in it",
                kind="new-not-dense",
                where=f"{stored.key}, {new!r}",
            )


@contextmanager
def _restoring(undo: Undo | None) -> Iterator[None]:
    """Run the undo log if the block fails."""
    try:
        yield
    except BaseException:
        if undo is not None:
            undo.run()
        raise


def _batches(links: Sequence[Link]) -> Iterator[list[Link]]:
    """Neighbours that are small enough to be staged, and folded, together; a large link stays alone."""
    batch: list[Link] = []
    size = 0
    for link in links:
        if batch and size + link.plan.nbytes > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(link)
        size += link.plan.nbytes
    if batch:
        yield batch


def _by_domain(chunks: Iterable[StagedChunk], link: Link) -> Iterator[DomainTask]:
    """Tasks as soon as all chunks of their domain are there."""
    manifest = link.stored.manifest
    counts = np.bincount(manifest.chunks.domain[link.plan.rows], minlength=len(link.view.tiling))
    waiting: dict[int, list[StagedChunk]] = {}
    for chunk in chunks:
        domain = chunk.head.domain
        here = waiting.setdefault(domain, [])
        here.append(chunk)
        if len(here) == counts[domain]:
            yield DomainTask(domain=domain, links=[waiting.pop(domain)], version=manifest.version)


def _runs(staged: Sequence[StagedLink]) -> Iterator[list[StagedLink]]:
    """Consecutive links that may be folded: one tiling, and one order of bit patterns in each domain."""
    run: list[StagedLink] = []
    orders: dict[int, int] = {}
    for link in staged:
        own = {chunk.head.domain: chunk.head.order for chunk in link.chunks}
        differs = any(orders.get(domain, order) != order for domain, order in own.items())
        if run and (differs or link.link.view is not run[-1].link.view):
            yield run
            run, orders = [], {}
        run.append(link)
        orders.update(own)
    if run:
        yield run
