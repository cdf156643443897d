"""Several ranks write one version: what they agree on before, and how it ends for all of them.

Rank 0, the leader, calls; every rank stores what it owns and sends its receipt; the leader commits and tells
all. Whatever goes wrong anywhere, all ranks that live learn it and stay at the version they were at.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from deltafmt.errors import BaseMismatchError, DeltafmtError, IncompleteError
from deltafmt.format.ranks import (
    AGAIN,
    CONFLICT,
    FAILED,
    HOLDING_BYTES,
    UNKNOWN,
    WRITE,
    answer_of,
    emit_answer,
    emit_receipt,
    refusal,
)
from deltafmt.format.records import Attempt, Receipt, Verdict
from deltafmt.read.history import History, Stored
from deltafmt.write.channel import Channel
from deltafmt.write.commit import conflict
from deltafmt.write.cut import Cut, Part
from deltafmt.write.failure import error_of, failure_of
from deltafmt.write.ownership import Holding

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Want:
    """What the caller of one rank asks for: the next version (`version` as this rank counts), from `base`.

    `base` None on the leader means an anchor; on other ranks that they have no base yet.
    """

    holding: Holding
    version: int
    base: Stored | None
    anchor: bool
    data: bool = True
    meta: dict[str, Any] = field(default_factory=dict)
    purpose: int = WRITE


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What all ranks are going to do: the leader's call, and this rank's share of it.

    `shared` are own domains that other ranks hold as well, `replicas` held domains that others own.
    """

    call: Attempt
    cut: Cut
    shared: frozenset[int]
    replicas: Ints

    def receipt(self, **fields: Any) -> Receipt:
        """A receipt with all that follows from the call."""
        call = self.call
        assert call.schema is not None
        assert call.tiling is not None
        return Receipt(
            lineage=call.lineage, version=call.version, base=call.base, base_digest=call.base_digest,
            schema=call.schema, tiling=call.tiling, attempt=call.attempt, writers=call.writers, **fields,
        )  # fmt: skip


class Team:
    """What leader and followers have in common."""

    def __init__(self, channel: Channel, history: History, *, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._channel = channel
        self._history = history
        self._share: tuple[bytes, bytes, Agreed] | None = None

    def forget(self) -> None:
        """Be ready for another coordinator, after a resume."""
        self._channel.forget()

    def _agreed(self, call: Attempt, holding: Holding) -> Agreed:
        """What falls to this rank of a call; the same cut as long as nothing about it changes."""
        assert call.schema is not None
        assert call.tiling is not None
        own = holding.digest
        key = call.tiling + call.owner.tobytes() + call.holders.tobytes()
        if self._share is not None and self._share[:2] == (key, own):
            old = self._share[2]
            return Agreed(call=call, cut=old.cut, shared=old.shared, replicas=old.replicas)
        schema = self._history.schema(call.schema)
        tiling = self._history.tiling(call.tiling, call.schema)
        held = holding.domains(schema, tiling)
        domains = np.flatnonzero(call.owner == self.rank)
        if len(call.owner) != len(tiling) or not np.isin(domains, held).all():
            raise IncompleteError(
                "the coordinator has given this rank what it does not hold",
                kind="rank-disagrees",
                where=f"rank {self.rank}",
            )
        agreed = Agreed(
            call=call,
            cut=Cut(schema, tiling, Part.of(tiling, len(schema), domains)),
            shared=frozenset(domains[call.holders[domains] > 1].tolist()),
            replicas=np.setdiff1d(held, domains),
        )
        self._share = (key, own, agreed)
        return agreed


class Follower(Team):
    """Any rank but 0."""

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

    def refuse(self, version: int, error: Exception) -> None:
        """Take part only to say that this rank cannot; returns when the leader knows, or is gone."""
        with suppress(DeltafmtError):
            while True:
                call = self._channel.await_call(version)
                if isinstance(call, Attempt):
                    self._refused(call, error)
                    return
                if call.outcome != AGAIN:
                    return

    def close(self, agreed: Agreed, receipt: Receipt | Exception) -> int:
        """Send the receipt (or what went wrong) and learn the outcome: `DONE`, `CONFLICT`, `AGAIN` or `UNKNOWN`.

        Raises what made the attempt fail.
        """
        if isinstance(receipt, Exception):
            raise self._refused(agreed.call, receipt)
        self._channel.reply(agreed.call, emit_receipt(receipt))
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
        return "proof of a version"
    return "an anchor" if base is None else f"a delta from version {base}"


def verdict_error(verdict: Verdict, version: int) -> DeltafmtError:
    """What an attempt that made no version of ours means to a rank."""
    if verdict.outcome == FAILED:
        return error_of(verdict.failure)
    if verdict.outcome == CONFLICT:
        return conflict(version)
    return IncompleteError("rank 0 has ended this attempt", kind="rank-missing", where="rank 0")
