"""Retention: raise the floor, respect the leases, remove what nobody needs."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from deltafmt.errors import FormatError, NotFoundError, StoreError, UnsupportedError, VersionGoneError
from deltafmt.format import keys
from deltafmt.format.objects import emit_floor
from deltafmt.format.records import FloorRecord
from deltafmt.read.history import History
from deltafmt.store import AlreadyExists, Entry, Store
from deltafmt.write.commit import now_ms
from deltafmt.write.garbage import (
    LEASE,
    ORPHAN,
    REMNANT,
    UNREFERENCED,
    Bounds,
    Damaged,
    Removal,
    Unreadable,
    find_garbage,
    note,
    read_manifest,
    unreferenced,
)
from deltafmt.write.leases import LiveLease, leases_of

_BATCH = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class GcPlan:
    """What a collection removes, or has removed if `applied`.

    Versions `floor` to `newest` are listed afterwards. `oldest` is below `floor` where a lease, or work that
    it may need, holds older ones back. `blocked` says why the floor is lower than asked for, if it is.
    `damaged` are manifests that cannot be read: what they may name stays.
    """

    newest: int | None
    floor: int
    floor_before: int
    oldest: int
    leases: tuple[LiveLease, ...]
    removals: tuple[Removal, ...]
    blocked: str | None
    damaged: tuple[Unreadable, ...]
    applied: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all that is removed."""
        return sum(removal.size for removal in self.removals)

    @property
    def counts(self) -> dict[str, int]:
        """Objects removed, by reason."""
        return dict(Counter(removal.reason for removal in self.removals))


def collect(
    history: History,
    *,
    keep_last: int,
    grace_seconds: float,
    dry_run: bool,
    progress: Callable[[int, int], None] | None = None,
) -> GcPlan:
    """See `Lineage.gc`."""
    if keep_last < 1 or grace_seconds < 0:
        raise ValueError(
            f"keep_last is at least 1 and grace_seconds at least 0: {keep_last}, {grace_seconds}"
        )
    if not dry_run:
        history.store.check_exclusive()
    while True:
        try:
            return _collect(history, keep_last, grace_seconds, dry_run, progress)
        except VersionGoneError:
            # Another collector has raised the floor above versions that were being looked at.
            continue


def _collect(
    history: History,
    keep_last: int,
    grace_seconds: float,
    dry_run: bool,
    progress: Callable[[int, int], None] | None,
) -> GcPlan:
    """The steps of the protocol, in its order: floor, leases, manifests, shards, the rest."""
    store = history.store
    lineage = history.descriptor.lineage
    newest = history.latest()
    before = history.floor()
    if newest is None:
        return GcPlan(
            newest=None,
            floor=0,
            floor_before=0,
            oldest=0,
            leases=(),
            removals=(),
            blocked=None,
            damaged=(),
            applied=False,
        )
    damaged: Damaged = {}
    floor, blocked = _new_floor(history, before, newest, keep_last, damaged)
    if floor > before and not dry_run:
        record = FloorRecord(lineage=lineage, version=floor, created=now_ms())
        with suppress(AlreadyExists):
            store.put_if_absent(keys.floor_key(floor), emit_floor(record))
    now = time.time() if dry_run else _storage_time(store)
    live, dead = leases_of(store, lineage, now)
    oldest = _oldest(history, floor, live, damaged)
    bounds = Bounds(oldest=oldest, newest=newest, floor=floor, now=now, grace_seconds=grace_seconds)
    leases = [Removal(key=entry.key, size=entry.size, reason=LEASE) for entry in dead]
    removals = (*find_garbage(store, bounds, damaged), *leases)
    if not dry_run:
        _remove(store, bounds, removals, damaged, progress)
    return GcPlan(
        newest=newest,
        floor=floor,
        floor_before=before,
        oldest=oldest,
        leases=tuple(live),
        removals=removals,
        blocked=blocked,
        damaged=tuple(damaged.values()),
        applied=not dry_run,
    )


def _new_floor(
    history: History, before: int, newest: int, keep_last: int, damaged: Damaged
) -> tuple[int, str | None]:
    """The newest version that serves `keep_last` and from which a reader can start; why it is no newer."""
    wanted = newest + 1 - keep_last
    for version in range(wanted, before, -1):
        if _is_anchored(history, version, damaged):
            break
    else:
        version = before
    if version >= wanted:
        return version, None
    return version, (
        f"more than {keep_last} stay: no version from {version + 1} to {wanted} has an anchor with its data, "
        "from which a reader could start; `deltafmt anchor` or Lineage.add_anchor adds one"
    )


def _is_anchored(history: History, version: int, damaged: Damaged) -> bool:
    """Whether an anchor way leads to the version whose shards are all there; damage that is met is noted."""
    try:
        manifest = history.first_way(version).manifest
    except (FormatError, UnsupportedError) as error:
        note(damaged, keys.version_key(version), error)
        return False
    if manifest.base is not None or not manifest.data:
        if None not in history.further_bases(version):
            return False
        try:
            manifest = history.further_way(version, None).manifest
        except (NotFoundError, FormatError, UnsupportedError):
            # Readers would not start from it either.
            return False
    return all(map(history.store.exists, manifest.shard_keys))


def _storage_time(store: Store) -> float:
    """What time it is by the clock by which the storage dates objects."""
    key = keys.probe_key(secrets.token_bytes(16))
    store.put(key, b"")
    try:
        for entry in store.entries(keys.PROBES):
            if entry.key == key:
                return entry.modified
    finally:
        store.delete([key])
    raise StoreError("an object that was just written is not listed", kind="store-failed", where=key)


def _oldest(history: History, floor: int, leases: Iterable[LiveLease], damaged: Damaged) -> int:
    """The oldest version that must stay: the floor, or what a lease starts from and the anchor below that."""
    start = min((lease.start for lease in leases), default=floor)
    if start >= floor:
        return floor
    there = (keys.version_of(entry.key) for entry in history.store.entries(keys.VERSIONS))
    lowest = min((version for version in there if version is not None), default=floor)
    for version in range(start, lowest, -1):
        if _is_anchored(history, version, damaged):
            return version
    return min(lowest, floor)


def _remove(
    store: Store,
    bounds: Bounds,
    removals: tuple[Removal, ...],
    damaged: Damaged,
    progress: Callable[[int, int], None] | None,
) -> None:
    done = 0
    for reason, group in itertools.groupby(removals, key=lambda removal: removal.reason):
        for batch in _batches(group):
            _remove_batch(store, bounds, reason, batch, damaged)
            done += len(batch)
            if progress is not None:
                progress(done, len(removals))


def _remove_batch(store: Store, bounds: Bounds, reason: str, batch: list[Removal], damaged: Damaged) -> None:
    names = [removal.key for removal in batch]
    if reason == REMNANT:
        store.discard(Entry(removal.key, removal.size, bounds.now) for removal in batch)
        return
    if reason == UNREFERENCED:
        # A version that was published meanwhile may name what nothing named before.
        still = {removal.key for removal in unreferenced(store, bounds, damaged)}
        names = [name for name in names if name in still]
    store.delete(names)
    if reason == ORPHAN:
        _withdraw_ways(store, names, damaged)


def _withdraw_ways(store: Store, shards: Iterable[str], damaged: Damaged) -> None:
    """Take back the ways that came to exist while their shards were taken for orphans."""
    for name in {keys.shard_of(shard) for shard in shards}:
        if name is None or not name.further:
            continue
        key = keys.way_key(name.version, name.base)
        manifest = read_manifest(store, key, damaged, way=True)
        if manifest is not None and manifest.attempt == name.attempt:
            store.delete([key])


def _batches(group: Iterator[Removal]) -> Iterator[list[Removal]]:
    while batch := list(itertools.islice(group, _BATCH)):
        yield batch
