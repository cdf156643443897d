"""A reader's claim on versions, so that retention leaves them alone while they are being read."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from deltafmt.errors import DeltafmtError, StoreError
from deltafmt.format import keys
from deltafmt.format.objects import emit_lease
from deltafmt.format.records import LeaseRecord
from deltafmt.read.history import History
from deltafmt.store.base import guarded

_LOG = logging.getLogger("deltafmt")


class Lease:
    """A claim on all versions from some number on: written first, then held against the floor.

    The object is written once, again when half of `seconds` is over while it is in use, and removed by
    `release`; a forked process has a claim of its own, and leaves its parent's alone. With `seconds` None, or where the storage does not let this reader write, nothing is written,
    and `cover` tells no more than what the floor is at the moment. May be used from several threads.
    """

    def __init__(self, history: History, seconds: int | None) -> None:
        self.history, self._seconds = history, seconds
        self._name = secrets.token_bytes(16)
        self._start: int | None = None
        self._written = False
        self._until = self._renew_at = 0.0
        self._process = os.getpid()
        self._lock = threading.RLock()

    @property
    def lowest(self) -> int:
        """The oldest version that may be read, as far as is known: the floor, or what is claimed below it."""
        floor, start = self.history.known_floor, self._start
        return floor if start is None else min(floor, start)

    def check(self, version: int) -> None:
        """Raise `VersionGoneError` for a version that is known to be gone."""
        if 0 <= version < self.lowest:
            raise self.history.gone(version)

    def cover(self, start: int) -> bool:
        """Claim the versions from `start` on; False if some of them are no longer there to be claimed."""
        with self._locked():
            if self._start is not None and self._start <= start and self._goes_on(start):
                return True
            self._start = None
            held = self._write(start)
            if start < self.history.floor():
                return False
            self._start = start if held else None
            return True

    def renew(self, start: int | None = None) -> None:
        """Write a claim again if it is time to, from `start` on if less is needed now."""
        with self._locked():
            if self._start is not None:
                start = max(self._start, start or 0)
                self._start = start if self._goes_on(start) else None

    def void(self) -> None:
        """Rely on the claim no longer: something that it should have held is gone."""
        with self._locked():
            self._start = None

    def release(self) -> None:
        """Give up the claim and remove it from storage."""
        with self._locked():
            self._start = None
            if self._written:
                self._written = False
                self._remove()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One thread at a time; the first one after a fork begins anew."""
        if self._process != os.getpid():
            # Some other thread may have held the lock when the process was forked.
            self._process, self._lock = os.getpid(), threading.RLock()
            self._name, self._start, self._written = secrets.token_bytes(16), None, False
        with self._lock:
            yield

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Keep the claim alive for as long as this takes."""
        if self._seconds is None:
            yield
            return
        done, pause = threading.Event(), self._seconds / 4

        def keep() -> None:
            while not done.wait(pause):
                self.renew()

        threading.Thread(target=keep, name="deltafmt-lease", daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def _goes_on(self, start: int) -> bool:
        """Whether the claim stands without a gap, written again, from `start` on, if half of its time is over."""
        now, until = time.monotonic(), self._until
        if now < self._renew_at or now >= until:
            return now < until
        if self._write(start):
            self._start = start
        return time.monotonic() < until

    def _write(self, start: int) -> bool:
        if self._seconds is None:
            return False
        now = time.monotonic()
        if self._written and now >= self._until:
            # A collector that has seen the lease run out may be about to remove it: its name is dead.
            self._remove()
            self._name = secrets.token_bytes(16)
        record = LeaseRecord(
            lineage=self.history.descriptor.lineage,
            reader=self._name,
            start=start,
            seconds=self._seconds,
            created=time.time_ns() // 1_000_000,
        )
        try:
            self.history.store.put(keys.lease_key(self._name), emit_lease(record))
        except DeltafmtError as error:
            self._give_up(error)
            return False
        self._written = True
        self._until, self._renew_at = now + self._seconds, now + self._seconds / 2
        return True

    def _remove(self) -> None:
        key = keys.lease_key(self._name)
        guarded(key, lambda: self.history.store.delete([key]))

    def _give_up(self, error: DeltafmtError) -> None:
        if not isinstance(error, StoreError) or error.kind != "store-unreachable":
            self._seconds = None
        _LOG.warning(
            "%s is read without a lease, and retention may remove what is being read: %s",
            self.history.store.url,
            error,
        )
