"""The stages of publishing, put in order, for one rank or one of many."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from deltafmt.errors import IncompleteError
from deltafmt.format.ranks import AGAIN, CONFLICT, PROVE, WRITE
from deltafmt.read.history import History, Stored
from deltafmt.schema import Schema
from deltafmt.shards import Shards
from deltafmt.tensors import NamedTensors
from deltafmt.write.beside import add_anchor_beside
from deltafmt.write.commit import Files, conflict, put_files
from deltafmt.write.course import Course
from deltafmt.write.detector import Detector
from deltafmt.write.draft import Draft, FileTable, plan_of, results_of
from deltafmt.write.ending import Ending
from deltafmt.write.local import Local
from deltafmt.write.metrics import Gauge, PublishMetrics, tell
from deltafmt.write.options import WriterOptions
from deltafmt.write.ownership import Holding
from deltafmt.write.part import part_source
from deltafmt.write.policy import add_squashes, attempted
from deltafmt.write.prove import agree_on_proof, own_proof
from deltafmt.write.ranks import Agreed, Team, Want, give_up
from deltafmt.write.state import Base, newest_to_resume
from deltafmt.write.way import write_shard

_NOTHING = Holding(Schema(()), ())


class Engine:
    """One rank's side of a `Writer`: agree, draft, write, end, and only then move on.

    All ranks make the same calls in the same order. The leading rank's labels and side files count. Whatever
    fails on one rank fails on all, with every rank's version and base as before.
    """

    def __init__(
        self, history: History, team: Team, local: Local, detector: Detector, options: WriterOptions
    ) -> None:
        self._history = history
        self._team, self._local, self._detector = team, local, detector
        self._options, self._threads = options, options.workers
        self._course = Course(history, detector, threads=self._threads)
        self._ending = Ending(history, team, self._course)
        self.last_publish: PublishMetrics | None = None

    @property
    def version(self) -> int | None:
        """The version published or resumed last; None before the first."""
        return self._course.version

    @property
    def next_version(self) -> int:
        """The number of the next version."""
        return self._course.next

    def publish(
        self,
        named_tensors: NamedTensors | Shards,
        labels: dict[str, Any],
        files: Files | None,
        *,
        anchor: bool,
        data: bool = True,
    ) -> int:
        """The next version, by all ranks together; returns it when it is committed."""
        while True:
            version = self._finish(self._draft(named_tensors, labels, files, anchor=anchor, data=data))
            if version is not None:
                return version

    def encoded(
        self, named_tensors: NamedTensors | Shards, labels: dict[str, Any], files: Files | None
    ) -> Callable[[], int]:
        """A delta of which only storing and committing remain."""
        draft = self._draft(named_tensors, labels, files, anchor=False, data=True, encoded=True)

        def rest() -> int:
            version = self._finish(draft)
            if version is None:
                raise IncompleteError(
                    "another rank's tensors have changed their shapes; publish again",
                    kind="rank-disagrees",
                    where="publish_async",
                )
            return version

        return rest

    def resume(self, version: int | None, named_tensors: NamedTensors | Shards | None) -> int:
        """Go on from the newest version; with tensors, all ranks prove together that theirs are it."""
        course = self._course
        self._ending.forget()
        self._team.forget()
        newest = newest_to_resume(self._history, version)
        before = course.start, course.next
        course.base = None
        course.start, course.next = self._history.first_way(newest), newest + 1
        try:
            cut = self._team.cut_of(course.start)
            if named_tensors is not None:
                course.base = self._proven(course.start, named_tensors)
            elif cut is not None:
                course.read(course.start, cut)
        except BaseException:
            course.start, course.next = before
            raise
        course.version = newest
        return newest

    def close(self) -> None:
        """Give back the detector's memory."""
        self._course.close()

    def _draft(
        self,
        named_tensors: NamedTensors | Shards,
        labels: dict[str, Any],
        files: Files | None,
        *,
        anchor: bool,
        data: bool,
        encoded: bool = False,
    ) -> Draft:
        """Agree with the other ranks on what is to be written; `encoded` also reads all of the tensors."""
        gauge = Gauge()
        agreed, tensors, holding = self._agree(named_tensors, labels, anchor=anchor, data=data)
        try:
            if not self._team.leads:
                self._ending.settle_late(agreed)
            source = part_source(agreed.cut, tensors, self._local.layout)
            base = None if agreed.call.base is None else self._course.ready(agreed.call, agreed.cut)
            plan = plan_of(
                agreed,
                source,
                None if base is None else base.stored,
                self._history,
                rank=self._team.rank,
                labels=labels,
                files=self._put_files(files, base),
                sign_with=self._options.sign_with,
                gauge=gauge,
                threads=self._threads,
            )
            results = results_of(self._history, plan, source, base, self._detector, self._threads)
            draft = Draft(agreed=agreed, holding=holding, plan=plan, results=results, source=source)
            return draft.encoded() if encoded else draft
        except Exception as error:
            give_up(self._team, agreed, error)
            raise

    def _agree(
        self,
        named_tensors: NamedTensors | Shards,
        labels: dict[str, Any],
        *,
        anchor: bool,
        data: bool = True,
        purpose: int = WRITE,
    ) -> tuple[Agreed, dict[str, torch.Tensor], Holding]:
        """Agree on the next version; whatever this rank cannot do, all ranks learn."""
        holding, base = _NOTHING, None

        def want() -> Want:
            return Want(
                holding=holding,
                version=self._course.next,
                base=base,
                anchor=anchor,
                data=data,
                beside=purpose == WRITE and self._wants_anchor(stored=anchor and data),
                signed=self._options.sign_with is not None,
                meta=labels,
                purpose=purpose,
            )

        try:
            tensors, holding = self._local.holding(named_tensors, self._history)
            if self._team.leads:
                self._ending.settle()
                base = None if anchor else self._course.begin()
            elif not self._ending.is_open:
                base = self._course.start
        except Exception as error:
            self._team.refuse(want(), error)
            raise
        return self._team.open(want()), tensors, holding

    def _wants_anchor(self, *, stored: bool) -> bool:
        every = self._options.anchor_every
        return every is not None and self._course.next % every == 0 and not stored

    def _put_files(self, files: Files | None, base: Base | None) -> FileTable:
        if files is None:
            return {} if base is None else base.stored.manifest.files
        return put_files(self._history.store, files) if self._team.leads else {}

    def _finish(self, draft: Draft) -> int | None:
        """Store this rank's part and learn how it ended; None: other ranks hold something else now, draft anew."""
        plan = draft.plan
        try:
            receipt, parts = write_shard(self._history.store, plan, draft.results)
        except Exception as error:
            give_up(self._team, draft.agreed, error)
            raise
        with plan.gauge.stage("commit"):
            outcome = self._ending.close(draft, receipt, parts)
        if outcome == AGAIN:
            return None
        if outcome == CONFLICT:
            raise conflict(plan.version)
        self.last_publish = plan.gauge.record(
            plan.cut,
            parts,
            version=plan.version,
            base=plan.base_version,
            step=plan.meta.get("step"),
            rank=self._team.rank,
        )
        tell(self.last_publish, self._options.on_publish)
        self._add_ways(draft)
        return plan.version

    def _add_ways(self, draft: Draft) -> None:
        plan = draft.plan
        if draft.agreed.call.beside:
            base = self._course.base
            add = partial(
                add_anchor_beside, self._history, self._team, draft, base, self._detector, self._options
            )
            attempted(plan.version, "anchor", add)
        if self._team.leads:
            add_squashes(self._history, plan.version, self._options)

    def _proven(self, stored: Stored, named_tensors: NamedTensors | Shards) -> Base:
        """The live tensors as the base, once all ranks have proven that theirs are it."""
        agreed, tensors, _ = self._agree(named_tensors, {}, anchor=False, purpose=PROVE)
        schema = self._history.schema(stored.manifest.schema)
        try:
            source = part_source(agreed.cut, tensors, self._local.layout)
            receipt, base = own_proof(
                agreed,
                stored,
                schema,
                source,
                self._detector,
                rank=self._team.rank,
                threads=self._threads,
            )
        except Exception as error:
            give_up(self._team, agreed, error)
            raise

        agree_on_proof(self._team, agreed, receipt, schema, stored)
        return base
