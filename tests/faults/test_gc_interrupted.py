"""Collections that are killed, repeated, run at once, and meet writers and readers between any two calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import deltafmt
from deltafmt.errors import CommitConflictError, NotFoundError, VersionGoneError
from deltafmt.format import keys
from deltafmt.store import MemoryStore, Store
from deltafmt.testing.faulty import Crash, FaultyStore, crashing, crashing_after
from deltafmt.write.anchor import add_anchor_way
from deltafmt.write.garbage import REASONS
from tests.reading import Course, blank, same
from tests.retention import (
    DAY,
    assert_listed_are_readable,
    at_call,
    cloned,
    collected,
    opened,
    past,
    store_of,
    url_of,
)


@pytest.fixture(scope="module")
def course() -> Course:
    """Versions 0 to 5, with anchors at 0, 2 and 4, and something of everything that can be removed."""
    course = past(6, anchor_every=2)
    store, attempt = store_of(course), b"o" * 16
    old = {
        keys.shard_key(version=5, base=None, attempt=attempt, writer=0, further=False),
        keys.shard_key(version=5, base=4, attempt=attempt, writer=0, further=True),
        f"attempts/{1:020d}/{attempt.hex()}.dfm",
        f"probes/{attempt.hex()}",
        keys.tiling_key(b"t" * 32),
        keys.floor_key(0),
        keys.lease_key(attempt),
    }
    for key in old:
        store.put(key, b"old")
        store._written[key] -= 2 * DAY
    return course


def start(course: Course) -> tuple[MemoryStore, FaultyStore]:
    inner = cloned(store_of(course))
    return inner, FaultyStore(inner)


def calls_of_a_collection(course: Course) -> int:
    _, store = start(course)
    plan = collected(store)
    assert set(plan.counts) == set(REASONS) - {"remnant"}
    return len(store.log)


def test_killed_anywhere_it_leaves_a_whole_lineage_and_the_next_one_finishes(course: Course) -> None:
    expected, _ = start(course)
    collected(expected)
    calls = calls_of_a_collection(course)
    assert calls > 40
    for number in range(1, calls + 1):
        inner, store = start(course)
        # A call that fails by itself, because something is absent, is followed by no crash.
        store.inject(crashing() if number % 2 else crashing_after(), first=number)
        with contextlib.suppress(Crash):
            collected(store)
        assert_listed_are_readable(inner, course.versions)
        collected(inner)
        # A probe that was left behind is young; once it is old it goes too.
        for key in set(inner.objects) - set(expected.objects):
            assert key.startswith("probes/")
            inner._written[key] -= 2 * DAY
            collected(inner)
        assert inner.objects.keys() == expected.objects.keys(), number
    assert_listed_are_readable(expected, course.versions)
    assert opened(expected).verify().ok


@pytest.mark.parametrize(("first", "second"), [(1, 3), (3, 1)])
def test_two_at_once(course: Course, first: int, second: int) -> None:
    expected, _ = start(course)
    collected(expected, min(first, second))
    for number in range(1, calls_of_a_collection(course) + 1):
        inner, store = start(course)
        at_call(number, lambda inner=inner: collected(inner, second))(store)  # type: ignore[misc]
        collected(store, first)
        assert_listed_are_readable(inner, course.versions)
        collected(inner, max(first, second))
        assert inner.objects.keys() == expected.objects.keys(), number


def interleaved(
    course: Course, work: Callable[[MemoryStore], object], check: Callable[[MemoryStore, int], None]
) -> None:
    """Do `work` at every second call of a collection in turn, and look at the outcome."""
    for number in range(1, calls_of_a_collection(course) + 1, 2):
        inner, store = start(course)
        at_call(number, lambda inner=inner: work(inner))(store)  # type: ignore[misc]
        collected(store)
        check(inner, number)


def test_a_version_published_meanwhile_is_whole(course: Course) -> None:
    """With a schema of its own, and one that nothing named any more."""
    tensors = {**course.tensors, "new": course.tensors["b"] + 1}

    def publish(inner: MemoryStore) -> None:
        deltafmt.Writer(url_of(inner)).publish(tensors, files={"config.json": b"{}"})

    def check(inner: MemoryStore, number: int) -> None:
        assert same(opened(inner).read(6), tensors), number
        assert opened(inner).files(6) == {"config.json": b"{}"}
        assert_listed_are_readable(inner, [*course.versions, tensors])

    interleaved(course, publish, check)


@pytest.mark.parametrize("version", [1, 5])
def test_a_way_added_meanwhile_is_whole_or_taken_back(course: Course, version: int) -> None:
    tensors = course.versions[version]

    def add(inner: MemoryStore) -> None:
        try:
            add_anchor_way(opened(inner).history, version, tensors)
        except NotFoundError as error:
            assert isinstance(error, VersionGoneError)

    def check(inner: MemoryStore, number: int) -> None:
        collected(inner)
        listed = assert_listed_are_readable(inner, course.versions)
        ways = [key for key in inner.objects if key.startswith(f"ways/{version:020d}/")]
        assert bool(ways) == (version in listed), number
        assert opened(inner).verify().ok

    interleaved(course, add, check)


def overtaken(
    course: Course, held: int | None, **options: Any
) -> Iterator[tuple[MemoryStore, FaultyStore, deltafmt.Receiver]]:
    """Receivers that have come to the newest version with a collection at each call of their advance in turn."""
    for number in range(1, 26):
        inner, store = start(course)
        live = blank(course.tensors)
        receiver = deltafmt.Receiver(url_of(store), live, options=deltafmt.ReadOptions(**options))
        if held is not None:
            receiver.advance(held)
        store.heal()
        at_call(number, lambda inner=inner: collected(inner))(store)  # type: ignore[misc]
        assert receiver.advance() == 5
        assert same(live, course.versions[5]), number
        receiver.verify()
        yield inner, store, receiver
        assert same(live, course.versions[5]), number


@pytest.mark.parametrize("held", [None, 1, 3])
def test_a_receiver_that_advances_meanwhile_ends_right(course: Course, held: int | None) -> None:
    for inner, _, receiver in overtaken(course, held):
        receiver.close()
        # What the lease held back goes with it.
        assert collected(inner).floor == 4
        assert assert_listed_are_readable(inner, course.versions) == [4, 5]


def test_a_collection_between_any_two_calls_of_a_publish(course: Course) -> None:
    for number in range(1, 26, 2):
        inner, store = start(course)
        tensors = {name: tensor + 1 for name, tensor in course.tensors.items()}
        writer = deltafmt.Writer(url_of(store), options=deltafmt.WriterOptions(anchor_every=6))
        at_call(number, lambda inner=inner: collected(inner, 1))(store)  # type: ignore[misc]
        assert writer.publish(tensors) == 6
        assert same(opened(inner).read(6), tensors)
        assert_listed_are_readable(inner, [*course.versions, tensors])
        assert opened(inner).verify().ok, number


def test_a_straggler_between_any_two_calls_never_brings_a_number_back(course: Course) -> None:
    """A writer's publish of version 6 is overtaken, at each of its calls, by others and a collection."""
    for number in range(1, 26, 2):
        inner, store = start(course)
        writer = deltafmt.Writer(url_of(store))
        writer.resume()
        store.heal()

        def overtake(inner: MemoryStore = inner) -> None:
            other = deltafmt.Writer(url_of(inner), options=deltafmt.WriterOptions(anchor_every=8))
            for _ in range(3):
                other.publish(course.tensors)
            collected(inner, 1)

        at_call(number, overtake)(store)
        try:
            writer.publish(course.tensors)
        except CommitConflictError:
            pass
        else:
            assert any(f"versions/{6:020d}" in call.key for call in store.log[: number - 1]), (
                "committed first"
            )
        if len(store.log) >= number:
            lineage = opened(inner)
            assert lineage.log()[0].version == 8
            assert same(lineage.read(), course.tensors)
            assert not any(f"/{6:020d}" in key for key in inner.objects), number


def test_a_lease_that_came_late_is_not_relied_upon(course: Course) -> None:
    """Floor first, then leases: a reader that writes its lease behind the collector's back sees the floor."""
    inner, store = start(course)
    live = blank(course.tensors)
    receiver = deltafmt.Receiver(url_of(store), live)
    at_call(1, lambda: collected(inner))(store)
    with pytest.raises(VersionGoneError):
        receiver.advance(1)
    assert receiver.version is None
    assert receiver.advance() == 5
    assert same(live, course.versions[5])


def squashed(store: Store, base: int, version: int) -> bool:
    """Whether a squash came about; if not, it says that retention was first."""
    try:
        opened(store).squash(base, version)
    except VersionGoneError:
        return False
    except CommitConflictError as error:
        assert error.kind == "way-withdrawn"
        return False
    return True


def check_ways(inner: MemoryStore, course: Course, base: int, version: int) -> None:
    """A way stands if its versions are listed, all of it, and is what receivers at its base then take."""
    listed = assert_listed_are_readable(inner, course.versions)
    standing = keys.way_key(version, base) in inner.objects
    assert standing <= (base in listed)
    shards = [shard for key in inner.objects if (shard := keys.shard_of(key)) is not None and shard.further]
    assert standing == any((shard.version, shard.base) == (version, base) for shard in shards)
    for number in listed:
        live = blank(course.tensors)
        receiver = deltafmt.Receiver(url_of(inner), live)
        receiver.advance(number)
        assert receiver.advance(5) == 5
        assert same(live, course.versions[5])
        receiver.close()
    assert opened(inner).verify().ok


@pytest.mark.parametrize(("base", "version"), [(0, 5), (3, 5)])
@pytest.mark.parametrize("keep_last", [2, 4])
def test_a_squash_at_calls_of_a_collection(course: Course, base: int, version: int, keep_last: int) -> None:
    _, store = start(course)
    collected(store, keep_last)
    for number in range(1, len(store.log) + 1, 6):
        inner, store = start(course)
        at_call(number, lambda inner=inner: squashed(inner, base, version))(store)  # type: ignore[misc]
        collected(store, keep_last)
        collected(inner, keep_last)
        check_ways(inner, course, base, version)


@pytest.mark.parametrize(("base", "version"), [(1, 3), (3, 5)])
@pytest.mark.parametrize("grace_seconds", [0, DAY])
def test_a_collection_at_calls_of_a_squash(
    course: Course, base: int, version: int, grace_seconds: float
) -> None:
    """Even one whose grace time is too short for work under way takes nothing that a way then needs."""
    _, store = start(course)
    squashed(store, base, version)
    assert len(store.log) > 10
    for number in range(1 + base % 3, len(store.log) + 1, 3):
        inner, store = start(course)
        at_call(number, lambda inner=inner: collected(inner, 4, grace_seconds))(store)  # type: ignore[misc]
        came = squashed(store, base, version)
        assert came or base < 2 or not grace_seconds, number
        collected(inner, 4, 0)
        check_ways(inner, course, base, version)


@pytest.mark.parametrize("held", [None, 1, 3])
def test_a_receiver_without_a_lease_ends_right_or_is_told(course: Course, held: int | None) -> None:
    """It starts anew from the newest anchor by itself; a version of its own choice that is gone is named."""
    for inner, store, receiver in overtaken(course, held, lease_seconds=None):
        assert not [call for call in store.log if call.verb == "put" and call.key.startswith("leases/")]
        collected(inner)
        with pytest.raises(VersionGoneError):
            receiver.advance(1)
        receiver.close()
