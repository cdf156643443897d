"""One way in place of a run of deltas: their chunks folded, domain after domain."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from deltafmt.errors import NotFoundError
from deltafmt.format.chunk import PackedChunk
from deltafmt.format.records import Manifest
from deltafmt.format.signing import Signer
from deltafmt.read.apply import Expected
from deltafmt.read.chain import cheapest_chain
from deltafmt.read.decode import decode_chunk, domain_shape
from deltafmt.read.fetch import StagedChunk, fetch_chunks
from deltafmt.read.fold import Folded, fold
from deltafmt.read.history import History, Stored
from deltafmt.read.plan import LinkPlan, plan_rows
from deltafmt.write.batches import batches
from deltafmt.write.compare import compared_results
from deltafmt.write.cut import Cut
from deltafmt.write.dense import encode_dense
from deltafmt.write.encode import encode_given_steps, encode_set
from deltafmt.write.further import add_way, existing_way, further_plan
from deltafmt.write.pack import DomainResult, in_order
from deltafmt.write.source import GivenSource
from deltafmt.write.way import WayPlan

BATCH_BYTES = 32 << 20
"""Stored chunks that are in memory together, unless those of a single domain take more."""

Progress = Callable[[int, int], None]
_Links = list[list[StagedChunk]]
"""The chunks of one domain in each way of a run, oldest first."""


def add_squash_way(
    history: History,
    base: int,
    version: int,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    sign_with: Signer | None = None,
    reread: bool = True,
) -> Manifest | None:
    """Add a way from `base` to `version` that does what the cheapest run of deltas between them does.

    The deltas are composed without the base's weights. Where that cannot be (schema or tiling change on the
    way, or an anchor stands in it), both versions are read and compared instead, some domains at a time; not
    `reread`, there is no way then, and the result is None. Returns the way's manifest; a way that is there already is no error. `progress` gets (bytes done, bytes
    in all). Raises `NotFoundError` (`chain-broken`) where the versions cannot be read, `SchemaError`
    (`dtype-mismatch`) where a tensor has another dtype at `version`.
    """
    if base >= version:
        raise ValueError(
            f"the base of a squash is older than its version; {base} is not older than {version}"
        )
    found = existing_way(history, version, base)
    if found is not None:
        return found
    try:
        history.first_way(base)
    except NotFoundError:
        if reread:
            raise
        return None
    workers = threads or min(8, os.cpu_count() or 1)
    path = _deltas(history, base, version)
    if path is None and not reread:
        return None
    if path is None:
        plan = further_plan(history, version, base, sign_with=sign_with)
        return add_way(history, plan, compared_results(history, plan, workers, progress))
    tiling = path[-1].manifest.tiling
    plan = further_plan(history, version, base, tiling=tiling, sign_with=sign_with)
    assert plan.target is not None
    # Nothing but the chain is known of the content, and the chain leads to the version's.
    plan = replace(plan, tensors=plan.target.manifest.tensors.lanes)
    return add_way(history, plan, composed_results(history, plan, path, workers, progress))


def _deltas(history: History, base: int, version: int) -> list[Stored] | None:
    """The run of deltas to be composed; None where there is none, or none that can be."""
    try:
        path = cheapest_chain(history, base, version, anchors=False)
    except NotFoundError as error:
        if error.kind != "chain-broken":
            raise
        return None
    return path if _composable([stored.manifest for stored in path]) else None


def _composable(run: Sequence[Manifest]) -> bool:
    """Whether positions mean the same in all of them, and the steps of each domain count in one order."""
    if len({(manifest.schema, manifest.tiling) for manifest in run}) > 1:
        return False
    domains = np.concatenate([manifest.chunks.domain for manifest in run])
    orders = np.concatenate([manifest.chunks.order for manifest in run])
    return len(np.unique(domains)) == len(np.unique(domains.astype(np.int64) * 256 + orders))


def composed_results(
    history: History, plan: WayPlan, path: Sequence[Stored], threads: int, progress: Progress | None = None
) -> Iterator[DomainResult]:
    """Fold a run of ways of one tiling, ascending by domain; no more than a batch of chunks is in memory."""
    manifests = [stored.manifest for stored in path]
    cut = plan.cut
    expected = Expected.of(manifests, len(cut))

    fetched: dict[int, _Links] = {}

    def work(domain: int) -> DomainResult:
        shape = domain_shape(cut.tiling, domain)
        links = (
            [decode_chunk(c.head, c.columns, c.data, shape, where=c.where) for c in chunks]
            for chunks in fetched.pop(domain)
        )
        chunks, changed = _encoded(cut, domain, fold(links, where=f"domain {domain}"))
        return DomainResult(
            domain=domain,
            chunks=chunks,
            changed=changed,
            moved={},
            result=expected.after[domain],
            base=expected.before[domain] if expected.known[domain] else None,
            listed=plan.recut or bool(chunks),
            changes=None,
        )

    yield from in_order(work, _fetching(history, manifests, len(cut), fetched, progress), threads)


def _encoded(cut: Cut, domain: int, folded: Folded) -> tuple[tuple[PackedChunk, ...], int | None]:
    """The chunks of a folded domain, and how many elements differ from the base if that is known."""
    chunks: list[PackedChunk] = []
    changed: int | None = 0
    if folded.dense is not None:
        return (encode_dense(cut, GivenSource(cut, {domain: folded.dense}), domain),), None
    if folded.set is not None and len(folded.set[0]):
        positions, bits = folded.set
        if len(positions) == cut.tiling.volume[domain]:
            return (encode_dense(cut, GivenSource(cut, {domain: bits}), domain),), None
        chunks.append(encode_set(cut, domain, positions, bits))
        changed = None
    if folded.step is not None and len(folded.step[0]):
        chunks.append(encode_given_steps(cut, domain, *folded.step))
        changed = None if changed is None else len(folded.step[0])
    # The links may count in another order than this writer would.
    ordered = (replace(chunk, head=replace(chunk.head, order=folded.order)) for chunk in chunks)
    return tuple(ordered), changed


def _fetching(
    history: History,
    manifests: Sequence[Manifest],
    domains: int,
    into: dict[int, _Links],
    progress: Progress | None,
) -> Iterator[int]:
    """Every domain that a link lists, its chunks put into a dictionary, a batch of domains at a time."""
    plans = [plan_rows(manifest, np.arange(len(manifest.chunks))) for manifest in manifests]
    of_chunk = [plan.manifest.chunks.domain[plan.rows].astype(np.int64) for plan in plans]
    nbytes = np.zeros(domains, np.int64)
    for plan, domain in zip(plans, of_chunk, strict=True):
        np.add.at(nbytes, domain, plan.stops - plan.starts)
    listed = np.unique(np.concatenate([manifest.domains.domain for manifest in manifests])).astype(np.int64)
    done, total = 0, int(nbytes.sum())
    for part in batches(nbytes.tolist(), BATCH_BYTES):
        first, last = part.start, part.stop
        batch = [plan.take((first <= d) & (d < last)) for plan, d in zip(plans, of_chunk, strict=True)]
        chunks = _fetched(history, batch)
        for domain in listed[slice(*np.searchsorted(listed, (first, last)))].tolist():
            done += int(nbytes[domain])
            into[domain] = chunks.pop(domain, [])
            yield domain
            if progress is not None:
                progress(done, total)


def _fetched(history: History, plans: Sequence[LinkPlan]) -> dict[int, _Links]:
    """The chunks of each domain, link by link."""
    staged = fetch_chunks(history.store, *plans, digests=bool(history.trust))
    found: dict[int, _Links] = {}
    for plan in plans:
        own: dict[int, list[StagedChunk]] = {}
        for _ in range(len(plan.rows)):
            chunk = next(staged)
            own.setdefault(chunk.head.domain, []).append(chunk)
        for domain, chunks in own.items():
            found.setdefault(domain, []).append(sorted(chunks, key=lambda chunk: chunk.head.operation))
    return found
