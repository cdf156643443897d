"""What callers give, looked at before it is used: a mistake is told in the caller's words."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from deltafmt.errors import NotFoundError

_PAIRS = "give named tensors, a mapping or (name, tensor) pairs such as model.state_dict(), not {}"


def instance(name: str, value: object, kind: type, hint: str = "") -> None:
    """Raise `TypeError` unless the argument `name` is None or a `kind`; `hint` says how one is made."""
    if not isinstance(value, kind | None):
        made = f"; {hint}" if hint else ""
        raise TypeError(f"{name} must be a {kind.__name__}, not {sort_of(value)}{made}")


def sort_of(value: object) -> str:
    """What a value is, as a message names it."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def version_number(version: Any) -> int:
    """A version as a plain number.

    Raises `TypeError` for what is no whole number, and `NotFoundError` (`version-missing`) for one below 0.
    """
    try:
        number = operator.index(version)
    except TypeError:
        newest = "" if version is None else ", or None for the newest"
        raise TypeError(f"a version is a whole number{newest}, not {version!r:.64}") from None
    if number < 0:
        raise NotFoundError("no such version", kind="version-missing", where=f"version {number}")
    return number


def named_pairs(named_tensors: Any) -> Iterable[tuple[str, Any]]:
    """The (name, tensor) pairs of a mapping or of an iterable of pairs; `TypeError` for a model or anything else."""
    if hasattr(named_tensors, "state_dict"):
        raise TypeError(_PAIRS.format(f"the {type(named_tensors).__name__} itself"))
    if hasattr(named_tensors, "items"):
        pairs: Iterable[tuple[str, Any]] = named_tensors.items()
        return pairs
    if not isinstance(named_tensors, Iterable):
        raise TypeError(_PAIRS.format(sort_of(named_tensors)))
    return map(_pair, named_tensors)


def _pair(item: Any) -> tuple[str, Any]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise TypeError(_PAIRS.format(f"an iterable of {type(item).__name__}"))
    return item[0], item[1]
