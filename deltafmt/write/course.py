"""Where one rank of a writer stands: which number is next, and what the next delta starts from."""

from __future__ import annotations

import logging

from deltafmt.errors import BaseMismatchError, NotFoundError, StoreError
from deltafmt.format.records import Attempt
from deltafmt.read.history import History, Stored
from deltafmt.write.cut import Cut
from deltafmt.write.detector import Detector
from deltafmt.write.draft import Draft
from deltafmt.write.pack import WayParts
from deltafmt.write.state import Base, check_domains, merged_digests

_LOG = logging.getLogger("deltafmt")


class Course:
    """It moves on only from a version that is known to exist.

    `start` is the version that the next delta starts from, once that is fixed; `base` is the same once the
    detector has it.
    """

    def __init__(self, history: History, detector: Detector, *, threads: int) -> None:
        self._history, self._detector, self._threads = history, detector, threads
        newest = history.latest()
        self.next = 0 if newest is None else newest + 1
        self.start: Stored | None = None
        self.base: Base | None = None
        self.version: int | None = None

    def begin(self) -> Stored:
        """The version to start from; `NotFoundError` before the first."""
        if self.next == 0:
            raise NotFoundError(
                "there is no version to start from; begin with publish_anchor",
                kind="version-missing",
                where=self._history.store.url,
            )
        if self.start is None:
            self.start = self._history.first_way(self.next - 1)
        return self.start

    def ready(self, call: Attempt, cut: Cut) -> Base:
        """The base that was agreed on, as the detector has it; read from storage unless it is there."""
        assert call.base is not None
        stored = self._history.first_way(call.base)
        if stored.digest != call.base_digest:
            raise BaseMismatchError(
                "rank 0 starts from another version of this number", kind="base-differs", where=stored.key
            )
        base = self.base
        if base is None or base.stored.digest != stored.digest or not self._detector.fits(base.cut, cut):
            base = self.read(stored, cut)
        return base

    def read(self, stored: Stored, cut: Cut) -> Base:
        """Take a version in storage for the base."""
        self.base = None
        self._detector.read(self._history, stored, cut, self._threads)
        same = (stored.manifest.schema, stored.manifest.tiling) == (cut.schema_digest, cut.tiling_digest)
        digests = merged_digests(None, cut, stored.manifest) if same else {}
        self.start, self.base = stored, Base(stored=stored, cut=cut, digests=digests)
        return self.base

    def advance(self, draft: Draft, stored: Stored | None, parts: WayParts) -> None:
        """Take a committed version for the base; if its bits cannot be had now, the next publish reads them.

        `BaseMismatchError` for an anchor whose live tensors have moved on since.
        """
        version, cut, base = draft.plan.version, draft.plan.cut, self.base
        # Until the detector has followed, it has no base.
        self.base = self.start = None
        self.version, self.next = version, version + 1
        try:
            stored = self._history.first_way(version) if stored is None else stored
            self._history.remember(stored)
            self.start = stored
            digests = merged_digests(base, cut, stored.manifest) | parts.digests
            self._follow(draft, stored, parts)
        except StoreError as error:
            _LOG.warning("version %d is published, but cannot be read back: %s", version, error)
            return
        self.base = Base(stored=stored, cut=cut, digests=digests)

    def catch_up(self, draft: Draft, stored: Stored | None, parts: WayParts) -> None:
        """`advance`, long after the tensors were read."""
        try:
            self.advance(draft, stored, parts)
        except BaseMismatchError:
            # An anchor is copied from the live tensors, which have moved on: the next step reads it.
            _LOG.info("version %d turned out to be published", draft.plan.version)

    def close(self) -> None:
        """Give back the detector's memory."""
        self.base = self.start = self.version = None
        self._detector.drop()

    def _follow(self, draft: Draft, stored: Stored, parts: WayParts) -> None:
        cut = draft.plan.cut
        if draft.plan.base is not None:
            self._detector.follow(self._history, stored, cut, parts, self._threads)
        else:
            gained = self._detector.take(cut, draft.source, self._threads)
            check_domains(cut, gained, stored.manifest)
