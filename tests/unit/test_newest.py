"""The newest version is found by a few questions, whatever the hint says and however much lies beside."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

import deltafmt
from deltafmt.errors import StoreError
from deltafmt.format import keys
from deltafmt.format.objects import emit_latest, emit_lineage
from deltafmt.format.records import LatestRecord, LineageRecord
from deltafmt.read.history import History
from deltafmt.read.newest import find_newest
from deltafmt.store import MemoryStore
from deltafmt.testing.faulty import FaultyStore, failing
from deltafmt.write.hint import leave_hint

MILLION = 1_000_000


class Run:
    """Versions `[lowest, stop)`, and the number of questions asked about them."""

    def __init__(self, lowest: int, stop: int) -> None:
        self.lowest, self.stop, self.asked = lowest, stop, 0

    def exists(self, version: int) -> bool:
        self.asked += 1
        return self.lowest <= version < self.stop

    def newest(self, start: int | None) -> int | None:
        self.asked = 0
        return find_newest(start=start, exists=self.exists, floor=lambda: self.lowest, listed=list)


@pytest.mark.parametrize("lowest", [0, 1, 123_456, MILLION - 1])
def test_a_million_versions(lowest: int) -> None:
    run = Run(lowest, MILLION)
    # Nothing new; one version new; a lie; no hint at all.
    for start, questions in ((MILLION - 1, 2), (MILLION - 2, 4), (MILLION, 45), (10**18 - 1, 45), (None, 43)):
        assert run.newest(start) == MILLION - 1
        assert run.asked <= questions, (start, run.asked)
    for start in (0, lowest - 1, lowest, 999, 500_000, 999_000):
        if start >= 0:
            assert run.newest(start) == MILLION - 1
            assert run.asked <= 45


def test_every_run_from_every_beginning() -> None:
    for lowest in range(4):
        for stop in range(lowest + 1, 20):
            for start in (None, *range(24)):
                assert Run(lowest, stop).newest(start) == stop - 1
    assert [Run(0, 0).newest(start) for start in (None, 0, 1, 7)] == [None] * 4


@pytest.mark.parametrize("seed", range(200))
def test_right_at_some_moment_while_versions_come_and_go(seed: int) -> None:
    """Between any two questions a writer adds versions and a collector removes the oldest."""
    chance = random.Random(seed)
    run = Run(0, chance.randrange(1, 40))
    first = run.stop - 1

    def exists(version: int) -> bool:
        there = run.exists(version)
        if chance.random() < 0.5:
            run.stop += chance.choice((0, 0, 1, 5))
            run.lowest = min(run.stop - 1, run.lowest + chance.choice((0, 0, 1, 8)))
        return there

    start = chance.choice((None, chance.randrange(60)))
    found = find_newest(
        start=start, exists=exists, floor=lambda: run.lowest, listed=lambda: range(run.lowest, run.stop)
    )
    assert found is not None
    assert first <= found <= run.stop - 1


def filled(count: int) -> tuple[MemoryStore, FaultyStore]:
    """A lineage whose manifests are the same one under `count` names, and the way to it that counts calls."""
    inner = MemoryStore()
    store = FaultyStore(inner)
    inner.put(keys.LINEAGE, emit_lineage(LineageRecord(lineage=b"l" * 16, created=0, schema=b"s" * 32)))
    inner.objects.update(dict.fromkeys(map(keys.version_key, range(count)), b"?"))
    return inner, store


class Bare(History):
    """A history that takes every manifest for whole."""

    def first_way(self, version: int) -> None:  # type: ignore[override]
        assert self.store.exists(keys.version_key(version))


LIES = {
    "none": None,
    "garbage": b"\x00" * 40,
    "empty": b"",
    "huge": b"\x00" * 100_000,
    "another kind": emit_lineage(LineageRecord(lineage=b"l" * 16, created=0, schema=b"s" * 32)),
    "late": emit_latest(LatestRecord(lineage=b"l" * 16, version=17)),
    "too high": emit_latest(LatestRecord(lineage=b"l" * 16, version=10**18 - 1)),
    "of another lineage": emit_latest(LatestRecord(lineage=b"x" * 16, version=29_000)),
    "right": emit_latest(LatestRecord(lineage=b"l" * 16, version=29_999)),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_hint_may_be_anything(lie: str) -> None:
    inner, store = filled(30_000)
    inner.objects.update(
        {f"versions/{name}": b"?" for name in ("9.dfm", "99999999999999999999.dfm", "a/b.dfm")}
    )
    inner.objects[f"versions/{40_000:020d}.dfm.tmp"] = b"?"
    data = LIES[lie]
    if data is not None:
        inner.put(keys.LATEST, data)
    history = Bare(store)
    assert history.latest() == 29_999
    assert len(store.log) <= (7 if lie == "right" else 45)
    store.heal()
    assert history.latest() == 29_999
    assert len(store.log) <= 3
    assert all(call.verb == "size" for call in store.log), "nothing is listed or read to find nothing new"


def test_what_was_collected_is_no_beginning() -> None:
    inner, store = filled(30_000)
    history = Bare(store)
    inner.put(keys.LATEST, emit_latest(LatestRecord(lineage=b"l" * 16, version=12)))
    assert history.latest() == 29_999
    inner.objects.update(dict.fromkeys(map(keys.version_key, range(30_000, 40_000)), b"?"))
    inner.put(keys.floor_key(39_000), b"?")
    inner.delete(map(keys.version_key, range(39_000)))
    store.heal()
    for each in (history, Bare(store)):
        assert each.latest() == 39_999
    assert len(store.log) < 80


def test_a_hint_that_cannot_be_read_is_none_but_storage_that_is_gone_is_an_error() -> None:
    _, store = filled(5)
    store.inject(failing(StoreError("no", kind="store-failed")), key=keys.LATEST, times=99)
    assert Bare(store).latest() == 4
    store.heal()
    store.inject(failing(StoreError("no", kind="store-unreachable")), times=99)
    with pytest.raises(StoreError):
        Bare(store).latest()


def test_writers_leave_a_hint_and_do_without() -> None:
    url = "memory://hints"
    inner = MemoryStore.named("hints")
    writer = deltafmt.Writer(url)
    value = np.zeros(8, np.float32)
    for version in range(3):
        assert writer.publish({"w": value}) if version else writer.publish_anchor({"w": value}) == 0
        value[version] = 1
    history = History(inner)
    assert history.latest() == 2
    manifest = history.first_way(2).manifest
    assert inner.read(keys.LATEST) == emit_latest(LatestRecord(lineage=manifest.lineage, version=2))
    store = FaultyStore(inner)
    store.inject(failing(StoreError("no", kind="store-failed")), key=keys.LATEST)
    leave_hint(store, manifest)
    assert store.log
    # A version whose manifest is cut is not committed, hint or no hint.
    cut = inner.read(keys.version_key(2))[:-5]
    inner.put(keys.version_key(2), cut)
    inner.put(keys.version_key(3), b"")
    assert History(inner).latest() == 1
    assert history.latest() == 2, "what this handle has read whole"


def test_the_vector_of_a_hint_that_lies() -> None:
    root = Path(__file__).parents[2] / "spec" / "vectors" / "good" / "hint-ahead"
    assert deltafmt.open(str(root)).latest() == 2
