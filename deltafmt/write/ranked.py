"""One rank of a writer of many: the stages of publishing, each with the other ranks' agreement."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from deltafmt.errors import (
    BaseMismatchError,
    IncompleteError,
    NotFoundError,
    StoreError,
)
from deltafmt.format import keys
from deltafmt.format.ranks import AGAIN, CONFLICT, DONE, PROVE, UNKNOWN
from deltafmt.format.records import Receipt
from deltafmt.format.validate import check_manifest
from deltafmt.read.history import History, Stored
from deltafmt.schema import Schema
from deltafmt.tensors import NamedTensors
from deltafmt.write.commit import (
    Files,
    Outcome,
    commit,
    conflict,
    drop,
    put_files,
    sealed,
    settle,
)
from deltafmt.write.detect import SnapshotDetector
from deltafmt.write.hint import leave_hint
from deltafmt.write.leader import Leader
from deltafmt.write.local import Local
from deltafmt.write.options import WriterOptions
from deltafmt.write.ownership import Holding
from deltafmt.write.pack import DomainResult, WayParts, bounded
from deltafmt.write.part import copy_part, live_digests, part_source, read_part
from deltafmt.write.policy import add_ways
from deltafmt.write.prove import agree_on_proof, own_proof
from deltafmt.write.ranks import Agreed, Follower, Want
from deltafmt.write.root import ensure_root
from deltafmt.write.source import Source
from deltafmt.write.state import Base, base_sums, check_dtypes, follow, merged_digests, newest_to_resume
from deltafmt.write.way import WayPlan, anchor_results, assemble, delta_results, write_shard

_LOG = logging.getLogger("deltafmt")
_NOTHING = Holding(Schema(()), ())


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A version on its way, from one rank: what was agreed, what remains to be written, what follows."""

    agreed: Agreed
    plan: WayPlan
    results: Any
    advance: Callable[[Stored, WayParts], None]


class Ranked:
    """One rank's side of a `Writer` of several ranks.

    All ranks make the same calls in the same order. Rank 0's labels and side files count. Whatever fails on
    one rank fails on all, with every rank's version and copy as before.
    """

    def __init__(
        self,
        history: History,
        team: Leader | Follower,
        local: Local,
        detector: SnapshotDetector,
        options: WriterOptions,
    ) -> None:
        self._history, self._store = history, history.store
        self._team = team
        self._local = local
        self._detector = detector
        self._options = options
        self._threads = options.workers
        self._sign_with = options.sign_with
        newest = history.latest()
        self._next = 0 if newest is None else newest + 1
        # What the next delta starts from, once that is fixed, and this rank's copy of it, once it is read.
        self._from: Stored | None = None
        self._base: Base | None = None
        self._unsettled: tuple[Draft, Stored | None, WayParts] | None = None
        self.version: int | None = None

    def publish(
        self,
        named_tensors: NamedTensors,
        labels: dict[str, Any],
        files: Files | None,
        *,
        anchor: bool,
        data: bool,
    ) -> int:
        """The next version, by all ranks together; returns it when it is committed."""
        while True:
            version = self.finish(self.draft(named_tensors, labels, files, anchor=anchor, data=data))
            if version is not None:
                return version

    def draft(
        self,
        named_tensors: NamedTensors,
        labels: dict[str, Any],
        files: Files | None,
        *,
        anchor: bool = False,
        data: bool = True,
        encoded: bool = False,
    ) -> Draft:
        """Agree with the other ranks on what is to be written; `encoded` also reads all of the tensors."""
        agreed, tensors = self._open(named_tensors, labels, anchor=anchor, data=data)
        try:
            self._settle_late(agreed)
            source = part_source(agreed.cut, tensors, self._local.layout)
            draft = (self._anchor if anchor else self._delta)(agreed, source, labels, files)
            if not encoded:
                return draft
            results: list[DomainResult] = list(bounded(draft.results))
            return Draft(agreed=agreed, plan=draft.plan, results=results, advance=draft.advance)
        except Exception as error:
            raise self._failed(agreed, error) from error

    def encoded(
        self, named_tensors: NamedTensors, labels: dict[str, Any], files: Files | None
    ) -> Callable[[], int]:
        """A delta of which only storing and committing remain."""
        draft = self.draft(named_tensors, labels, files, encoded=True)

        def rest() -> int:
            version = self.finish(draft)
            if version is None:
                raise IncompleteError(
                    "another rank's tensors have changed their shapes; publish again",
                    kind="rank-disagrees",
                    where="publish_async",
                )
            return version

        return rest

    def finish(self, draft: Draft) -> int | None:
        """Store this rank's part and learn how it ended; None: other ranks hold something else now, draft anew."""
        agreed, plan = draft.agreed, draft.plan
        key = keys.shard_key(
            version=plan.version,
            base=agreed.call.base,
            attempt=plan.attempt,
            writer=plan.writer,
            further=False,
        )
        try:
            receipt, parts = write_shard(self._store, plan, draft.results)
        except Exception as error:
            raise self._failed(agreed, error) from error
        try:
            outcome, stored = self._close(draft, receipt, parts)
        except Exception as error:
            if self._unsettled is None and getattr(error, "kind", "") != "rank-twice":
                drop(self._store, [key])
            raise
        if outcome == AGAIN:
            drop(self._store, [key])
            return None
        if outcome == CONFLICT:
            drop(self._store, [key])
            raise conflict(plan.version)
        self._advance(draft, stored, parts)
        if isinstance(self._team, Leader):
            add_ways(self._history, plan.version, self._options, None)
        return plan.version

    def resume(self, version: int | None, named_tensors: NamedTensors | None) -> int:
        """Go on from the newest version; with tensors, all ranks prove together that theirs are it."""
        self._unsettled = None
        self._team.forget()
        newest = newest_to_resume(self._history, version)
        self._base = None
        self._from = self._history.first_way(newest)
        self._next = newest + 1
        if named_tensors is not None:
            self._prove(named_tensors)
        self.version = newest
        return newest

    def close(self) -> None:
        """Drop the copy."""
        self._base = self._from = self.version = None
        self._detector.tensors = {}

    def _open(
        self,
        named_tensors: NamedTensors,
        labels: dict[str, Any],
        *,
        anchor: bool,
        data: bool,
        purpose: int = 0,
    ) -> tuple[Agreed, dict[str, torch.Tensor]]:
        """Agree on the next version; whatever this rank cannot do, all ranks learn."""
        lead = isinstance(self._team, Leader)
        base: Stored | None = None
        try:
            if lead:
                self._settle()
                base = None if anchor else self._start()
            else:
                base = None if self._unsettled else self._from
            tensors, holding = self._local.holding(named_tensors, self._history)
        except Exception as error:
            if isinstance(self._team, Leader):
                nothing = Want(holding=_NOTHING, version=self._next, base=None, anchor=True, purpose=purpose)
                self._team.refuse(nothing, error)
            else:
                self._team.refuse(self._next, error)
            raise
        want = Want(
            holding=holding,
            version=self._next,
            base=base,
            anchor=anchor,
            data=data,
            meta=labels,
            purpose=purpose,
        )
        if isinstance(self._team, Leader):
            return self._team.open(want, partial(ensure_root, self._history)), tensors
        return self._team.open(want), tensors

    def _start(self) -> Stored:
        if self._next == 0:
            raise NotFoundError(
                "there is no version to start from; begin with publish_anchor",
                kind="version-missing",
                where=self._store.url,
            )
        if self._from is None:
            self._from = self._history.first_way(self._next - 1)
        return self._from

    def _anchor(self, agreed: Agreed, source: Source, labels: dict[str, Any], files: Files | None) -> Draft:
        cut = agreed.cut
        plan = self._plan(agreed, source, None, labels, self._stored_files(files or {}))
        results = anchor_results(plan, source, self._threads)

        def advance(stored: Stored, _parts: WayParts) -> None:
            copy_part(cut, stored.manifest, source, self._detector, self._threads)

        return Draft(agreed=agreed, plan=plan, results=results, advance=advance)

    def _delta(self, agreed: Agreed, source: Source, labels: dict[str, Any], files: Files | None) -> Draft:
        cut = agreed.cut
        base = self._ready(agreed)
        stored = base.stored
        kept = stored.manifest.files if files is None else self._stored_files(files)
        plan = self._plan(agreed, source, stored, labels, kept)
        baseline = self._detector.flats(cut)
        results = delta_results(plan, source, baseline, base.digests, self._threads)

        def advance(stored: Stored, parts: WayParts) -> None:
            follow(self._history, stored, cut, parts, self._detector, self._threads)

        return Draft(agreed=agreed, plan=plan, results=results, advance=advance)

    def _stored_files(self, files: Files) -> dict[str, tuple[bytes, int]]:
        return put_files(self._store, files) if self._team.rank == 0 else {}

    def _ready(self, agreed: Agreed) -> Base:
        """The copy of the base, cut as agreed; read from the lineage unless it is here."""
        call, cut = agreed.call, agreed.cut
        assert call.base is not None
        stored = self._history.first_way(call.base)
        if stored.digest != call.base_digest:
            raise BaseMismatchError(
                "rank 0 starts from another version of this number", kind="base-differs", where=stored.key
            )
        if self._base is not None and self._base.cut is cut and self._base.stored.digest == stored.digest:
            return self._base
        check_dtypes(self._history.schema(stored.manifest.schema), cut.schema)
        self._base = None
        read_part(self._history, stored, cut, self._detector, self._threads)
        same = (stored.manifest.schema, stored.manifest.tiling) == (cut.schema_digest, cut.tiling_digest)
        digests = merged_digests(None, cut, stored.manifest) if same else {}
        self._base = Base(stored=stored, cut=cut, digests=digests)
        self._from = stored
        return self._base

    def _plan(
        self,
        agreed: Agreed,
        source: Source,
        base: Stored | None,
        labels: dict[str, Any],
        files: dict[str, tuple[bytes, int]],
    ) -> WayPlan:
        call, cut = agreed.call, agreed.cut
        sums = np.zeros((len(cut.schema), 2), np.uint64)
        if base is not None:
            sums = base_sums(self._history.schema(base.manifest.schema), base.manifest, cut.schema)
        return WayPlan(
            cut=cut,
            lineage=call.lineage,
            version=call.version,
            base=base,
            target=None,
            tensors=sums,
            meta=labels,
            files=files,
            data=call.data,
            sign_with=self._sign_with,
            attempt=call.attempt,
            writer=self._team.rank,
            writers=self._team.world,
            shared=agreed.shared,
            replicas=live_digests(cut, source, agreed.replicas.tolist(), self._threads),
        )

    def _close(self, draft: Draft, receipt: Receipt, parts: WayParts) -> tuple[int, Stored | None]:
        """(outcome, the manifest where it is at hand)."""
        if isinstance(self._team, Leader):
            return self._commit(self._team, draft, receipt, parts)
        outcome = self._team.close(draft.agreed, receipt)
        if outcome != UNKNOWN:
            return outcome, None
        self._unsettled = (draft, None, parts)
        outcome = self._outcome(draft)
        if outcome == UNKNOWN:
            raise IncompleteError(
                "rank 0 is gone or silent, and there is no version; the next publish looks again",
                kind="rank-missing",
                where="rank 0",
            )
        self._unsettled = None
        return outcome, None

    def _commit(
        self, team: Leader, draft: Draft, receipt: Receipt, parts: WayParts
    ) -> tuple[int, Stored | None]:
        receipts = team.gather(draft.agreed, receipt)
        if receipts is None:
            return AGAIN, None
        try:
            if self._sign_with is not None and any(r.chunk_digests is None for r in receipts):
                raise IncompleteError(
                    "rank 0 signs, so that every rank needs the key (WriterOptions.sign_with)",
                    kind="rank-disagrees",
                    where=", ".join(f"rank {r.writer}" for r in receipts if r.chunk_digests is None),
                )
            manifest = assemble(draft.plan, receipts)
            check_manifest(
                manifest, draft.plan.cut.schema, draft.plan.cut.tiling, where="receipts of the ranks"
            )
            stored, data = sealed(manifest, self._sign_with)
        except Exception as error:
            team.fail(draft.agreed, error)
            raise
        try:
            outcome = commit(self._store, stored, data)
        except NotFoundError as error:
            # A shard is not there: nothing was created.
            team.fail(draft.agreed, error)
            raise
        except BaseException:
            self._unsettled = (draft, stored, parts)
            team.end(draft.agreed, UNKNOWN)
            raise
        result = DONE if outcome is Outcome.OURS else CONFLICT
        team.end(draft.agreed, result)
        if result == DONE:
            leave_hint(self._store, stored.manifest)
        return result, stored

    def _failed(self, agreed: Agreed, error: Exception) -> Exception:
        """Tell the others that this rank cannot go on; returns the error."""
        try:
            if isinstance(self._team, Leader):
                self._team.gather(agreed, error)
            else:
                self._team.close(agreed, error)
        except Exception as raised:  # noqa: BLE001 (it is the one given, or says less than that)
            _LOG.debug("attempt given up: %s", raised)
        return error

    def _advance(self, draft: Draft, stored: Stored | None, parts: WayParts) -> None:
        """Take a committed version as the base; if its bits cannot be had now, the next publish reads them."""
        version, cut, base = draft.plan.version, draft.plan.cut, self._base
        self._base = self._from = None
        self.version, self._next = version, version + 1
        try:
            if stored is None:
                stored = self._history.first_way(version)
            self._history.remember(stored)
            self._from = stored
            draft.advance(stored, parts)
        except StoreError as error:
            _LOG.warning("version %d is published, but cannot be read back: %s", version, error)
            return
        digests = merged_digests(base, cut, stored.manifest) | parts.digests
        self._base = Base(stored=stored, cut=cut, digests=digests)

    def _outcome(self, draft: Draft) -> int:
        """How a commit ended of which this rank was not told, as far as storage says."""
        try:
            manifest = self._history.first_way(draft.plan.version).manifest
        except (NotFoundError, StoreError):
            return UNKNOWN
        return DONE if manifest.attempt == draft.plan.attempt else CONFLICT

    def _settle(self) -> None:
        """Leader: find out how a commit ended whose outcome was left open."""
        if self._unsettled is None:
            return
        draft, stored, parts = self._unsettled
        assert stored is not None
        outcome = settle(self._store, stored.manifest)
        self._unsettled = None
        if outcome is Outcome.OURS:
            self._catch_up(draft, stored, parts)
        elif outcome is Outcome.THEIRS:
            drop(self._store, stored.manifest.shard_keys)
            raise conflict(stored.manifest.version)

    def _settle_late(self, agreed: Agreed) -> None:
        """Other ranks: what the leader calls for tells how the attempt before it ended."""
        if self._unsettled is not None:
            draft, stored, parts = self._unsettled
            self._unsettled = None
            if agreed.call.base == draft.plan.version and self._outcome(draft) == DONE:
                self._catch_up(draft, stored, parts)
        if self._team.rank:
            self._next = agreed.call.version

    def _catch_up(self, draft: Draft, stored: Stored | None, parts: WayParts) -> None:
        try:
            self._advance(draft, stored, parts)
        except BaseMismatchError:
            # An anchor is copied from the live tensors, which have moved on: the next step reads it.
            _LOG.info("version %d turned out to be published", draft.plan.version)

    def _prove(self, named_tensors: NamedTensors) -> None:
        """Take the live tensors for the copy, once all ranks have proven that theirs are the base."""
        stored = self._start()
        agreed, tensors = self._open(named_tensors, {}, anchor=False, data=True, purpose=PROVE)
        try:
            source = part_source(agreed.cut, tensors, self._local.layout)
            receipt, base, copies = own_proof(
                agreed, stored, source, rank=self._team.rank, threads=self._threads
            )
        except Exception as error:
            raise self._failed(agreed, error) from error
        agree_on_proof(self._team, agreed, receipt, stored)
        self._detector.tensors, self._base = copies, base
