"""The writer: publishes versions of live tensors, each a delta from the one before, or an anchor."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from deltafmt.errors import (
    BaseMismatchError,
    NotFoundError,
    SchemaError,
    StoreError,
    UnsupportedError,
)
from deltafmt.format.records import Manifest
from deltafmt.layout import Layout
from deltafmt.read.history import History, Stored
from deltafmt.schema import Schema
from deltafmt.store import Url, open_store
from deltafmt.tensors import NamedTensors, named
from deltafmt.tiling import DOMAIN_ELEMENTS, make_tiling
from deltafmt.write.commit import (
    Files,
    Outcome,
    check_count,
    commit,
    conflict,
    drop,
    prove_exclusive,
    put_cut,
    put_files,
    sealed,
    settle,
)
from deltafmt.write.cut import Cut
from deltafmt.write.detect import SnapshotDetector
from deltafmt.write.hint import leave_hint
from deltafmt.write.labels import labels_of
from deltafmt.write.local import Local
from deltafmt.write.options import WriterOptions
from deltafmt.write.pack import DomainResult, WayParts, bounded
from deltafmt.write.policy import add_ways
from deltafmt.write.publish_dtype import PublishDtype, published_schema
from deltafmt.write.ranked import Ranked
from deltafmt.write.root import ensure_root
from deltafmt.write.source import LiveSource, check_tensors
from deltafmt.write.state import (
    Base,
    base_sums,
    check_dtypes,
    fill_from_lineage,
    fill_from_live,
    follow,
    merged_digests,
    newest_to_resume,
)
from deltafmt.write.team import make_team
from deltafmt.write.way import WayPlan, anchor_results, build_way, delta_results

_LOG = logging.getLogger("deltafmt")


@dataclass(frozen=True, kw_only=True)
class _Draft:
    """A version on its way: what it is to be, what remains to be written, and what follows its commit."""

    plan: WayPlan
    results: Any
    advance: Callable[[Manifest, WayParts], None]


class Writer:
    """Publishes one policy to a root, from one process or, as one of several ranks, together with them.

    Tensors are named torch tensors (any device) or numpy arrays, given anew at each call; they must not
    change until the call returns. `publish_dtype` publishes FP32 masters as their cast: "bfloat16" for all
    of them, or a mapping from name patterns to dtypes. A writer opened on an existing root goes on from the
    version that was newest then. Calls from several threads are served one after another.

    Of `world_size` ranks each gives the parts that it holds: through `layout` (where parts of canonical
    tensors stand in its local ones; needs `schema`, unless the root has one) or as whole tensors by name. All
    ranks make the same calls. They talk by `group` (or torch.distributed's default group, if it has just
    these ranks), else through the root. Of parts that several ranks hold the lowest rank stores one, and the
    others' must be equal.
    """

    def __init__(
        self,
        url: Url,
        *,
        schema: Schema | None = None,
        rank: int = 0,
        world_size: int = 1,
        group: Any = None,
        layout: Layout | None = None,
        detector: SnapshotDetector | None = None,
        publish_dtype: PublishDtype = None,
        options: WriterOptions | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._options = options or WriterOptions()
        self._schema = schema
        self._publish_dtype = publish_dtype
        self._detector = detector or SnapshotDetector()
        self._history = History(open_store(url, storage_options), trust=self._options.trusted)
        self._store = self._history.store
        prove_exclusive(self._store)
        team = make_team(self._history, rank=rank, world_size=world_size, group=group, options=self._options)
        if team is None and layout is not None:
            raise UnsupportedError(
                "one process publishes whole tensors; a layout is for the parts of several ranks",
                kind="writer-unsupported",
                where="layout",
            )
        self._ranked: Ranked | None = None
        if team is not None:
            local = Local(schema, layout, publish_dtype)
            self._ranked = Ranked(self._history, team, local, self._detector, self._options)
        newest = self._history.latest()
        self._next = 0 if newest is None else newest + 1
        self._base: Base | None = None
        self._version: int | None = None
        self._unsettled: tuple[Stored, Callable[[], None]] | None = None
        self._lock = threading.RLock()
        self._background: ThreadPoolExecutor | None = None
        self._pending: PendingVersion | None = None

    @property
    def version(self) -> int | None:
        """The version that the writer published or resumed last; None before the first."""
        return self._version if self._ranked is None else self._ranked.version

    def publish_anchor(
        self,
        named_tensors: NamedTensors,
        *,
        step: int | None = None,
        meta: Mapping[str, Any] | None = None,
        store_data: bool = True,
        files: Files | None = None,
    ) -> int:
        """Publish all elements as the next version; makes the root if there is none. Returns the version.

        Without `store_data` only digests are stored: say in `meta` (as `hint`) where the bytes are, and
        receivers that hold them `adopt` the version. `files` (name -> bytes or path) are kept beside it.
        """
        with self._lock:
            self._finish_pending()
            labels = labels_of(step, meta)
            if self._ranked is not None:
                return self._ranked.publish(named_tensors, labels, files, anchor=True, data=store_data)
            tensors, schema = self._checked(named_tensors)
            self._settle()
            lineage = ensure_root(self._history, schema)
            cut = self._cut_for(schema)
            put_cut(self._store, cut)
            plan = WayPlan(
                cut=cut,
                lineage=lineage,
                version=self._next,
                base=None,
                target=None,
                tensors=np.zeros((len(schema), 2), np.uint64),
                meta=labels,
                files=put_files(self._store, files or {}),
                data=store_data,
                sign_with=self._options.sign_with,
            )
            threads = self._options.workers

            def advance(manifest: Manifest, _parts: WayParts) -> None:
                fill_from_live(cut, manifest, tensors, self._detector, threads)

            results = anchor_results(plan, LiveSource(cut, tensors), threads)
            return self._publish(_Draft(plan=plan, results=results, advance=advance))

    def publish(
        self,
        named_tensors: NamedTensors,
        *,
        step: int | None = None,
        meta: Mapping[str, Any] | None = None,
        files: Files | None = None,
    ) -> int:
        """Publish what changed as the next version, also when nothing did. Returns the version.

        `files` None keeps the base's side files. New or reshaped tensors are stored whole, missing ones
        leave the schema. Raises `CommitConflictError` if another writer took the number: nothing is changed
        then, and `resume` starts anew from its version.
        """
        with self._lock:
            self._finish_pending()
            labels = labels_of(step, meta)
            if self._ranked is not None:
                return self._ranked.publish(named_tensors, labels, files, anchor=False, data=True)
            return self._publish(self._delta(named_tensors, labels, files))

    def publish_async(
        self,
        named_tensors: NamedTensors,
        *,
        step: int | None = None,
        meta: Mapping[str, Any] | None = None,
        files: Files | None = None,
    ) -> PendingVersion:
        """`publish` that returns once all it needs is detected and encoded; the rest goes on by itself.

        The tensors may change as soon as this returns. A later call waits for the one before.
        """
        with self._lock:
            self._finish_pending()
            task = self._encoded(named_tensors, labels_of(step, meta), files)
            if self._background is None:
                self._background = ThreadPoolExecutor(1, "deltafmt-publish")
            self._pending = PendingVersion(self._background.submit(task))
            return self._pending

    def _encoded(
        self, named_tensors: NamedTensors, labels: dict[str, Any], files: Files | None
    ) -> Callable[[], int]:
        """A publish of which only storing and committing remain."""
        if self._ranked is not None:
            return self._ranked.encoded(named_tensors, labels, files)
        draft = self._delta(named_tensors, labels, files)
        results: list[DomainResult] = list(bounded(draft.results))
        ready = _Draft(plan=draft.plan, results=results, advance=draft.advance)
        return lambda: self._publish(ready)

    def resume(self, version: int | None = None, named_tensors: NamedTensors | None = None) -> int:
        """Go on from the newest version: its bits are read, or proved to be those of the tensors given.

        Raises `CommitConflictError` for another version than the newest, `BaseMismatchError` for tensors
        that do not hold it.
        """
        with self._lock:
            self._finish_pending()
            if self._ranked is not None:
                return self._ranked.resume(version, named_tensors)
            # However a commit ended whose outcome is open: the newest version tells.
            self._unsettled = None
            newest = newest_to_resume(self._history, version)
            self._resume(newest, named_tensors)
            self._next = newest + 1
            return newest

    def close(self) -> None:
        """Wait for what is under way; the copy of the tensors is dropped."""
        with self._lock:
            try:
                self._finish_pending()
            finally:
                if self._background is not None:
                    self._background.shutdown()
                    self._background = None
                if self._ranked is not None:
                    self._ranked.close()
                self._base = self._version = None
                self._detector.tensors = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, named_tensors: NamedTensors) -> tuple[dict[str, torch.Tensor], Schema]:
        tensors = named(named_tensors, may_copy=True)
        check_count(len(tensors))
        check_tensors(tensors)
        schema = published_schema(tensors, self._publish_dtype)
        if self._schema is not None and set(schema) != set(self._schema):
            differ = sorted({spec.name for spec in set(schema) ^ set(self._schema)})
            raise SchemaError(
                "tensors do not fit the schema given", kind="schema-differs", where=", ".join(differ[:5])
            )
        return tensors, schema

    def _delta(self, named_tensors: NamedTensors, labels: dict[str, Any], files: Files | None) -> _Draft:
        tensors, schema = self._checked(named_tensors)
        base = self._ensure_base()
        check_dtypes(base.cut.schema, schema)
        # The order of the names given is no change of the model.
        same = set(schema) == set(base.cut.schema)
        cut = base.cut if same else self._cut_for(schema)
        if not same:
            put_cut(self._store, cut)
        baseline = self._detector.flats(cut)
        manifest = base.stored.manifest
        plan = WayPlan(
            cut=cut,
            lineage=manifest.lineage,
            version=self._next,
            base=base.stored,
            target=None,
            tensors=base_sums(base.cut.schema, manifest, cut.schema),
            meta=labels,
            files=manifest.files if files is None else put_files(self._store, files),
            sign_with=self._options.sign_with,
        )
        threads = self._options.workers
        if plan.recut and same:
            put_cut(self._store, cut)
        known = base.digests if base.cut is cut else {}
        results = delta_results(plan, LiveSource(cut, tensors), baseline, known, threads)

        def advance(manifest: Manifest, parts: WayParts) -> None:
            stored = self._history.first_way(manifest.version)
            follow(self._history, stored, cut, parts, self._detector, threads)

        return _Draft(plan=plan, results=results, advance=advance)

    def _publish(self, draft: _Draft) -> int:
        """Write, commit, and only then move on."""
        with self._lock:
            manifest, parts = build_way(self._store, draft.plan, draft.results)
            try:
                stored, data = sealed(manifest, draft.plan.sign_with)
            except BaseException:
                drop(self._store, manifest.shard_keys)
                raise
            # Whatever comes in between, an interrupt included, the next call finds out how it ended.
            self._unsettled = (stored, lambda: self._advance(draft, stored, parts))
            if commit(self._store, stored, data) is not Outcome.OURS:
                self._unsettled = None
                drop(self._store, manifest.shard_keys)
                raise conflict(manifest.version)
            leave_hint(self._store, manifest)
            self._advance(draft, stored, parts)
            held = None if self._base is None else self._detector.tensors
            add_ways(self._history, manifest.version, self._options, held)
            return manifest.version

    def _advance(self, draft: _Draft, stored: Stored, parts: WayParts) -> None:
        """Take a committed version as the base; if its bits cannot be had now, the next publish reads them."""
        manifest = stored.manifest
        self._history.remember(stored)
        digests = merged_digests(self._base, draft.plan.cut, manifest)
        # Until the copy has followed, it is the copy of nothing.
        self._base = None
        self._version, self._next = manifest.version, manifest.version + 1
        self._unsettled = None
        try:
            draft.advance(manifest, parts)
        except StoreError as error:
            _LOG.warning("version %d is published, but cannot be read back: %s", manifest.version, error)
            return
        self._base = Base(stored=stored, cut=draft.plan.cut, digests=digests)

    def _settle(self) -> None:
        """Find out how a commit ended whose outcome was left open."""
        if self._unsettled is None:
            return
        stored, advance = self._unsettled
        outcome = settle(self._store, stored.manifest)
        if outcome is not Outcome.OURS:
            self._unsettled = None
        if outcome is Outcome.OURS:
            try:
                advance()
            except BaseMismatchError:
                # An anchor is copied from the live tensors, which have moved on: the next step reads it.
                _LOG.info("version %d turned out to be published", stored.manifest.version)
        elif outcome is Outcome.THEIRS:
            drop(self._store, stored.manifest.shard_keys)
            raise conflict(stored.manifest.version)

    def _ensure_base(self) -> Base:
        self._settle()
        if self._base is None:
            if self._next == 0:
                raise NotFoundError(
                    "there is no version to start from; begin with publish_anchor",
                    kind="version-missing",
                    where=self._store.url,
                )
            self._resume(self._next - 1, None)
        assert self._base is not None
        return self._base

    def _resume(self, version: int, named_tensors: NamedTensors | None) -> None:
        stored = self._history.first_way(version)
        manifest = stored.manifest
        schema = self._history.schema(manifest.schema)
        cut = self._cut_of(manifest)
        self._base = None
        if named_tensors is None:
            fill_from_lineage(self._history, stored, self._detector, self._options.workers)
        else:
            tensors, found = self._checked(named_tensors)
            if set(found) != set(schema):
                differ = sorted({spec.name for spec in set(schema) ^ set(found)})
                raise BaseMismatchError(
                    "the tensors are not those of the version",
                    kind="schema-differs",
                    where=f"version {version}, {', '.join(differ[:5])}",
                )
            fill_from_live(cut, manifest, tensors, self._detector, self._options.workers)
        digests = merged_digests(None, cut, manifest) if cut.tiling_digest == manifest.tiling else {}
        self._base = Base(stored=stored, cut=cut, digests=digests)
        self._version = version

    def _cut_of(self, manifest: Manifest) -> Cut:
        """How a resumed version is cut from here on: as it was, unless the options ask for something else."""
        schema = self._history.schema(manifest.schema)
        options = self._options
        if not options.tile_for and options.domain_elements is None:
            return Cut(schema, self._history.tiling(manifest.tiling, manifest.schema))
        return self._new_cut(schema)

    def _cut_for(self, schema: Schema) -> Cut:
        if self._base is not None and self._base.cut.schema == schema:
            return self._base.cut
        return self._new_cut(schema)

    def _new_cut(self, schema: Schema) -> Cut:
        elements = self._options.domain_elements or DOMAIN_ELEMENTS
        return Cut(schema, make_tiling(schema, domain_elements=elements, layouts=self._options.tile_for))

    def _finish_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._lock.release()
            try:
                pending.finish()
            finally:
                self._lock.acquire()


class PendingVersion:
    """A version that is being published in the background."""

    def __init__(self, future: Future[int]) -> None:
        self._future = future
        self._told = False

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> int:
        """Wait for the commit; returns the version or raises what went wrong."""
        error = self._future.exception(timeout)
        self._told = True
        if error is not None:
            raise error
        return self._future.result()

    def finish(self) -> None:
        """Wait, and raise what went wrong unless `result` has told it already."""
        error = self._future.exception()
        if error is not None and not self._told:
            self._told = True
            raise error
