"""A receiver that keeps up by itself: new versions are found and fetched behind the engine's back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, Self

from deltafmt.errors import DeltafmtError
from deltafmt.read.prepared import Prepared
from deltafmt.read.replica import StagedLink
from deltafmt.store.base import varied

_LONGEST_PAUSE_SECONDS = 60.0
_LOG = logging.getLogger("deltafmt")

OnVersion = Callable[[int], object]


class Pace:
    """How long to wait before looking again.

    Waits vary by half either way, so that many readers do not look in step; each failure in a row doubles
    them, up to a minute (or `poll_seconds`, where that is longer).
    """

    def __init__(self, poll_seconds: float) -> None:
        if not poll_seconds > 0:
            raise ValueError(f"poll_seconds must be positive, not {poll_seconds}")
        self._poll_seconds = poll_seconds
        self._longest = max(poll_seconds, _LONGEST_PAUSE_SECONDS)
        self._failures = 0

    def succeeded(self) -> float:
        """Seconds to wait after a look that went well."""
        self._failures = 0
        return varied(self._poll_seconds)

    def failed(self) -> float:
        """Seconds to wait after a look that failed."""
        # Beyond some doublings only the longest pause counts, and 2.0 ** n must stay a number.
        self._failures = min(self._failures + 1, 32)
        return varied(min(self._longest, self._poll_seconds * 2.0**self._failures))


class Source(Protocol):
    """What a follower needs of its receiver."""

    @property
    def version(self) -> int | None: ...

    def newest(self) -> int | None:
        """The newest version in storage."""

    def stage_behind(self, version: int, had: Sequence[StagedLink]) -> Prepared:
        """Stage a version while other calls are served, one of which may make it stale."""


class Follower:
    """Stages each new version of a lineage for a receiver, from a thread of its own, until `stop`.

    Storage that fails is tried again, after growing pauses, for as long as it takes: `error` is what the last
    look ended with (None: fine). Versions that come while one is fetched are skipped over. `on_version` is called
    again, after such pauses, until it has returned, or a newer version has taken the place of the one it failed on.
    """

    def __init__(self, source: Source, poll_seconds: float, on_version: OnVersion | None) -> None:
        self._source, self._on_version = source, on_version
        self._pace = Pace(poll_seconds)
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._version: int | None = None
        self._last: Prepared | None = None
        self._due: int | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="deltafmt-follow", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int | None:
        """The newest version that was staged; None before the first."""
        return self._version

    @property
    def running(self) -> bool:
        return self._thread.is_alive() and not self._stopping.is_set()

    def wait(self, version: int, timeout: float | None = None) -> int | None:
        """Wait until `version` or a newer one is staged and return which; None after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._reached(version) or not self.running, timeout)
            return self._version if self._reached(version) else None

    def stop(self) -> None:
        """Stop looking; returns when the thread has ended (at once when called from `on_version`)."""
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _reached(self, version: int) -> bool:
        return self._version is not None and self._version >= version

    def _run(self) -> None:
        while not self._stopping.is_set():
            pause = self._pace.succeeded() if self._look() else self._pace.failed()
            self._stopping.wait(pause)

    def _look(self) -> bool:
        """One look for a newer version; whether it went well."""
        try:
            staged = self._stage()
            self._due = self._still_due() if staged is None else staged
            if self._due is not None and self._on_version is not None:
                self._on_version(self._due)
            self._due = None
        except Exception as error:  # noqa: BLE001 - whatever it is, the next look may go well
            self._complain(error)
            return False
        self.error = None
        return True

    def _stage(self) -> int | None:
        """Stage the newest version if it is new; returns it."""
        newest, held = self._source.newest(), self._source.version
        if newest is None or (held is not None and newest <= held) or newest == self._staged():
            return None
        prepared = self._source.stage_behind(newest, self._had())
        while prepared.stale and not self._stopping.is_set():
            self._last = prepared
            prepared = self._source.stage_behind(newest, self._had())
        with self._changed:
            self._last, self._version = prepared, newest
            self._changed.notify_all()
        return newest

    def _still_due(self) -> int | None:
        """The version on which `on_version` failed, unless somebody else has taken the receiver there."""
        held = self._source.version
        return None if held is not None and self._due is not None and held >= self._due else self._due

    def _had(self) -> Sequence[StagedLink]:
        return () if self._last is None else self._last.staged

    def _staged(self) -> int | None:
        return None if self._last is None or self._last.stale else self._last.version

    def _complain(self, error: Exception) -> None:
        """Once per failure, not once per look."""
        known = isinstance(error, DeltafmtError)
        if type(error) is not type(self.error) or str(error) != str(self.error):
            _LOG.warning("following goes on after: %s", error, exc_info=None if known else error)
        self.error = error
