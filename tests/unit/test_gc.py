"""What a collection keeps and what it takes."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier

import pytest
import torch

import deltafmt
from deltafmt.errors import CommitConflictError, FormatError, NotFoundError, VersionGoneError
from deltafmt.format import keys
from deltafmt.format.envelope import seal, unseal
from deltafmt.format.objects import emit_lease
from deltafmt.format.records import LeaseRecord
from deltafmt.store import LocalStore, MemoryStore
from deltafmt.write import garbage
from deltafmt.write.gc import GcPlan
from tests.reading import Course, same
from tests.retention import DAY, assert_listed_are_readable, cloned, collected, opened, past, store_of


@pytest.fixture(scope="module")
def course() -> Course:
    """Versions 0 to 9; 0, 3, 6 and 9 have anchors."""
    return past(10, anchor_every=3)


@pytest.fixture
def store(course: Course) -> MemoryStore:
    return cloned(store_of(course))


def put_lease(store: MemoryStore, start: int, seconds: int = 900) -> str:
    lineage = opened(store).history.descriptor.lineage
    record = LeaseRecord(lineage=lineage, reader=bytes([start] * 16), start=start, seconds=seconds, created=0)
    key = keys.lease_key(record.reader)
    store.put(key, emit_lease(record))
    return key


def age(store: MemoryStore, key: str, seconds: float = 2 * DAY) -> None:
    store._written[key] = store.clock() - seconds


def test_the_newest_versions_stay_and_what_they_need(course: Course, store: MemoryStore) -> None:
    plan = collected(store, keep_last=3)
    assert (plan.floor_before, plan.floor, plan.oldest, plan.newest) == (0, 6, 6, 9)
    assert plan.blocked is not None
    assert "from 7 to 7" in plan.blocked
    assert assert_listed_are_readable(store, course.versions) == [6, 7, 8, 9]
    assert opened(store).verify().ok
    # Version 6 is reached by its anchor: the delta from 5 has lost its base.
    assert [info.ways for info in opened(store).log()] == [(None,), (6,), (7,), (8, None)]
    assert plan.counts == {"way": 1, "version": 6, "shard": 8}
    assert not any(f"/{number:020d}" in key for key in store.objects for number in range(6))
    with pytest.raises(VersionGoneError) as caught:
        opened(store).read(5)
    assert caught.value.kind == "version-gone"
    assert "version 6 or newer" in str(caught.value)
    assert isinstance(caught.value, NotFoundError)


@pytest.mark.parametrize("keep_last", [1, 2, 4, 5, 9, 10, 50])
def test_a_plan_says_what_will_be_done(course: Course, store: MemoryStore, keep_last: int) -> None:
    before = dict(store.objects)
    lineage = opened(store)
    plan = lineage.gc(keep_last=keep_last, grace_seconds=DAY)
    assert store.objects == before, "a dry run"
    done = collected(store, keep_last)
    assert done.removals == plan.removals
    assert (plan.applied, done.applied) == (False, True)
    assert before.keys() - store.objects.keys() == {removal.key for removal in done.removals}
    assert plan.nbytes == sum(len(before[removal.key]) for removal in plan.removals)
    assert collected(store, keep_last).removals == ()
    listed = assert_listed_are_readable(store, course.versions)
    assert len(listed) >= min(keep_last, 10)
    assert listed[0] % 3 == 0


def test_the_newest_can_be_kept_alone(course: Course, store: MemoryStore) -> None:
    plan = collected(store, keep_last=1)
    assert (plan.floor, plan.blocked) == (9, None)
    assert assert_listed_are_readable(store, course.versions) == [9]
    assert len(store.objects) == 8
    with pytest.raises(VersionGoneError):
        opened(store).changes(9)


def test_without_an_anchor_nothing_goes() -> None:
    course = past(4)
    plan = collected(store_of(course))
    assert (plan.floor, plan.removals) == (0, ())
    assert plan.blocked is not None
    assert "add_anchor" in plan.blocked
    opened(store_of(course)).add_anchor(2)
    assert collected(store_of(course)).floor == 2
    assert assert_listed_are_readable(store_of(course), course.versions) == [2, 3]


def test_an_anchor_without_its_data_is_none(course: Course, store: MemoryStore) -> None:
    manifest = opened(store).history.further_ways(6)[0].manifest
    store.delete(manifest.shard_keys)
    assert collected(store, keep_last=2).floor == 3
    assert assert_listed_are_readable(store, course.versions) == [3, 4, 5, 6, 7, 8, 9]
    elsewhere = past(1)
    elsewhere.anchor(store_data=False, meta={"hint": "somewhere"})
    assert collected(store_of(elsewhere), keep_last=1).floor == 0


def test_a_lease_keeps_all_that_its_reader_may_need(course: Course, store: MemoryStore) -> None:
    key = put_lease(store, 4)
    plan = collected(store, keep_last=1)
    assert (plan.floor, plan.oldest) == (9, 3), "version 4 starts from the anchor of version 3"
    assert [(lease.reader, lease.start) for lease in plan.leases] == [(key, 4)]
    assert 0 < plan.leases[0].seconds_left < 1000
    history = opened(store).history
    assert [len(history.ways(version)) for version in range(3, 10)] == [2, 1, 1, 2, 1, 1, 2]
    # For everybody else the versions below the floor are gone.
    assert assert_listed_are_readable(store, course.versions) == [9]
    with pytest.raises(VersionGoneError):
        opened(store).read(4)
    age(store, key, 1000)
    plan = collected(store, keep_last=1)
    assert (plan.oldest, plan.leases, key in store.objects) == (9, (), False)
    assert len(store.objects) == 8


def test_leases_that_do_not_count(store: MemoryStore) -> None:
    age(store, put_lease(store, 1, seconds=60), 70)
    foreign = LeaseRecord(lineage=bytes(16), reader=b"f" * 16, start=1, seconds=60, created=0)
    store.put(keys.lease_key(foreign.reader), emit_lease(foreign))
    age(store, keys.lease_key(foreign.reader), 70)
    store.put("leases/notes.txt", b"not ours")
    plan = collected(store, keep_last=1)
    assert (plan.oldest, plan.leases) == (9, ())
    assert [key for key in store.objects if key.startswith("leases/")] == ["leases/notes.txt"]


def test_a_lease_that_cannot_be_read_holds_everything_for_a_day(store: MemoryStore) -> None:
    key = keys.lease_key(b"x" * 16)
    store.put(key, b"broken")
    assert collected(store, keep_last=1).oldest == 0
    age(store, key, DAY + 10)
    assert collected(store, keep_last=1).oldest == 9
    assert key not in store.objects


def test_leases_are_read_side_by_side(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reader waits for another one: one after the other, they would wait for ever."""
    for start in range(4, 8):
        put_lease(store, start)
    together, read = Barrier(2, timeout=20), store.read_all

    def slowly(key: str) -> bytes:
        if key.startswith("leases/"):
            together.wait()
        return read(key)

    monkeypatch.setattr(store, "read_all", slowly)
    assert [lease.start for lease in collected(store, keep_last=1).leases] == [4, 5, 6, 7]


def test_the_clock_is_the_storages(store: MemoryStore) -> None:
    """A collector whose own clock is days off takes nothing too early."""
    store.clock = lambda: 1_000_000.0
    for key in store.objects:
        store._written[key] = 900_000.0
    put_lease(store, 4)
    orphan = keys.shard_key(version=8, base=None, attempt=b"o" * 16, writer=0, further=False)
    store.put(orphan, b"")
    plan = collected(store, keep_last=1)
    assert plan.oldest == 3
    assert orphan in store.objects
    assert not any(key.startswith("probes/") for key in store.objects)


def test_orphans_go_when_they_are_old(course: Course, store: MemoryStore) -> None:
    attempt = b"o" * 16
    orphans = [
        keys.shard_key(version=8, base=None, attempt=attempt, writer=0, further=False),
        keys.shard_key(version=8, base=None, attempt=attempt, writer=1, further=False),
        keys.shard_key(version=8, base=6, attempt=attempt, writer=0, further=True),
        keys.shard_key(version=9, base=None, attempt=attempt, writer=0, further=True),
    ]
    left = [
        keys.shard_key(version=10, base=None, attempt=attempt, writer=0, further=False),
        keys.shard_key(version=10, base=None, attempt=attempt, writer=0, further=True),
        "data/notes.txt",
        "ways-data/" + keys.version_key(3),
        f"data/{8:020d}/mine/00000.dfs",
    ]
    for key in (*orphans, *left):
        store.put(key, b"1")
        age(store, key, DAY - 1)
    assert collected(store, keep_last=10).removals == ()
    for key in left:
        age(store, key)
    age(store, orphans[0])
    assert collected(store, keep_last=10).removals == (), "the attempt's other shard is young"
    for key in orphans:
        age(store, key)
    plan = collected(store, keep_last=10)
    assert plan.counts == {garbage.ORPHAN: 4}
    assert store.objects.keys() >= set(left[:1] + left[2:])
    assert_listed_are_readable(store, course.versions)
    assert opened(store).verify().ok


def test_attempts_probes_and_contents_go_when_nothing_needs_them(store: MemoryStore) -> None:
    attempt = "ab" * 16
    dead = [
        f"attempts/{9:020d}/{attempt}.dfm",
        f"attempts/{9:020d}/{attempt}/00001.dfm",
        f"attempts/{3:020d}/{attempt}/verdict.dfm",
        f"probes/{attempt}",
        keys.schema_key(b"s" * 32),
        keys.tiling_key(b"t" * 32),
        keys.file_key(b"f" * 32),
    ]
    kept = [f"attempts/{10:020d}/{attempt}.dfm", "probes/mine", "files/readme.txt", "schemas/x.dfm"]
    for key in (*dead, *kept):
        store.put(key, b"1")
    assert collected(store, keep_last=10).removals == ()
    for key in store.objects:
        age(store, key)
    plan = collected(store, keep_last=10)
    assert sorted(removal.key for removal in plan.removals) == sorted(dead)
    assert store.objects.keys() >= set(kept)


def test_contents_go_with_the_last_version_that_names_them() -> None:
    course = past(1)
    course.writer.publish(course.tensors, files={"config.json": b"first"})
    course.versions.append(course.versions[-1])
    del course.tensors["b"]
    course.anchor(files={"config.json": b"second"})
    course.publish()
    store = store_of(course)
    for key in store.objects:
        age(store, key)
    assert len([key for key in store.objects if key.startswith(("schemas/", "tilings/", "files/"))]) == 6
    plan = collected(store, keep_last=1)
    # The first schema stays: the lineage's descriptor names it.
    assert plan.counts == {"version": 2, "shard": 1, "unreferenced": 2}
    assert opened(store).files(3) == {"config.json": b"second"}
    assert opened(store).verify().ok


def test_a_damaged_manifest_is_named_and_what_it_may_name_stays() -> None:
    course = past(1)
    course.anchor(files={"config.json": b"first"})
    course.publish()
    del course.tensors["b"]
    course.anchor()
    store = store_of(course)
    for key in store.objects:
        age(store, key)
    contents = {key for key in store.objects if key.startswith(("schemas/", "tilings/", "files/"))}
    broken = keys.version_key(2)
    store.objects[broken] = store.objects[broken][:-1] + b"?"
    stray = keys.schema_key(b"s" * 32)
    store.put(stray, b"1")
    age(store, stray)
    plan = collected(store, keep_last=3)
    assert [found.key for found in plan.damaged] == [broken]
    assert broken in plan.damaged[0].why
    assert contents | {stray, broken} <= store.objects.keys()
    assert opened(store).files(1) == {"config.json": b"first"}


@pytest.mark.parametrize("version", [6, 7])
def test_a_damaged_manifest_does_not_end_collections(
    course: Course, store: MemoryStore, version: int
) -> None:
    """Where the floor would go, too: from a version that cannot be read no reader starts."""
    broken = keys.version_key(version)
    store.objects[broken] = store.objects[broken][:-1] + b"?"
    plan = collected(store, keep_last=3)
    assert plan.floor == (3 if version == 6 else 6)
    assert [found.key for found in plan.damaged] == [broken]
    assert broken in store.objects
    assert same(opened(store).read(9), course.versions[9])


def test_what_a_newer_build_has_written_stays(course: Course, store: MemoryStore) -> None:
    """A way and a lease with a feature that is not known here."""
    way, lease = keys.way_key(9, 7), put_lease(store, 9)
    body = unseal(store.objects[lease], kind=None, where=lease)
    store.objects[lease] = seal(body | {"required": ["of-tomorrow"]})
    body = unseal(store.objects[keys.version_key(9)], kind=None, where=way)
    store.put(way, seal(body | {"required": ["of-tomorrow"]}))
    plan = collected(store, keep_last=1)
    assert [found.key for found in plan.damaged] == [way]
    assert "of-tomorrow" in plan.damaged[0].why
    assert {way, lease} <= store.objects.keys()
    assert plan.oldest == 0, "the lease may need anything"
    assert_listed_are_readable(store, course.versions)


def test_what_stands_in_the_place_of_a_way_is_not_overwritten(course: Course, store: MemoryStore) -> None:
    key = keys.way_key(8, None)
    store.put(key, b"anything")
    for _ in range(2):
        with pytest.raises(FormatError, match="in the place of this way") as caught:
            opened(store).add_anchor(8)
        assert (caught.value.kind, caught.value.where) == ("truncated", key)
        assert_listed_are_readable(store, course.versions)
    store.delete([key])
    opened(store).add_anchor(8)
    assert collected(store, keep_last=2).floor == 8


def test_a_content_put_again_is_new(course: Course, store: MemoryStore) -> None:
    """A writer that is about to name an old schema again must not lose it to a collector."""
    for key in store.objects:
        age(store, key)
    manifest = opened(store).manifest(9)
    tiling = keys.tiling_key(manifest.tiling)
    from deltafmt.write.commit import put_cut
    from deltafmt.write.cut import Cut

    history = opened(store).history
    put_cut(store, Cut(history.schema(manifest.schema), history.tiling(manifest.tiling, manifest.schema)))
    assert store.clock() - store._written[tiling] < DAY


def test_a_straggler_below_the_floor_is_told_and_leaves_nothing(course: Course, store: MemoryStore) -> None:
    """A writer that stood still while others went on creates a number that has been removed meanwhile."""
    from tests.retention import url_of

    straggler = past(3)
    young = cloned(store_of(straggler))
    writer = deltafmt.Writer(url_of(young), options=deltafmt.WriterOptions(anchor_every=1))
    writer.resume()
    other = deltafmt.Writer(url_of(young), options=deltafmt.WriterOptions(anchor_every=1))
    for _ in range(4):
        other.publish(straggler.tensors)
    collected(young, keep_last=1)
    before = dict(young.objects)
    with pytest.raises(CommitConflictError) as caught:
        writer.publish(straggler.tensors)
    assert caught.value.kind == "version-taken"
    assert young.objects.keys() == before.keys()
    assert writer.resume() == 6
    assert writer.publish(straggler.tensors) == 7


def test_a_way_below_the_floor_is_taken_back(course: Course, store: MemoryStore) -> None:
    from deltafmt.write.anchor import add_anchor_way

    late = opened(store)
    tensors = late.read(5)
    late.history.first_way(5)
    late.history.ways(5)
    collected(store, keep_last=1)
    before = store.objects.keys()
    with pytest.raises(VersionGoneError):
        add_anchor_way(late.history, 5, tensors)
    assert store.objects.keys() == before


def test_local_leftovers_go_when_they_are_old(tmp_path: Path) -> None:
    import os

    writer = deltafmt.Writer(str(tmp_path))
    writer.publish_anchor({"w": torch.ones(3)})
    left = tmp_path / "versions" / f".{1:020d}.dfm.0123456789abcdef"
    left.write_bytes(b"cut sho")
    assert deltafmt.open(str(tmp_path)).gc(keep_last=1, grace_seconds=60, dry_run=False).removals == ()
    os.utime(left, (1e9, 1e9))
    plan = deltafmt.open(str(tmp_path)).gc(keep_last=1, grace_seconds=60, dry_run=False)
    assert plan.counts == {garbage.REMNANT: 1}
    assert not left.exists()


def test_names_that_lead_outside_are_never_removed(tmp_path: Path) -> None:
    """Case A25: a link inside the root that points out, under a name that a collector looks for."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "00000.dfs").write_bytes(b"precious")
    root = tmp_path / "root"
    writer = deltafmt.Writer(str(root), options=deltafmt.WriterOptions(anchor_every=1))
    for _ in range(4):
        writer.publish_anchor({"w": torch.ones(3)})
    (root / "data" / f"{1:020d}" / ("ab" * 16)).symlink_to(outside, target_is_directory=True)
    (root / "data" / f"{0:020d}" / ("cd" * 16)).mkdir()
    (root / "data" / f"{0:020d}" / ("cd" * 16) / "00000.dfs").symlink_to(outside / "00000.dfs")
    plan = collected(LocalStore(root), keep_last=1, grace_seconds=0)
    assert plan.floor == 3
    assert (outside / "00000.dfs").read_bytes() == b"precious"
    assert not any("ab" * 16 in removal.key or "cd" * 16 in removal.key for removal in plan.removals)


def test_an_empty_lineage_and_bad_requests(tmp_path: Path) -> None:
    lineage = deltafmt.create(str(tmp_path), deltafmt.Schema.of({"w": torch.ones(3)}))
    plan = lineage.gc(keep_last=1, grace_seconds=0, dry_run=False)
    assert plan == GcPlan(
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
    with pytest.raises(ValueError, match="keep_last"):
        lineage.gc(keep_last=0, grace_seconds=0)
    with pytest.raises(ValueError, match="grace_seconds"):
        lineage.gc(keep_last=1, grace_seconds=-1)


def test_a_thousand_publishes_take_no_more_room_than_a_few() -> None:
    course = past(1, anchor_every=20)
    store = store_of(course)
    most = 0
    for version in range(1, 1000):
        course.tensors["b"][version % 7] += 1
        course.writer.publish(course.tensors)
        if version % 10 == 0:
            most = max(most, len(store.objects))
            collected(store, keep_last=10, grace_seconds=0)
    assert course.writer.version == 999
    # At most 29 versions back to an anchor and 10 since the last collection, each with a shard; two or three of
    # them with an anchor and its shard; and five that stay.
    assert most <= 2 * 39 + 2 * 3 + 5
    assert same(opened(store).read(999), course.tensors)
    assert opened(store).verify(999).ok
