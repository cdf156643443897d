"""The cheapest chain of ways from what is held to what is wanted."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from deltafmt.errors import DeltafmtError, FormatError, NotFoundError, UnsupportedError
from deltafmt.format.records import Manifest
from deltafmt.read.history import Stored

Path = tuple[Stored, ...]

_GROWTH = 0.65
"""A way over n deltas takes about n to this power times the bytes of one, as training changes weights."""
_DETOUR = 1.2
"""How much more than one way the rest of a chain is likely to take."""


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

    Goes back from `wanted`, the likely cheapest first, judged by the ways read so far: one that replaces
    many deltas takes more bytes than a single one, but far fewer than all. So of a long history little is
    read, and hardly a byte is given away. An anchor serves whoever holds another version, too, unless `anchors` is False. An anchor without data leads
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
    """A way to `version`, from where `path` (`cost` bytes) leads on; `way` None: not read yet."""

    version: int
    base: int | None
    way: Stored | None
    path: Path
    cost: int


class _Search:
    """Looks for a chain from one version to a later one: best first, by what a chain is likely to cost."""

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
        self._queue: list[tuple[float, int, _Edge]] = []
        self._reached: dict[int, int] = {}
        self._sizes: list[float] = []
        self._anchor_bytes = 0

    def run(self) -> Path | None:
        """The path found; None if there is none."""
        if self._held == self._wanted:
            return ()
        self._expand(self._wanted, (), 0)
        while self._queue:
            _, _, edge = heapq.heappop(self._queue)
            if edge.way is None:
                self._read(edge)
                continue
            path = (edge.way, *edge.path)
            if edge.base is None:
                return path
            if edge.base != self._held:
                self._expand(edge.base, path, edge.cost + edge.way.manifest.stored_bytes)
            elif self._held_digest in (None, edge.way.manifest.base_digest):
                return path
            else:
                # What is held is another version of that number.
                self._dead_ends.differ(edge.way, self._held_digest)
        return None

    def _read(self, edge: _Edge) -> None:
        way = _further(self._ways, edge.version, edge.base, self._dead_ends)
        if way is None:
            return
        if edge.base is None:
            self._anchor_bytes = way.manifest.stored_bytes
        self._put(replace(edge, way=way))

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
        own = first.manifest.base
        if own is not None:
            self._sizes.append(first.manifest.stored_bytes / (version - own) ** _GROWTH)
        edges = [_Edge(version, base, None, path, cost) for base in bases]
        if own is not None or first.manifest.data:
            edges.append(_Edge(version, own, first, path, cost))
        else:
            self._dead_ends.missing.append(_without_data(first.manifest))
        # An anchor is never smaller than a single delta, which takes a domain whole where that is smaller.
        anchors = self._anchors and all(edge.base != self._held for edge in edges)
        for edge in edges:
            if anchors if edge.base is None else edge.base >= self._held:
                self._put(edge)

    def _put(self, edge: _Edge) -> None:
        heapq.heappush(self._queue, (edge.cost + self._likely(edge), next(self._tie), edge))

    def _likely(self, edge: _Edge) -> float:
        """Bytes of the way, as far as they are known, and of what is likely to come before it."""
        known = None if edge.way is None else edge.way.manifest.stored_bytes
        if edge.base is None:
            return self._anchor_bytes if known is None else known
        typical = sum(self._sizes) / len(self._sizes) if self._sizes else 0.0
        rest: float = _DETOUR * typical * (edge.base - self._held) ** _GROWTH
        own: float = typical * (edge.version - edge.base) ** _GROWTH if known is None else known
        return rest + own


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
