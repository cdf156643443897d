"""The cheapest chain of ways from what is held to what is wanted."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deltafmt.errors import FormatError, NotFoundError
from deltafmt.read.history import Stored

WaysTo = Callable[[int], Sequence[Stored]]


def cheapest_chain(
    ways_to: WaysTo, held: int | None, wanted: int, *, held_digest: bytes | None = None
) -> list[Stored]:
    """Ways that lead from version `held` (None: from nothing) to `wanted`, fewest stored bytes in all.

    `ways_to` gives all ways to a version, its own manifest first, or raises `NotFoundError`. It is asked
    backwards from `wanted`, cheapest first, so that no more of the history is read than needed; an anchor
    serves whoever holds another version, too. An anchor without data leads nowhere, nor does a way made
    from other manifests than the ones that stand there (for `held`: than the one of `held_digest`).

    Raises `NotFoundError` (`chain-broken`) naming what is missing, or `FormatError` (`base-differs`) where
    nothing is missing but manifests disagree.
    """
    tie = itertools.count()
    queue: list[tuple[int, int, int | None, tuple[Stored, ...]]] = [(0, next(tie), wanted, ())]
    done: set[int] = set()
    dead_ends = _DeadEnds()
    while queue:
        cost, _, version, path = heapq.heappop(queue)
        if version is None:
            return list(path)
        if version == held:
            if not path or held_digest is None or path[0].manifest.base_digest == held_digest:
                return list(path)
            # What is held is another version of that number; the one that is there may lead on.
            dead_ends.differ(path[0], held_digest)
        if version in done:
            continue
        try:
            ways = ways_to(version)
        except NotFoundError as error:
            if version == wanted:
                raise
            done.add(version)
            dead_ends.missing.append(f"version {version} ({error.kind})")
            continue
        if path and path[0].manifest.base_digest != ways[0].digest:
            dead_ends.differ(path[0], ways[0].digest)
            continue
        done.add(version)
        for way in ways:
            if way.manifest.base is None and not way.manifest.data:
                dead_ends.missing.append(_without_data(way))
                continue
            step = (cost + way.manifest.stored_bytes, next(tie), way.manifest.base, (way, *path))
            heapq.heappush(queue, step)
    raise dead_ends.error(held, wanted)


def _without_data(way: Stored) -> str:
    hint = way.manifest.meta.get("hint", way.manifest.meta or "no hint is given")
    return f"the data of version {way.manifest.version}, an anchor whose bytes are elsewhere ({hint})"


@dataclass(slots=True)
class _DeadEnds:
    """Why no chain was found."""

    missing: list[str] = field(default_factory=list)
    differing: list[FormatError] = field(default_factory=list)

    def differ(self, way: Stored, found: bytes) -> None:
        assert way.manifest.base_digest is not None
        error = FormatError(
            f"way was made from another version {way.manifest.base} than the one that is there",
            kind="base-differs",
            where=way.key,
            expected=way.manifest.base_digest.hex(),
            found=found.hex(),
        )
        self.differing.append(error)

    def error(self, held: int | None, wanted: int) -> Exception:
        if self.differing and not self.missing:
            return self.differing[0]
        return NotFoundError(
            f"no way leads to version {wanted}",
            kind="chain-broken",
            where="missing: " + ", ".join(self.missing),
            expected=f"ways from {'nothing' if held is None else f'version {held} or from nothing'}",
        )
