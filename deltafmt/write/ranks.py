"""Several ranks write one version: what they agree on before, and how it ends for all of them.

Rank 0, the leader, calls; every rank stores what it owns and sends its receipt; the leader commits and tells
all. Whatever goes wrong anywhere, all ranks that live learn it and stay at the version they were at.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from deltafmt.errors import IncompleteError
from deltafmt.format.ranks import (
    WRITE,
)
from deltafmt.format.records import Attempt, Receipt
from deltafmt.read.history import History, Stored
from deltafmt.write.channel import Channel
from deltafmt.write.cut import Cut, Part
from deltafmt.write.ownership import Holding

Ints = npt.NDArray[np.int64]
M = TypeVar("M")
_LOG = logging.getLogger("deltafmt")


@dataclass(frozen=True, kw_only=True)
class Want:
    """What the caller of one rank asks for: the next version (`version` as this rank counts), from `base`.

    `base` None on the leader means an anchor; on other ranks that they have no base yet. `beside` asks for an
    anchor beside the version, `signed` for digests of all chunks; the leader's word counts.
    """

    holding: Holding
    version: int
    base: Stored | None
    anchor: bool
    data: bool = True
    beside: bool = False
    signed: bool = False
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


class Team(Protocol):
    """The ranks of a writer, as one of them meets them; of one rank the simple case (`Solo`).

    Each `open` is followed by one `close`. `leads` is true on the rank that commits.
    """

    rank: int
    world: int
    leads: bool

    def open(self, want: Want) -> Agreed:
        """Agree with all ranks on what is to be done, and on who stores what."""

    def refuse(self, want: Want, error: Exception) -> None:
        """Take part only to say that this rank cannot; returns when the others know, or are gone."""

    def close(
        self,
        agreed: Agreed,
        receipt: Receipt | Exception,
        *,
        assemble: Callable[[list[Receipt]], M],
        create: Callable[[M], int],
    ) -> int:
        """Give this rank's receipt, or what went wrong, and learn the outcome.

        `DONE`, `CONFLICT`, `AGAIN` (ranks turned out to hold something else: nothing was made) or `UNKNOWN`
        (this rank was not told). Raises what made the attempt fail. The rank that leads makes what all came
        together for: `assemble` gets all receipts, ascending by rank, and makes nothing that is seen;
        `create` returns the outcome, or raises `NotFoundError` where it has made nothing either.
        """

    def forget(self) -> None:
        """Be ready for another coordinator, after a resume."""

    def cut_of(self, stored: Stored) -> Cut | None:
        """How a version is cut from here on, where the ranks need not be asked for that."""


class Ranks:
    """What leader and followers have in common."""

    def __init__(self, channel: Channel, history: History, *, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._channel = channel
        self._history = history
        self._share: tuple[bytes, bytes, Agreed] | None = None

    def forget(self) -> None:
        """Be ready for another coordinator, after a resume."""
        self._channel.forget()

    def cut_of(self, _stored: Stored) -> Cut | None:
        """That depends on what the ranks hold."""
        return None

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


def give_up(team: Team, agreed: Agreed, error: Exception) -> None:
    """Tell the others that this rank cannot go on."""
    try:
        team.close(agreed, error, assemble=list, create=len)
    except Exception as raised:  # noqa: BLE001 (it is the one given, or says less than that)
        _LOG.debug("attempt given up: %s", raised)
