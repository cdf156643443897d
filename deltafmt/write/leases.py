"""Which readers' leases hold, by the storage's clock."""

from __future__ import annotations

from dataclasses import dataclass

from deltafmt.errors import FormatError, NotFoundError, UnsupportedError
from deltafmt.format import keys
from deltafmt.format.constants import MAX_LEASE_SECONDS
from deltafmt.format.objects import parse_lease
from deltafmt.store import Entry, Store
from deltafmt.threads import pool_of

_ROUNDING_SECONDS = 2.0
"""Times of objects are whole seconds on some storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveLease:
    """A reader at work: the oldest version that it needs, and how long its lease still holds."""

    reader: str
    start: int
    seconds_left: float


@dataclass(frozen=True, slots=True)
class _Held:
    """From which version on a lease holds, and for how long."""

    start: int
    seconds: int


def leases_of(store: Store, lineage: bytes, now: float) -> tuple[list[LiveLease], list[Entry]]:
    """Leases that hold, and the objects of those that do not."""
    entries = [entry for entry in store.entries(keys.LEASES) if keys.lease_of(entry.key) is not None]
    live, dead = [], []
    with pool_of(store.readers, "deltafmt-gc") as pool:
        held = list(pool.map(lambda entry: _held(store, entry.key, lineage), entries))
    for entry, found in zip(entries, held, strict=True):
        if found is None:
            continue
        left = entry.modified + found.seconds + _ROUNDING_SECONDS - now
        if left > 0:
            live.append(LiveLease(reader=entry.key, start=found.start, seconds_left=left))
        else:
            dead.append(entry)
    return live, dead


def _held(store: Store, key: str, lineage: bytes) -> _Held | None:
    """What a lease says; None if it is gone."""
    try:
        record = parse_lease(store.read(key), where=key)
    except NotFoundError:
        return None
    except (FormatError, UnsupportedError):
        # Whoever wrote it may need anything, but not for longer than any lease holds.
        return _Held(0, MAX_LEASE_SECONDS)
    return _Held(record.start, record.seconds if record.lineage == lineage else 0)
