"""Rank 0 of several: it calls the ranks, gathers their receipts, and tells how it ended."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from deltafmt.errors import DeltafmtError, NotFoundError
from deltafmt.format.ranks import (
    AGAIN,
    FAILED,
    UNKNOWN,
    emit_attempt,
    holding_digest,
    holding_of,
    parse_reply,
)
from deltafmt.format.records import Answer, Attempt, Receipt, Verdict
from deltafmt.format.signing import Verifier, check_signature
from deltafmt.layout import Layout
from deltafmt.read.history import History
from deltafmt.write.calls import UNKNOWN_HOLDING, call_of
from deltafmt.write.channel import Channel, taken
from deltafmt.write.commit import conflict
from deltafmt.write.cut import Cut
from deltafmt.write.failure import failure_of, rank_failed, ranks_missing
from deltafmt.write.ownership import Holding, Ownership, share_out
from deltafmt.write.ranks import Agreed, M, Ranks, Want
from deltafmt.write.receipts import check_receipts
from deltafmt.write.root import prepare

_NO_ANSWER = {"error": "IncompleteError", "message": "it did not say what it holds"}


@dataclass(frozen=True, kw_only=True)
class _Shares:
    """Who stores what, as long as ranks hold what `key` says."""

    key: bytes
    ownership: Ownership
    cut: Cut


class Leader(Ranks):
    """Rank 0. With keys to `trust`, receipts that came by storage must be signed with one of them."""

    leads = True

    def __init__(
        self,
        channel: Channel,
        history: History,
        *,
        world: int,
        job: bytes,
        timeout_seconds: float,
        domain_elements: int,
        layouts: Sequence[Layout],
        trust: Sequence[Verifier] = (),
    ) -> None:
        super().__init__(channel, history, rank=0, world=world)
        self._job = job
        self._timeout = timeout_seconds
        self._coordinator = secrets.token_bytes(16)
        self._round = 0
        self._domain_elements, self._layouts = domain_elements, layouts
        self._trust = tuple(trust)
        self._holdings: dict[int, tuple[bytes, Holding]] = {}
        self._shares: _Shares | None = None
        self._waiting: Attempt | None = None

    def forget(self) -> None:
        """Ask all ranks anew what they hold: they too have forgotten whom they told."""
        super().forget()
        self._holdings.clear()

    def open(self, want: Want) -> Agreed:
        """Agree with all ranks on who stores what, and call them to it."""
        own = want.holding.digest
        if self._holdings.get(0, (own,))[0] != own:
            # What has changed here has most likely changed elsewhere too.
            self._holdings.clear()
        self._holdings[0] = (own, want.holding)
        while True:
            shares = None
            try:
                if len(self._holdings) == self.world:
                    shares = self._share_out()
                    lineage = self._prepared(want)
            except Exception as error:
                self.refuse(want, error)
                raise
            call = self._call(want, shares, bytes(16) if shares is None else lineage)
            if shares is not None:
                return self._agreed(call, want.holding)
            answers, receipts = self._replies(call)
            if receipts:
                problem = rank_failed({min(receipts): _NO_ANSWER})
                self._fail(call, problem)
                raise problem
            self._learn(answers)

    def refuse(self, want: Want, error: Exception) -> None:
        """Let the attempt that is open, or one opened for this, fail with an error on all ranks."""
        # What ranks hold may be what is wrong: ask again next time.
        self._holdings.clear()
        with suppress(DeltafmtError):
            call = self._waiting
            if call is None:
                call = self._call(want, None, bytes(16))
                self._channel.replies(call)
            self._fail(call, error)

    def close(
        self,
        agreed: Agreed,
        receipt: Receipt | Exception,
        *,
        assemble: Callable[[list[Receipt]], M],
        create: Callable[[M], int],
    ) -> int:
        """Gather all receipts, make what they add up to, and tell all ranks how it ended."""
        receipts = self._gather(agreed, receipt)
        if receipts is None:
            self._end(agreed.call, AGAIN)
            return AGAIN
        try:
            made = assemble(receipts)
        except Exception as error:
            self._fail(agreed.call, error)
            raise
        try:
            outcome = create(made)
        except NotFoundError as error:
            self._fail(agreed.call, error)
            raise
        except BaseException:
            self._end(agreed.call, UNKNOWN)
            raise
        self._end(agreed.call, outcome)
        return outcome

    def _gather(self, agreed: Agreed, receipt: Receipt | Exception) -> list[Receipt] | None:
        """Receipts of all ranks, checked and ascending by rank; None if ranks turned out to hold something else."""
        call = agreed.call
        try:
            answers, receipts = self._replies(call, None if isinstance(receipt, Receipt) else receipt)
            if answers:
                self._learn(answers)
                return None
            assert isinstance(receipt, Receipt)
            everyone = [receipt, *(receipts[rank] for rank in range(1, self.world))]
            check_receipts(everyone, call, agreed.cut)
        except DeltafmtError as error:
            if self._waiting is not None:
                self._fail(call, error)
            raise
        return everyone

    def _end(self, call: Attempt, outcome: int) -> None:
        """Tell all ranks how the attempt has ended."""
        self._waiting = None
        with suppress(DeltafmtError):
            self._channel.verdict(call, Verdict(attempt=call.attempt, outcome=outcome, failure={}))

    def _fail(self, call: Attempt, error: Exception) -> None:
        self._waiting = None
        told = error if isinstance(error, DeltafmtError) else rank_failed({0: failure_of(error)})
        verdict = Verdict(attempt=call.attempt, outcome=FAILED, failure=failure_of(told))
        with suppress(DeltafmtError):
            self._channel.verdict(call, verdict)

    def _call(self, want: Want, shares: Ownership | None, lineage: bytes) -> Attempt:
        self._round += 1
        none = np.empty(0)
        call = call_of(
            want,
            lineage=lineage,
            cut=None if shares is None or self._shares is None else self._shares.cut,
            holdings=[self._holdings.get(rank, (UNKNOWN_HOLDING,))[0] for rank in range(self.world)],
            owner=none if shares is None else shares.owner,
            holders=none if shares is None else shares.holders,
            job=self._job,
            coordinator=self._coordinator,
            number=self._round,
        )
        self._channel.call(call, emit_attempt(call))
        self._waiting = call
        return call

    def _replies(
        self, call: Attempt, own: Exception | None = None
    ) -> tuple[dict[int, Answer], dict[int, Receipt]]:
        """All ranks' answers and receipts; if one is missing or refuses, the attempt has failed."""
        failures: dict[int, Mapping[str, Any]] = {} if own is None else {0: failure_of(own)}
        answers: dict[int, Answer] = {}
        receipts: dict[int, Receipt] = {}
        data = self._channel.replies(call)
        for rank, reply in sorted(data.items()):
            try:
                record = self._reply(reply, f"reply of rank {rank}")
            except DeltafmtError as error:
                failures[rank] = failure_of(error)
                continue
            if (record.attempt, record.writer) != (call.attempt, rank):
                failures[rank] = {"error": "IncompleteError", "message": "a reply to something else"}
            elif isinstance(record, Receipt):
                receipts[rank] = record
            elif record.failure:
                failures[rank] = record.failure
            else:
                answers[rank] = record
        missing = [rank for rank in range(1, self.world) if rank not in data]
        for rank in missing:
            # Whoever comes in its place is asked what it holds.
            self._holdings.pop(rank, None)
        if own is not None or failures or missing:
            problem = self._problem(call, failures, missing)
            self._fail(call, problem)
            raise own or problem
        return answers, receipts

    def _reply(self, data: bytes, where: str) -> Answer | Receipt:
        record = parse_reply(data, where=where)
        if isinstance(record, Receipt) and self._trust and self._channel.is_open:
            check_signature(data, record.signature, self._trust, where=where)
        return record

    def _problem(
        self, call: Attempt, failures: Mapping[int, Mapping[str, Any]], missing: list[int]
    ) -> DeltafmtError:
        if missing and taken(self._history, call):
            return conflict(call.version)
        return ranks_missing(missing, self._timeout) if missing else rank_failed(failures)

    def _learn(self, answers: Mapping[int, Answer]) -> None:
        for rank, answer in answers.items():
            where = f"answer of rank {rank}"
            self._holdings[rank] = (holding_digest(answer), Holding(*holding_of(answer, where=where)))

    def _share_out(self) -> Ownership:
        key = b"".join(self._holdings[rank][0] for rank in range(self.world))
        if self._shares is None or self._shares.key != key:
            holdings = [self._holdings[rank][1] for rank in range(self.world)]
            shares = share_out(holdings, domain_elements=self._domain_elements, layouts=self._layouts)
            self._shares = _Shares(key=key, ownership=shares, cut=Cut(shares.schema, shares.tiling))
        return self._shares.ownership

    def _prepared(self, want: Want) -> bytes:
        assert self._shares is not None
        return prepare(self._history, self._shares.cut, want.base, purpose=want.purpose)
