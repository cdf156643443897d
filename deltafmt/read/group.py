"""Ranks that step together: a version is kept by all of them, or by none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast, runtime_checkable

from deltafmt.errors import IncompleteError


@runtime_checkable
class Ranks(Protocol):
    """How the ranks of an engine hear of each other; a `torch.distributed` group serves as it is."""

    def all_gather_object(self, value: object) -> Sequence[Any]:
        """Every rank's value, by rank; each of them must call this, in the same order."""


class Group:
    """Votes of a group of ranks.

    Every method is a collective call. Raises `IncompleteError` where a rank failed (`rank-failed`) or cannot
    be heard (`rank-missing`).
    """

    def __init__(self, ranks: Any) -> None:
        self._ranks = ranks

    def same(self, value: object) -> bool:
        """Whether all ranks gave the same value."""
        return all(other == value for other in self._gather(value))

    def first(self, value: object) -> Any:
        """The first rank's value."""
        return self._gather(value)[0]

    def settle(self, error: Exception | None) -> None:
        """Return if all ranks are fine; else raise: a rank that failed its own error, the others who failed."""
        failed = {
            rank: text
            for rank, text in enumerate(self._gather(None if error is None else _told(error)))
            if text is not None
        }
        if error is not None:
            raise error
        if failed:
            raise IncompleteError(
                "another rank of the group could not make the step",
                kind="rank-failed",
                where="; ".join(f"rank {rank}: {text}" for rank, text in sorted(failed.items())),
            )

    def _gather(self, value: object) -> Sequence[Any]:
        try:
            if isinstance(self._ranks, Ranks):
                return self._ranks.all_gather_object(value)
            from torch import distributed

            values: list[Any] = [None] * distributed.get_world_size(self._ranks)
            distributed.all_gather_object(values, value, group=self._ranks)
            return cast("Sequence[Any]", values)
        except (RuntimeError, ValueError, OSError) as error:
            raise IncompleteError(
                f"the ranks of the group cannot hear each other ({error})", kind="rank-missing"
            ) from error


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
