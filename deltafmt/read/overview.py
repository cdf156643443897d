"""All versions of a lineage at once: two listings, and the manifests read side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deltafmt.errors import FormatError, NotFoundError, UnsupportedError
from deltafmt.format import keys
from deltafmt.read.history import History, Stored
from deltafmt.store import Range

_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A version: its first way, or what is wrong with its manifest, and the bases of its further ways by name."""

    version: int
    first: Stored | FormatError
    further: tuple[int | None, ...]


def overview(history: History, *, last: int | None = None) -> Iterator[Listed]:
    """Every version (or the `last` so many) with a manifest, ascending; those removed meanwhile are left out."""
    sizes = _sizes(history)
    versions = sorted(sizes)
    if last is not None:
        versions = versions[max(0, len(versions) - last) :]
    further = _further(history, versions)
    for start in range(0, len(versions), _BATCH):
        for version, first in _first_ways(history, versions[start : start + _BATCH], sizes):
            yield Listed(version=version, first=first, further=further.get(version, ()))


def _first_ways(
    history: History, versions: Sequence[int], sizes: dict[int, int | None]
) -> Iterator[tuple[int, Stored | FormatError]]:
    ranges = [Range(keys.version_key(version), 0, sizes[version] or 0) for version in versions]
    whole: Sequence[memoryview | None] = [None] * len(versions)
    known = all(sizes[version] is not None for version in versions)
    if known and max((each.nbytes for each in ranges), default=0) <= history.object_bytes:
        try:
            whole = list(history.store.read_ranges(ranges))
        except NotFoundError:
            # One was removed meanwhile: they are asked for one by one.
            whole = [None] * len(versions)
    for version, data in zip(versions, whole, strict=True):
        try:
            yield version, history.first_way(version, data)
        except NotFoundError as error:
            if error.kind == "object-missing":
                raise
        except FormatError as error:
            yield version, error


def _sizes(history: History) -> dict[int, int | None]:
    """All versions, with the sizes of their manifests where storage tells them with their names."""
    floor = history.floor()
    try:
        entries = {entry.key: entry.size for entry in history.store.entries(keys.VERSIONS)}
    except UnsupportedError:
        return dict.fromkeys(history.versions())
    named = ((keys.version_of(key), size) for key, size in entries.items())
    return {version: size for version, size in named if version is not None and version >= floor}


def _further(history: History, versions: Sequence[int]) -> dict[int, tuple[int | None, ...]]:
    """Bases of the further ways to each version, in the order of their names."""
    store = history.store
    try:
        found = [entry.key for entry in store.entries(keys.WAYS)]
    except UnsupportedError:
        found = [key for version in versions for key in store.list(keys.ways_folder(version))]
    bases: dict[int, list[int | None]] = defaultdict(list)
    for way in map(keys.way_of, found):
        if way is not None:
            bases[way[0]].append(way[1])
    return {version: tuple(ways) for version, ways in bases.items()}
