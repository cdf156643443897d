"""The cheapest chain of ways from what is held to what is wanted."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence

from deltafmt.errors import FormatError, NotFoundError
from deltafmt.read.history import Stored


def cheapest_chain(
    ways_to: Callable[[int], Sequence[Stored]], held: int | None, wanted: int
) -> list[Stored]:
    """Ways that lead from version `held` (None: from nothing) to `wanted`, fewest stored bytes in all.

    `ways_to` gives all ways to a version, its own manifest first, or raises `NotFoundError`. It is asked
    backwards from `wanted`, cheapest first, so that no more of the history is read than needed. An anchor
    without data leads nowhere. Raises `NotFoundError` (`chain-broken`) naming what is missing.
    """
    tie = itertools.count()
    start: tuple[int, int, int | None, tuple[Stored, ...]] = (0, next(tie), wanted, ())
    queue = [start]
    done: set[int | None] = set()
    dead_ends: list[str] = []
    while queue:
        cost, _, version, path = heapq.heappop(queue)
        if version == held or version is None:
            return list(path)
        if version in done:
            continue
        done.add(version)
        try:
            ways = ways_to(version)
        except NotFoundError as error:
            if version == wanted:
                raise
            dead_ends.append(f"version {version} ({error.kind})")
            continue
        _check_link(ways, path)
        for way in ways:
            manifest = way.manifest
            if manifest.base is None and not manifest.data:
                dead_ends.append(f"version {version} has no data: {manifest.meta.get('hint', 'see its meta')}")
                continue
            item = (cost + manifest.stored_bytes, next(tie), manifest.base, (way, *path))
            heapq.heappush(queue, item)
    raise NotFoundError(
        "no way leads to the version",
        kind="chain-broken",
        where=f"version {wanted}",
        expected=f"ways from {'nothing' if held is None else f'version {held}'}",
        found=f"missing: {', '.join(dead_ends)}",
    )


def _check_link(ways: Sequence[Stored], path: tuple[Stored, ...]) -> None:
    """The base that the next way was made from must be this very manifest."""
    if path and path[0].manifest.base_digest != ways[0].digest:
        raise FormatError(
            "way from another manifest of its base",
            kind="base-digest",
            where=f"version {path[0].manifest.version}",
            expected=path[0].manifest.base_digest.hex() if path[0].manifest.base_digest else None,
            found=ways[0].digest.hex(),
        )
