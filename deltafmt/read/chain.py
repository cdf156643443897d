"""The cheapest chain of ways from what is held to what is wanted."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from deltafmt.errors import DeltafmtError, FormatError, NotFoundError, UnsupportedError
from deltafmt.format.records import Manifest
from deltafmt.read.history import Stored

Path = tuple[Stored, ...]


class Ways(Protocol):
    """What a chain asks of a lineage, each a request or two; `NotFoundError` for what is not there."""

    def first_way(self, version: int, /) -> Stored: ...

    def further_bases(self, version: int, /) -> Sequence[int | None]:
        """Where the further ways start (None: an anchor), without reading them."""

    def further_way(self, version: int, base: int | None, /) -> Stored: ...


def cheapest_chain(
    ways: Ways, held: int | None, wanted: int, *, held_digest: bytes | None = None, anchors: bool = True
) -> list[Stored]:
    """Ways that lead from version `held` (None: from nothing) to `wanted`, for few stored bytes in all.

    Goes back from `wanted` by the ways that reach farthest, so that of a long history little is read; then
    looks into those left aside that could be cheaper, judged by the bytes per version of what was found. An
    anchor serves whoever holds another version, too, unless `anchors` is False. An anchor without data leads
    nowhere, nor does a way made from other manifests than the ones that stand there (for `held`: than the
    one of `held_digest`).

    Raises `NotFoundError` (`chain-broken`) naming what is missing, or the error of a damaged manifest in the
    way, or `FormatError` (`base-differs`) where nothing is missing or damaged but manifests disagree.
    """
    dead_ends = _DeadEnds()
    if held is not None and held <= wanted:
        path = _Search(ways, held, wanted, held_digest, dead_ends, anchors).run()
        if path is not None:
            return list(path)
    path = _from_nothing(ways, wanted, dead_ends) if anchors else None
    if path is None:
        raise dead_ends.error(held, wanted)
    return list(path)


def _from_nothing(ways: Ways, wanted: int, dead_ends: _DeadEnds) -> Path | None:
    """The newest anchor that leads to `wanted`, and the chain from there: older ones are hardly smaller."""
    queue, seen = [-wanted], {wanted}
    while queue:
        version = -heapq.heappop(queue)
        met = _met(ways, version, dead_ends, must=version == wanted)
        if met is None:
            continue
        first, bases = met
        anchor = _anchor(ways, first, bases, dead_ends)
        if anchor is not None:
            rest = _Search(ways, version, wanted, first.digest, dead_ends, anchors=False).run()
            if rest is not None:
                return (anchor, *rest)
        for base in (first.manifest.base, *bases):
            if base is not None and base not in seen:
                seen.add(base)
                heapq.heappush(queue, -base)
    return None


def _anchor(ways: Ways, first: Stored, bases: Sequence[int | None], dead_ends: _DeadEnds) -> Stored | None:
    """A version's way from nothing that has data."""
    if first.manifest.base is None:
        if first.manifest.data:
            return first
        dead_ends.missing.append(_without_data(first.manifest))
    return _further(ways, first.manifest.version, None, dead_ends) if None in bases else None


def _met(
    ways: Ways, version: int, dead_ends: _DeadEnds, *, must: bool
) -> tuple[Stored, Sequence[int | None]] | None:
    """A version's own manifest and where its further ways start; None where there is no use in it."""
    try:
        return ways.first_way(version), ways.further_bases(version)
    except (NotFoundError, FormatError, UnsupportedError) as error:
        if must:
            raise
        dead_ends.add(error, f"version {version}")
    return None


def _further(ways: Ways, version: int, base: int | None, dead_ends: _DeadEnds) -> Stored | None:
    """A further way; None where it has vanished or is damaged, which takes down no more than itself."""
    try:
        return ways.further_way(version, base)
    except (NotFoundError, FormatError, UnsupportedError) as error:
        dead_ends.add(error, f"a way from {base} to {version}")
    return None


@dataclass(frozen=True, slots=True)
class _Edge:
    """A way from `base` to a version from which `path` (`cost` bytes) leads on; `way` None: not read yet."""

    version: int
    base: int
    way: Stored | None
    path: Path
    cost: int


class _Search:
    """Looks for a chain from one version to a later one."""

    def __init__(
        self,
        ways: Ways,
        held: int,
        wanted: int,
        held_digest: bytes | None,
        dead_ends: _DeadEnds,
        anchors: bool,
    ) -> None:
        self._ways, self._held, self._wanted = ways, held, wanted
        self._held_digest, self._dead_ends, self._anchors = held_digest, dead_ends, anchors
        self._tie = itertools.count()
        self._queue: list[tuple[tuple[float, ...], int, _Edge]] = []
        self._reached: dict[int, int] = {}
        self._best: Path | None = None
        self._best_cost: float = float("inf")
        self._arrived = False

    def run(self) -> Path | None:
        """The cheapest path found; None if there is none."""
        if self._held == self._wanted:
            return ()
        self._expand(self._wanted, (), 0)
        while self._queue:
            _, _, edge = heapq.heappop(self._queue)
            if self._estimate(edge) < self._best_cost:
                self._follow(edge)
        return self._best

    def _follow(self, edge: _Edge) -> None:
        if edge.way is None:
            way = _further(self._ways, edge.version, edge.base, self._dead_ends)
            if way is not None:
                self._push(edge.version, way, edge.path, edge.cost)
            return
        path = (edge.way, *edge.path)
        cost = edge.cost + edge.way.manifest.stored_bytes
        if edge.base != self._held:
            self._expand(edge.base, path, cost)
        elif self._held_digest in (None, edge.way.manifest.base_digest):
            self._take(path, cost)
            if not self._arrived:
                self._arrived = True
                self._queue = [(self._order(entry), tie, entry) for _, tie, entry in self._queue]
                heapq.heapify(self._queue)
        else:
            # What is held is another version of that number.
            self._dead_ends.differ(edge.way, self._held_digest)

    def _expand(self, version: int, path: Path, cost: int) -> None:
        """Put the ways to a version into the queue."""
        if self._reached.get(version, cost + 1) <= cost:
            return
        met = _met(self._ways, version, self._dead_ends, must=not path)
        if met is None:
            return
        first, bases = met
        if path and path[0].manifest.base_digest != first.digest:
            self._dead_ends.differ(path[0], first.digest)
            return
        self._reached[version] = cost
        if first.manifest.base is not None and first.manifest.base >= self._held:
            self._push(version, first, path, cost)
        for base in bases:
            if base is not None and base >= self._held:
                self._put(_Edge(version, base, None, path, cost))
        self._consider_anchor(first, bases, path, cost)

    def _consider_anchor(self, first: Stored, bases: Sequence[int | None], path: Path, cost: int) -> None:
        """Start from nothing if that is cheaper; of several anchors the one met first has the shortest rest."""
        alone = not path and any(edge.base == self._held for _, _, edge in self._queue)
        if not self._anchors or self._best is not None or alone:
            return
        anchor = _anchor(self._ways, first, bases, self._dead_ends)
        if anchor is not None:
            self._take((anchor, *path), cost + anchor.manifest.stored_bytes)

    def _take(self, path: Path, cost: int) -> None:
        if cost < self._best_cost:
            self._best, self._best_cost = path, cost

    def _push(self, version: int, way: Stored, path: Path, cost: int) -> None:
        assert way.manifest.base is not None
        self._put(_Edge(version, way.manifest.base, way, path, cost))

    def _put(self, edge: _Edge) -> None:
        heapq.heappush(self._queue, (self._order(edge), next(self._tie), edge))

    def _order(self, edge: _Edge) -> tuple[float, ...]:
        """First by what is left to go, and once something is found, by what a chain would cost."""
        return (self._estimate(edge),) if self._arrived else (edge.base - self._held, edge.cost)

    def _estimate(self, edge: _Edge) -> float:
        """Bytes of a chain by this way, its unknown part as cheap per version as the best chain found."""
        known = edge.version if edge.way is None else edge.base
        cost = edge.cost + (0 if edge.way is None else edge.way.manifest.stored_bytes)
        if not self._arrived:
            return cost
        return cost + self._best_cost * (known - self._held) / (self._wanted - self._held)


def _without_data(manifest: Manifest) -> str:
    hint = manifest.meta.get("hint", manifest.meta or "no hint is given")
    return f"the data of version {manifest.version}, an anchor whose bytes are elsewhere ({hint})"


@dataclass(slots=True)
class _DeadEnds:
    """Why no chain was found."""

    missing: list[str] = field(default_factory=list)
    damaged: list[DeltafmtError] = field(default_factory=list)
    differing: list[FormatError] = field(default_factory=list)

    def add(self, error: DeltafmtError, what: str) -> None:
        if isinstance(error, NotFoundError):
            self.missing.append(f"{what} ({error.kind})")
        else:
            self.damaged.append(error)

    def differ(self, way: Stored, found: bytes | None) -> None:
        assert way.manifest.base_digest is not None
        error = FormatError(
            f"way was made from another version {way.manifest.base} than the one that is there",
            kind="base-differs",
            where=way.key,
            expected=way.manifest.base_digest.hex(),
            found=None if found is None else found.hex(),
        )
        self.differing.append(error)

    def error(self, held: int | None, wanted: int) -> Exception:
        if self.damaged:
            return self.damaged[0]
        if self.differing and not self.missing:
            return self.differing[0]
        missing = dict.fromkeys(self.missing)
        return NotFoundError(
            f"no way leads to version {wanted}",
            kind="chain-broken",
            where="missing: " + (", ".join(missing) or "a delta"),
            expected=f"ways from {'nothing' if held is None else f'version {held} or from nothing'}",
        )
