"""What went wrong on one rank, as the others learn of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deltafmt import errors
from deltafmt.errors import REASONS, DeltafmtError, IncompleteError

_TEXT = 2000
_SHARED = (errors.BaseMismatchError, errors.CommitConflictError)
"""What one rank finds out and all ranks then raise, since it is true of all."""


def failure_of(error: BaseException) -> dict[str, Any]:
    """An error as a map of texts."""
    if isinstance(error, DeltafmtError):
        facts = {
            name: str(value)[:_TEXT]
            for name in ("where", "expected", "found")
            if (value := getattr(error, name)) is not None
        }
        return {"error": type(error).__name__, "kind": error.kind, "message": error.message[:_TEXT], **facts}
    return {"error": type(error).__name__, "kind": "rank-failed", "message": str(error)[:_TEXT]}


def error_of(failure: Mapping[str, Any]) -> DeltafmtError:
    """The error that a map stands for; an `IncompleteError` where it is none of this library's."""
    known = getattr(errors, str(failure.get("error")), None)
    is_ours = isinstance(known, type) and issubclass(known, DeltafmtError)
    kind = failure.get("kind")
    return (known if is_ours else IncompleteError)(  # type: ignore[misc]
        str(failure.get("message", "rank 0 failed")),
        kind=kind if kind in REASONS else "rank-failed",
        **{name: failure[name] for name in ("where", "expected", "found") if name in failure},
    )


def rank_failed(failures: Mapping[int, Mapping[str, Any]]) -> DeltafmtError:
    """The error that all other ranks raise because some ranks have failed, by rank."""
    ranks = ", ".join(f"rank {rank}" for rank in sorted(failures))
    first = error_of(failures[min(failures)])
    if isinstance(first, _SHARED):
        where = ranks if first.where is None else f"{ranks}: {first.where}"
        return type(first)(
            first.message, kind=first.kind, where=where, expected=first.expected, found=first.found
        )
    told = "; ".join(
        f"rank {rank}: {failure.get('error')}: {error_of(failure)}"
        for rank, failure in sorted(failures.items())
    )
    return IncompleteError(
        "a rank could not do its part, so that nothing was made; mend it and publish again",
        kind="rank-failed",
        where=ranks,
        found=told,
    )


def ranks_missing(missing: list[int], seconds: float) -> IncompleteError:
    return IncompleteError(
        "ranks have not delivered, so that nothing was made; see whether they live, and publish again",
        kind="rank-missing",
        where=", ".join(f"rank {rank}" for rank in missing),
        expected=f"an answer within {seconds:g} seconds",
    )
