"""Versions that are published in the background: one at a time, and none is forgotten."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class PendingVersion:
    """A version that is being published in the background, as `Writer.publish_async` returns it."""

    def __init__(self, future: Future[int]) -> None:
        self._future = future
        self._told = False

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> int:
        """Wait for the commit; returns the version, or raises what went wrong as `Writer.publish` would have.

        `TimeoutError` after `timeout` seconds (None: it waits); the version is still under way then.
        """
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


class Background:
    """The thread that publishes behind a writer's calls."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._pending: PendingVersion | None = None

    def start(self, task: Callable[[], int]) -> PendingVersion:
        """Do what remains of a version; nothing else is under way."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "deltafmt-publish")
        self._pending = PendingVersion(self._thread.submit(task))
        return self._pending

    def finish(self) -> None:
        """Wait for what is under way; raises what went wrong with it, unless that was told."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.finish()

    def close(self) -> None:
        """Let the thread end."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
