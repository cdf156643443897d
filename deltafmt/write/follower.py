"""Any rank but 0: it is called, stores what it owns, and is told how it ended."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from deltafmt.errors import BaseMismatchError, DeltafmtError, IncompleteError
from deltafmt.format.ranks import (
    AGAIN,
    CONFLICT,
    FAILED,
    HOLDING_BYTES,
    PROVE,
    UNKNOWN,
    WRITE,
    answer_of,
    emit_answer,
    emit_receipt,
    refusal,
)
from deltafmt.format.records import Attempt, Receipt, Verdict
from deltafmt.format.signing import Signer
from deltafmt.read.history import History
from deltafmt.write.channel import Channel
from deltafmt.write.commit import conflict
from deltafmt.write.failure import error_of, failure_of
from deltafmt.write.ranks import Agreed, M, Ranks, Want


class Follower(Ranks):
    """Any rank but 0."""

    leads = False

    def __init__(
        self, channel: Channel, history: History, *, rank: int, world: int, sign_with: Signer | None = None
    ) -> None:
        super().__init__(channel, history, rank=rank, world=world)
        self._sign_with = sign_with

    def open(self, want: Want) -> Agreed:
        """Wait for the leader's call, telling it what this rank holds where it does not know."""
        own = want.holding.digest
        while True:
            call = self._channel.await_call(want.version)
            if isinstance(call, Verdict):
                if call.outcome == AGAIN:
                    continue
                raise verdict_error(call, want.version)
            problem = None if call.schema is None else _objection(call, want, self.world)
            if problem is not None:
                raise self._refused(call, problem)
            at = HOLDING_BYTES * self.rank
            if call.schema is None or call.holdings.tobytes()[at : at + HOLDING_BYTES] != own:
                answer = answer_of(
                    want.holding.schema, want.holding.boxes, attempt=call.attempt, writer=self.rank
                )
                self._channel.reply(call, emit_answer(answer))
                continue
            try:
                return self._agreed(call, want.holding)
            except Exception as error:
                raise self._refused(call, error) from error

    def refuse(self, want: Want, error: Exception) -> None:
        """Take part only to say that this rank cannot; returns when the leader knows, or is gone."""
        with suppress(DeltafmtError):
            while True:
                call = self._channel.await_call(want.version)
                if isinstance(call, Attempt):
                    self._refused(call, error)
                    return
                if call.outcome != AGAIN:
                    return

    def close(
        self,
        agreed: Agreed,
        receipt: Receipt | Exception,
        *,
        assemble: Callable[[list[Receipt]], M],  # noqa: ARG002 (the leader's affair)
        create: Callable[[M], int],  # noqa: ARG002
    ) -> int:
        """Send the receipt (or what went wrong) and learn the outcome."""
        if isinstance(receipt, Exception):
            raise self._refused(agreed.call, receipt)
        self._channel.reply(agreed.call, emit_receipt(receipt, self._sign_with))
        verdict = self._channel.await_verdict(agreed.call)
        if verdict is None:
            return UNKNOWN
        if verdict.outcome == FAILED:
            raise verdict_error(verdict, agreed.call.version)
        return verdict.outcome

    def _refused(self, call: Attempt, error: Exception) -> Exception:
        """Tell the leader, and let the attempt end for all; returns the error."""
        answer = refusal(failure_of(error), attempt=call.attempt, writer=self.rank)
        with suppress(DeltafmtError):
            self._channel.reply(call, emit_answer(answer))
            self._channel.await_verdict(call)
        return error


def _objection(call: Attempt, want: Want, world: int) -> DeltafmtError | None:
    """Why a follower cannot do what the leader calls for."""
    differ: tuple[str, Any, Any] | None = None
    if call.writers != world:
        differ = ("number of ranks", call.writers, world)
    elif call.purpose != want.purpose or (call.base is None) != want.anchor or call.data != want.data:
        differ = ("what is to be written", _shown(call.purpose, call.base), "another call")
    elif "step" in want.meta and call.meta.get("step") != want.meta["step"]:
        differ = ("step", call.meta.get("step"), want.meta["step"])
    if differ is not None:
        return IncompleteError(
            "this rank was asked for something else than rank 0",
            kind="rank-disagrees",
            where=differ[0],
            expected=differ[1],
            found=differ[2],
        )
    held = want.base
    if held is not None and call.base is not None and held.digest != call.base_digest:
        return BaseMismatchError(
            "this rank starts from another version than rank 0; resume all ranks",
            kind="base-differs",
            expected=f"version {call.base}",
            found=f"version {held.manifest.version}",
        )
    return None


def _shown(purpose: int, base: int | None) -> str:
    if purpose != WRITE:
        return "proof of a version" if purpose == PROVE else "an anchor beside a version"
    return "an anchor" if base is None else f"a delta from version {base}"


def verdict_error(verdict: Verdict, version: int) -> DeltafmtError:
    """What an attempt that made no version of ours means to a rank."""
    if verdict.outcome == FAILED:
        return error_of(verdict.failure)
    if verdict.outcome == CONFLICT:
        return conflict(version)
    return IncompleteError("rank 0 has ended this attempt", kind="rank-missing", where="rank 0")
