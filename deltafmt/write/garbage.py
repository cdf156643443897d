"""What a lineage no longer needs: told from the names and ages of its objects, and where need be from manifests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from deltafmt.errors import DeltafmtError, FormatError, NotFoundError, UnsupportedError
from deltafmt.format import keys
from deltafmt.format.objects import parse_lineage, parse_manifest
from deltafmt.format.records import Manifest
from deltafmt.store import Entry, Store

WAY, VERSION, SHARD = "way", "version", "shard"
ORPHAN, ATTEMPT, UNREFERENCED = "orphan", "attempt", "unreferenced"
LEASE, FLOOR, PROBE, REMNANT = "lease", "floor", "probe", "remnant"
REASONS = {
    WAY: "further ways that start or end below the oldest version kept, or have lost their shards",
    VERSION: "manifests of versions below it",
    SHARD: "shards of these versions and ways",
    ORPHAN: "shards that no manifest names",
    ATTEMPT: "records of attempts that are over",
    UNREFERENCED: "schemas, tilings and side files that nothing names",
    LEASE: "leases that have run out",
    FLOOR: "floors below the highest one",
    PROBE: "objects by which somebody tried the storage",
    REMNANT: "unfinished files of processes that died",
}
"""Why objects are removed, in the order in which it is done."""

_LOOK_BACK = 1000
"""Versions whose shards are checked even where there is one attempt's only; what is left of older ones goes with
them."""

Way = tuple[int, int | None]
"""(version, base); base None for an anchor."""
Attempts = Mapping[bytes, list[Entry]]
"""Shards by the attempt that wrote them."""
Damaged = dict[str, "Unreadable"]
"""Manifests that cannot be read, by their keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """An object that is not needed; `reason` is a key of `REASONS`."""

    key: str
    size: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A manifest that is damaged, or of a newer format, so that whatever it may name has to stay."""

    key: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What divides the needed from the rest.

    Versions from `oldest` to `newest` are kept. What is younger than `grace_seconds` at `now`, by the storage's
    clock, may belong to work under way.
    """

    oldest: int
    newest: int
    floor: int
    now: float
    grace_seconds: float

    def aged(self, entry: Entry) -> bool:
        return self.now - entry.modified >= self.grace_seconds

    def drops(self, version: int, base: int | None) -> bool:
        """Whether a way starts or ends below what is kept."""
        return version < self.oldest or (base is not None and base < self.oldest)


def find_garbage(store: Store, bounds: Bounds, damaged: Damaged) -> Iterator[Removal]:
    """All that can go except leases, in an order in which no version that is listed ever lacks anything.

    Objects whose names are none of the format's are never among it. `damaged` gathers manifests met that
    cannot be read.
    """
    # Ways before their shards: a way that is seen had all of its shards by then.
    ways = {way: entry for entry in store.entries(keys.WAYS) if (way := keys.way_of(entry.key)) is not None}
    further, first = _shards(store, keys.WAYS_DATA), _shards(store, keys.DATA)
    gone = {way for way in ways if bounds.drops(*way) or _is_bare(store, way, further, damaged)}
    yield from (_removal(ways[way], WAY) for way in sorted(gone, key=lambda way: ways[way].key))
    yield from _versions(store, bounds)
    yield from _first_shards(store, bounds, first, damaged)
    yield from _further_shards(store, bounds, further, ways.keys() - gone, damaged)
    for entry in store.entries(keys.ATTEMPTS):
        number = keys.attempt_of(entry.key)
        if number is not None and number <= bounds.newest and bounds.aged(entry):
            yield _removal(entry, ATTEMPT)
    yield from unreferenced(store, bounds, damaged)
    for entry in store.entries(keys.FLOORS):
        number = keys.floor_of(entry.key)
        if number is not None and number < bounds.floor:
            yield _removal(entry, FLOOR)
    probes = (entry for entry in store.entries(keys.PROBES) if keys.is_probe(entry.key))
    yield from (_removal(entry, PROBE) for entry in probes if bounds.aged(entry))
    yield from (_removal(entry, REMNANT) for entry in store.remnants() if bounds.aged(entry))


def read_manifest(store: Store, key: str, damaged: Damaged, *, way: bool) -> Manifest | None:
    """A manifest; None if it is gone, or is damaged, which is then noted."""
    try:
        return parse_manifest(store.read(key), way=way, where=key)
    except NotFoundError:
        return None
    except (FormatError, UnsupportedError) as error:
        note(damaged, key, error)
        return None


def note(damaged: Damaged, key: str, error: DeltafmtError) -> None:
    """Keep in mind what is wrong with a manifest."""
    damaged[key] = Unreadable(key=key, why=str(error))


def _removal(entry: Entry, reason: str) -> Removal:
    return Removal(key=entry.key, size=entry.size, reason=reason)


def _shards(store: Store, folder: str) -> dict[Way, dict[bytes, list[Entry]]]:
    """Shards of all ways of which there are any, by way and attempt; first ways go by (version, None)."""
    found: dict[Way, dict[bytes, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in store.entries(folder):
        name = keys.shard_of(entry.key)
        if name is not None:
            found[name.version, name.base][name.attempt].append(entry)
    return found


def _is_bare(store: Store, way: Way, further: Mapping[Way, Attempts], damaged: Damaged) -> bool:
    """Whether a way has lost its shards: somebody died between taking them away and taking it back."""
    if way in further:
        return False
    manifest = read_manifest(store, keys.way_key(*way), damaged, way=True)
    return manifest is not None and bool(manifest.shard_keys)


def _versions(store: Store, bounds: Bounds) -> Iterator[Removal]:
    """From the lowest up, so that those that are left always follow one another."""
    for entry in store.entries(keys.VERSIONS):
        number = keys.version_of(entry.key)
        if number is not None and number < bounds.oldest:
            yield _removal(entry, VERSION)


def _first_shards(
    store: Store, bounds: Bounds, first: Mapping[Way, Attempts], damaged: Damaged
) -> Iterator[Removal]:
    for (version, _), attempts in sorted(first.items()):
        if version < bounds.oldest:
            yield from _all_of(attempts, SHARD)
        elif version == bounds.oldest or (
            version <= bounds.newest and _is_suspect(version, attempts, bounds)
        ):
            manifest = read_manifest(store, keys.version_key(version), damaged, way=False)
            if manifest is None:
                continue
            others = {attempt: shards for attempt, shards in attempts.items() if attempt != manifest.attempt}
            if bounds.drops(version, manifest.base):
                yield from _all_of({manifest.attempt: attempts.get(manifest.attempt, [])}, SHARD)
            yield from _aged(bounds, others)


def _is_suspect(version: int, attempts: Attempts, bounds: Bounds) -> bool:
    """Whether the manifest is worth reading to tell the version's shards from those of failed attempts."""
    recent = version > bounds.newest - _LOOK_BACK
    return (len(attempts) > 1 or recent) and any(
        bounds.aged(e) for shards in attempts.values() for e in shards
    )


def _further_shards(
    store: Store, bounds: Bounds, further: Mapping[Way, Attempts], ways: Iterable[Way], damaged: Damaged
) -> Iterator[Removal]:
    standing = set(ways)
    for way, attempts in sorted(
        further.items(), key=lambda item: (item[0][0], item[0][1] is None, item[0][1])
    ):
        if bounds.drops(*way):
            yield from _all_of(attempts, SHARD)
        elif way[0] > bounds.newest:
            continue
        elif way not in standing:
            yield from _aged(bounds, attempts)
        elif len(attempts) > 1:
            manifest = read_manifest(store, keys.way_key(*way), damaged, way=True)
            if manifest is not None:
                yield from _aged(bounds, {a: s for a, s in attempts.items() if a != manifest.attempt})


def _all_of(attempts: Attempts, reason: str) -> Iterator[Removal]:
    for shards in attempts.values():
        yield from (_removal(entry, reason) for entry in shards)


def _aged(bounds: Bounds, attempts: Attempts) -> Iterator[Removal]:
    """Shards of attempts of which even the youngest is older than the grace time."""
    old = {attempt: shards for attempt, shards in attempts.items() if all(map(bounds.aged, shards))}
    yield from _all_of(old, ORPHAN)


def unreferenced(store: Store, bounds: Bounds, damaged: Damaged) -> Iterator[Removal]:
    """Contents that nothing names. Manifests are read only until none is left: most often that is one."""
    folders = (keys.SCHEMAS, keys.TILINGS, keys.FILES)
    found = (entry for folder in folders for entry in store.entries(folder) if keys.is_content(entry.key))
    left = {entry.key: entry for entry in found if bounds.aged(entry)}
    named = _named(store, bounds, damaged)
    while left and (key := next(named, None)) is not None:
        left.pop(key, None)
    if damaged:
        # They may name anything.
        return
    yield from (_removal(entry, UNREFERENCED) for entry in left.values())


def _named(store: Store, bounds: Bounds, damaged: Damaged) -> Iterator[str]:
    """Keys of the contents that the descriptor and the versions and ways kept name, the newest first."""
    yield keys.schema_key(parse_lineage(store.read(keys.LINEAGE), where=keys.LINEAGE).schema)
    for key in reversed([entry.key for entry in store.entries(keys.VERSIONS)]):
        version = keys.version_of(key)
        if version is not None and not bounds.drops(version, None):
            yield from _contents(read_manifest(store, key, damaged, way=False))
    for entry in store.entries(keys.WAYS):
        way = keys.way_of(entry.key)
        if way is not None and not bounds.drops(*way):
            yield from _contents(read_manifest(store, entry.key, damaged, way=True))


def _contents(manifest: Manifest | None) -> Iterator[str]:
    if manifest is not None:
        yield keys.schema_key(manifest.schema)
        yield keys.tiling_key(manifest.tiling)
        yield from (keys.file_key(digest) for digest, _ in manifest.files.values())
