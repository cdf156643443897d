"""Further ways that a writer adds behind its versions: anchors, and squashes for receivers that fall behind."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial

import torch

from deltafmt.errors import DeltafmtError
from deltafmt.read.history import History
from deltafmt.write.anchor import add_anchor_way
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


def add_ways(
    history: History,
    version: int,
    options: WriterOptions,
    tensors: Mapping[str, torch.Tensor] | None,
) -> None:
    """Add what the options ask for to a version that has just been committed.

    `tensors` hold the version (None: not at hand, so no anchor). The version stands without its further
    ways: what goes wrong is a warning.
    """
    threads, signer = options.workers, options.sign_with
    every = options.anchor_every
    if every is not None and version % every == 0 and tensors is not None:
        _try(
            version,
            "anchor",
            lambda: add_anchor_way(history, version, tensors, threads=threads, sign_with=signer),
        )
    if options.squash is None:
        return
    for span in spans(version, options.squash):
        base = version - span
        done = _try(
            version,
            f"way from {base}",
            partial(add_squash_way, history, base, version, threads=threads, sign_with=signer, reread=False),
        )
        if not done:
            break


def _try(version: int, what: str, add: Callable[[], object]) -> bool:
    try:
        add()
    except DeltafmtError as error:
        _LOG.warning("version %d is published, but has no %s: %s", version, what, error)
        return False
    return True
