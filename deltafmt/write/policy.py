"""Further ways that a writer adds behind its versions, for receivers that fall behind."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from deltafmt.errors import DeltafmtError
from deltafmt.read.history import History
from deltafmt.write.options import WriterOptions
from deltafmt.write.squash import add_squash_way

_LOG = logging.getLogger("deltafmt")
_THIRDS_FROM = 8
"""Spans of three times a power of two are added from three times this on."""


def spans(version: int, longest: int) -> list[int]:
    """How far back the squashes to a version reach, ascending.

    A span of 2^k ends at every multiple of itself, one of 3 * 2^k at every multiple of 2^k: a receiver
    between two borders then need not stop at each of the powers of two on both sides.

    >>> spans(12, 64), spans(64, 64)
    ([2, 4], [2, 4, 8, 16, 24, 32, 48, 64])
    """
    found, step = [], 1
    while version % step == 0 and step <= min(version, longest):
        found.append(step)
        if step >= _THIRDS_FROM:
            found.append(3 * step)
        step *= 2
    return sorted(span for span in found if 2 <= span <= min(version, longest))


def add_squashes(history: History, version: int, options: WriterOptions) -> None:
    """Add the squashes that the options ask for to a version that has just been committed."""
    if options.squash is None:
        return
    threads, signer = options.workers, options.sign_with
    for span in spans(version, options.squash):
        base = version - span
        add = partial(add_squash_way, history, base, version, threads=threads, sign_with=signer, reread=False)
        if not attempted(version, f"way from {base}", add):
            break


def attempted(version: int, what: str, add: Callable[[], object]) -> bool:
    """Whether a further way was added; the version stands without it, so that what goes wrong is a warning."""
    try:
        add()
    except DeltafmtError as error:
        _LOG.warning("version %d is published, but has no %s: %s", version, what, error)
        return False
    return True
