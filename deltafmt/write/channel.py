"""How ranks without a process group talk: small objects beside the attempt, found by looking again and again."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Protocol

from deltafmt.errors import FormatError, IncompleteError, NotFoundError
from deltafmt.format import keys
from deltafmt.format.ranks import AGAIN, CONFLICT, DONE, WRITE, emit_verdict, parse_call
from deltafmt.format.records import Attempt, Verdict
from deltafmt.read.history import History
from deltafmt.store import AlreadyExists
from deltafmt.write.commit import drop
from deltafmt.write.outcome import outcome_of

_FIRST_PAUSE_SECONDS = 0.005
_LONGEST_PAUSE_SECONDS = 0.5
_THOROUGH_EVERY = 4
VERDICT_PATIENCE = 1.25
"""How much longer than for anything else ranks wait for a verdict: rank 0 gives up before, and tells on whom."""
_WINDOW = 2
"""A rank that has not met its coordinator looks for calls this many versions around the one it expects."""


class Channel(Protocol):
    """Words between rank 0, the coordinator, and the other ranks of one job.

    Each call of the coordinator is answered by one reply of every other rank, and followed by a verdict or by
    the next call. `is_open` says that others than these ranks may be able to speak.
    """

    is_open: bool

    def call(self, call: Attempt, data: bytes, /) -> None:
        """Coordinator: tell all ranks."""

    def replies(self, call: Attempt, /) -> dict[int, bytes]:
        """Coordinator: the replies by rank, when all are there or the time is over."""

    def verdict(self, call: Attempt, verdict: Verdict, /) -> None:
        """Coordinator: tell all ranks that can still be reached."""

    def await_call(self, expected: int, /) -> Attempt | Verdict:
        """Other ranks: what the coordinator says next; `expected` is the version that this rank would write.

        Raises `IncompleteError` (`rank-missing`) when the time is over.
        """

    def reply(self, call: Attempt, data: bytes, /) -> None:
        """Other ranks: answer a call."""

    def await_verdict(self, call: Attempt, /) -> Verdict | None:
        """Other ranks: how it ended; None if the coordinator is gone or silent."""

    def forget(self) -> None:
        """Be ready for another coordinator."""


class StoreChannel:
    """Ranks that share nothing but the root and the name of their job.

    A rank answers the calls of its job only. It first tells a coordinator what it holds and then does what
    that one asks for; after the first version written together it answers no other. So what an earlier start
    of the job has left behind is never taken up.
    """

    is_open = True

    def __init__(
        self, history: History, *, rank: int, world: int, job: bytes, timeout_seconds: float
    ) -> None:
        self._history, self._store = history, history.store
        self._rank, self._world, self._job = rank, world, job
        self._timeout = timeout_seconds
        self._past: list[Attempt] = []
        self._seen: set[str] = set()
        self._coordinator: bytes | None = None
        self._answered: set[bytes] = set()
        self._twice: IncompleteError | None = None
        self._open: Attempt | None = None

    def call(self, call: Attempt, data: bytes) -> None:
        if not self._past:
            self._retire_strangers(call)
        self._store.put_if_absent(keys.attempt_key(call.version, call.attempt), data)
        self._past.append(call)

    def replies(self, call: Attempt) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        for thorough in self._looks():
            for key in self._store.list(keys.replies_folder(call.version, call.attempt)):
                writer = keys.reply_of(key)
                if writer is not None and 0 < writer < self._world and writer not in found:
                    found[writer] = self._store.read(key)
            if len(found) == self._world - 1:
                self._drop_past(call)
                break
            if thorough and taken(self._history, call):
                # Ranks that know it do not answer any more.
                break
        return found

    def verdict(self, call: Attempt, verdict: Verdict) -> None:
        if verdict.outcome == DONE and call.purpose == WRITE:
            return  # the manifest that is there tells
        self._store.put(keys.verdict_key(call.version, call.attempt), emit_verdict(verdict))

    def await_call(self, expected: int) -> Attempt | Verdict:
        for thorough in self._looks():
            if self._open is not None:
                verdict = self._look(self._open, thorough=thorough)
                if verdict is not None:
                    self._open = None
                    return verdict
            folders = self._folders(expected, thorough=thorough)
            calls = [call for version in folders for call in self._new_calls(version)]
            if calls:
                self._open = max(calls, key=lambda call: (call.created, call.round))
                self._seen.add(keys.attempt_key(self._open.version, self._open.attempt))
                return self._open
        if self._twice is not None:
            raise self._twice
        raise IncompleteError(
            "rank 0 has not called the ranks of this job together",
            kind="rank-missing",
            where=f"rank 0, for version {expected}",
        )

    def reply(self, call: Attempt, data: bytes) -> None:
        try:
            self._store.put_if_absent(keys.reply_key(call.version, call.attempt, self._rank), data)
        except AlreadyExists as error:
            self._twice = IncompleteError(
                "another process has answered as this rank; give each job a name of its own (WriterOptions.job)",
                kind="rank-twice",
                where=f"rank {self._rank}",
            )
            self._open = None
            if call.coordinator in self._answered:
                raise self._twice from error
            # Most likely an earlier process of this rank, and the call is as old.
            return
        self._answered.add(call.coordinator)

    def await_verdict(self, call: Attempt) -> Verdict | None:
        for thorough in self._looks(VERDICT_PATIENCE * self._timeout):
            verdict = self._look(call, thorough=thorough)
            if verdict is not None:
                self._open = None
                if verdict.outcome == DONE:
                    self._coordinator, self._twice = call.coordinator, None
                return verdict
        self._open = None
        return None

    def forget(self) -> None:
        self._coordinator = self._open = self._twice = None
        self._answered.clear()

    def _folders(self, expected: int, *, thorough: bool) -> Iterable[int]:
        """Versions for which this rank may be called."""
        if self._coordinator is not None:
            return (expected, expected + 1) if thorough else (expected,)
        return range(max(0, expected - _WINDOW), expected + _WINDOW + 1)

    def _new_calls(self, version: int) -> Iterator[Attempt]:
        for key in self._store.list(keys.attempts_folder(version)):
            if key in self._seen:
                continue
            try:
                call = parse_call(self._store.read(key), where=key)
            except (NotFoundError, FormatError):
                continue
            if isinstance(call, Attempt) and self._is_mine(call):
                yield call
            else:
                self._seen.add(key)

    def _is_mine(self, call: Attempt) -> bool:
        same = (call.job, call.writers) == (self._job, self._world)
        if not same or self._coordinator not in (None, call.coordinator):
            return False
        if call.coordinator in self._answered:
            return True
        return call.schema is None and not self._store.exists(keys.verdict_key(call.version, call.attempt))

    def _look(self, call: Attempt, *, thorough: bool) -> Verdict | None:
        """How a call ended, if it has; one that its job's next coordinator has withdrawn is to be repeated.

        Only a `thorough` look, which takes more requests, sees that a version has failed, was withdrawn or is past.
        """
        writes = call.purpose == WRITE
        key = keys.verdict_key(call.version, call.attempt)
        # A version that is there has no verdict: its manifest tells.
        if (thorough or not writes) and self._store.exists(key):
            verdict = parse_call(self._store.read(key), where=key)
            if not isinstance(verdict, Verdict):
                return None
            # That a version is there only its manifest tells: anybody at the root may have put this.
            if not writes or verdict.outcome != DONE:
                return verdict
        if writes and (thorough or self._store.exists(keys.version_key(call.version))):
            outcome = outcome_of(self._history, call.version, call.attempt)
            if outcome is not None:
                return Verdict(attempt=call.attempt, outcome=outcome, failure={})
        if thorough and not self._store.exists(keys.attempt_key(call.version, call.attempt)):
            return Verdict(attempt=call.attempt, outcome=AGAIN, failure={})
        return None

    def _retire_strangers(self, call: Attempt) -> None:
        """Withdraw calls that an earlier coordinator of this job has left behind."""
        for version in range(call.version, call.version + 2):
            drop(self._store, list(self._calls_of_job(version)))

    def _calls_of_job(self, version: int) -> Iterator[str]:
        for key in self._store.list(keys.attempts_folder(version)):
            with suppress(NotFoundError, FormatError):
                call = parse_call(self._store.read(key), where=key)
                if isinstance(call, Attempt) and call.job == self._job:
                    yield key

    def _drop_past(self, call: Attempt) -> None:
        """Remove earlier calls and their replies: all ranks have gone on from them."""
        for old in self._past:
            if old.attempt != call.attempt:
                replies = [keys.reply_key(old.version, old.attempt, k) for k in range(1, self._world)]
                own = [keys.attempt_key(old.version, old.attempt), keys.verdict_key(old.version, old.attempt)]
                drop(self._store, own + replies)
        self._past = [call]

    def _looks(self, seconds: float | None = None) -> Iterator[bool]:
        """Once at once, then after growing pauses, until the time is over; the last look is behind it.

        Yields whether to look for what happens seldom, too: at every fourth look, and at the last one.
        """
        deadline = time.monotonic() + (self._timeout if seconds is None else seconds)
        pause = _FIRST_PAUSE_SECONDS
        for number in itertools.count(1):
            late = time.monotonic() >= deadline
            yield late or number % _THOROUGH_EVERY == 0
            if late:
                return
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(1.2 * pause, _LONGEST_PAUSE_SECONDS)


def taken(history: History, call: Attempt) -> bool:
    """Whether another writer has the version that is called for."""
    return call.purpose == WRITE and outcome_of(history, call.version, call.attempt) == CONFLICT
