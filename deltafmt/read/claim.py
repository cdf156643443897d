"""Reading what stays readable: a chain is chosen, claimed, and chosen anew where retention was quicker."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from deltafmt.errors import NotFoundError
from deltafmt.read.chain import cheapest_chain
from deltafmt.read.history import History, Stored
from deltafmt.read.lease import Lease

_TRIES = 8
"""Times that the floor may rise while a chain is being chosen."""
_Result = TypeVar("_Result")


class _Kept:
    """The ways of a lineage without those that retention has removed, or may be about to."""

    def __init__(self, history: History, lowest: int) -> None:
        self._history, self._lowest = history, lowest

    def first_way(self, version: int) -> Stored:
        if version < self._lowest:
            raise self._history.gone(version)
        return self._history.first_way(version)

    def further_bases(self, version: int) -> list[int | None]:
        bases = self._history.further_bases(version)
        return [base for base in bases if base is None or base >= self._lowest]

    def further_way(self, version: int, base: int | None) -> Stored:
        return self._history.further_way(version, base)


def claimed_chain(lease: Lease, wanted: int, held: Stored | None = None) -> list[Stored]:
    """The cheapest chain to `wanted`, all of which retention leaves alone while the lease holds.

    Raises `VersionGoneError` where retention has removed `wanted`, else what `cheapest_chain` raises.
    """
    history = lease.history
    for _ in range(_TRIES):
        lowest = lease.lowest
        lease.check(wanted)
        number, digest = None, None
        if held is not None and held.manifest.version >= lowest:
            number, digest = held.manifest.version, held.digest
        try:
            path = cheapest_chain(_Kept(history, lowest), number, wanted, held_digest=digest)
        except NotFoundError:
            history.floor()
            if lease.lowest == lowest:
                raise
            continue
        if not path or lease.cover(oldest_needed(path)):
            return path
    raise history.gone(wanted)


def oldest_needed(path: list[Stored]) -> int:
    """The oldest version of which a chain needs something."""
    first = path[0].manifest
    return first.version if first.base is None else first.base


def unless_gone(lease: Lease, wanted: int | None, read: Callable[[], _Result]) -> _Result:
    """What `read` returns, at the second try if objects have vanished during the first.

    Raises `VersionGoneError` if retention has removed `wanted` (None: whatever is newest, so that a newer one
    will do).
    """
    try:
        return read()
    except NotFoundError as error:
        if not has_vanished(error, wanted):
            raise
    lease.void()
    lease.history.floor()
    if wanted is not None:
        lease.check(wanted)
    return read()


def has_vanished(error: NotFoundError, wanted: int | None) -> bool:
    """Whether an error says that something was removed since it was looked up."""
    return error.kind == "object-missing" or (error.kind == "version-gone" and wanted is None)
