"""How an attempt ends: the commit by the rank that leads, and how each rank learns of it, however late."""

from __future__ import annotations

from dataclasses import dataclass

from deltafmt.errors import IncompleteError, NotFoundError, StoreError
from deltafmt.format.ranks import AGAIN, CONFLICT, DONE, UNKNOWN
from deltafmt.format.records import Receipt
from deltafmt.read.history import History, Stored
from deltafmt.write.commit import Outcome, commit, conflict, drop, settle
from deltafmt.write.course import Course
from deltafmt.write.draft import Draft
from deltafmt.write.hint import leave_hint
from deltafmt.write.outcome import outcome_of
from deltafmt.write.pack import WayParts
from deltafmt.write.ranks import Agreed, Team
from deltafmt.write.way import manifest_of


@dataclass(frozen=True, kw_only=True)
class _Open:
    """A commit of which this rank does not know how it ended; `stored` is None on ranks that do not commit."""

    draft: Draft
    stored: Stored | None
    parts: WayParts


class Ending:
    """Ends attempts, and remembers the one whose outcome is open."""

    def __init__(self, history: History, team: Team, course: Course) -> None:
        self._history = history
        self._team, self._course = team, course
        self._open: _Open | None = None

    @property
    def is_open(self) -> bool:
        """Whether this rank does not know how its last attempt ended."""
        return self._open is not None

    def forget(self) -> None:
        """Leave it open: the newest version is gone on from, whoever has made it."""
        self._open = None

    def close(self, draft: Draft, receipt: Receipt, parts: WayParts) -> int:
        """`DONE`, having moved on; `CONFLICT` or `AGAIN`. Raises what made the attempt fail.

        This rank's shard goes only where it is certain that no manifest names it.
        """
        made: Stored | None = None

        def assemble(receipts: list[Receipt]) -> tuple[Stored, bytes]:
            return manifest_of(draft.plan, receipts)

        def create(manifest: tuple[Stored, bytes]) -> int:
            nonlocal made
            made, data = manifest
            # Whatever comes in between, an interrupt included, the next call finds out how it ended.
            self._open = _Open(draft=draft, stored=made, parts=parts)
            try:
                outcome = commit(self._history.store, made, data)
            except NotFoundError:
                # A shard is not there: nothing was created.
                self._open = None
                raise
            if outcome is not Outcome.OURS:
                self._open = None
            return DONE if outcome is Outcome.OURS else CONFLICT

        shard = draft.plan.shard_key
        try:
            outcome = self._team.close(draft.agreed, receipt, assemble=assemble, create=create)
        except Exception as error:
            if self._open is None and getattr(error, "kind", "") != "rank-twice":
                drop(self._history.store, [shard])
            raise
        if outcome == UNKNOWN:
            outcome = self._untold(draft, parts)
        if outcome in (AGAIN, CONFLICT):
            drop(self._history.store, [shard])
        if outcome == DONE:
            if made is not None:
                leave_hint(self._history.store, made.manifest)
            self._course.advance(draft, made, parts)
            self._open = None
        return outcome

    def settle(self) -> None:
        """Find out how a commit ended whose outcome was left open on the rank that commits."""
        if self._open is None:
            return
        draft, stored, parts = self._open.draft, self._open.stored, self._open.parts
        assert stored is not None
        outcome = settle(self._history.store, stored.manifest)
        self._open = None
        if outcome is Outcome.OURS:
            self._course.catch_up(draft, stored, parts)
        elif outcome is Outcome.THEIRS:
            drop(self._history.store, stored.manifest.shard_keys)
            raise conflict(stored.manifest.version)

    def settle_late(self, agreed: Agreed) -> None:
        """Other ranks: what the leader calls for tells how the attempt before it ended."""
        late, self._open = self._open, None
        is_past = late is not None and agreed.call.base == late.draft.plan.version
        if late is not None and is_past and self._outcome(late.draft) == DONE:
            self._course.catch_up(late.draft, late.stored, late.parts)
        self._course.next = agreed.call.version

    def _untold(self, draft: Draft, parts: WayParts) -> int:
        """The outcome of which this rank was not told, by what there is in storage."""
        self._open = _Open(draft=draft, stored=None, parts=parts)
        outcome = self._outcome(draft)
        if outcome == UNKNOWN:
            raise IncompleteError(
                "rank 0 is gone or silent, and there is no version that can be read; the next publish looks again",
                kind="rank-missing",
                where="rank 0",
            )
        self._open = None
        return outcome

    def _outcome(self, draft: Draft) -> int:
        try:
            outcome = outcome_of(self._history, draft.plan.version, draft.plan.attempt)
        except StoreError:
            outcome = None
        return UNKNOWN if outcome is None else outcome
