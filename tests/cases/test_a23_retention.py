"""A23: clean-up removes what a slow reader still needs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import deltafmt
from deltafmt.errors import VersionGoneError
from deltafmt.read.options import ReadOptions
from deltafmt.testing.faulty import Call, FaultyStore, failing
from tests.reading import Course, Tensors, blank, copied, same
from tests.retention import assert_listed_are_readable, collected, opened, past, store_of, url_of

NAMES = ["t0", "t1", "t2", "t3", "t4"]


def beginning(**options: Any) -> Course:
    """Versions 0 (an anchor) and 1, each of five tensors: five chunks in an anchor."""
    tensors: Tensors = {name: torch.arange(40, dtype=torch.float32) for name in NAMES}
    course = Course(tensors, domain_elements=40, **options)
    course.anchor()
    course.step(seed=1)
    return course


def go_on(course: Course, versions: int, *, keep_last: int = 2) -> None:
    """Publish so many versions, with a collection after each."""
    for seed in range(versions):
        course.step(seed=seed + 10)
        collected(store_of(course), keep_last, grace_seconds=0)


@pytest.fixture
def course() -> Course:
    return beginning(anchor_every=2)


def test_with_a_lease_a_slow_reader_finishes(course: Course) -> None:
    lineage = deltafmt.open(course.root)
    reader = lineage.iter_read(1, batch_bytes=160)
    found = dict([next(reader)])
    go_on(course, 5)
    assert assert_listed_are_readable(store_of(course), course.versions) == [4, 5, 6]
    found.update(reader)
    assert list(found) == NAMES
    assert same(found, course.versions[1])
    # The reader is done, and so is its lease.
    plan = collected(store_of(course), 2, grace_seconds=0)
    assert plan.leases == ()
    assert plan.oldest == 4
    with pytest.raises(VersionGoneError):
        lineage.read(1)


def test_without_one_it_is_told(course: Course, caplog: pytest.LogCaptureFixture) -> None:
    """A reader that may not write reads all the same, with a warning."""
    store = FaultyStore(store_of(course))
    refused = failing(deltafmt.StoreError("no write permission", kind="store-failed"))
    store.inject(refused, verb="put", key="leases/", times=100)
    with caplog.at_level(logging.WARNING, "deltafmt"):
        reader = opened(store).iter_read(1, batch_bytes=160)
        next(reader)
    assert "without a lease" in caplog.text
    go_on(course, 5)
    with pytest.raises(VersionGoneError) as caught:
        list(reader)
    assert caught.value.kind == "version-gone"
    assert same(dict(opened(store).iter_read()), course.versions[6])


class Slow:
    """A receiver that stands still after the first chunk of its first step, while five versions are published."""

    def __init__(self, course: Course, *, leases: bool) -> None:
        store = FaultyStore(store_of(course))
        self.live = blank(course.tensors)
        options = ReadOptions(threads=1, lease_seconds=900 if leases else None)
        self.receiver = deltafmt.Receiver(url_of(store), self.live, options=options)

        def stand_still(_call: Call, proceed: Callable[[], object]) -> object:
            go_on(course, 5)
            return proceed()

        store.inject(stand_still, verb="read_range", first=2)


@pytest.mark.parametrize("leases", [True, False])
def test_a_receiver_starts_anew_where_it_has_to(course: Course, leases: bool) -> None:
    slow = Slow(course, leases=leases)
    if leases:
        assert slow.receiver.advance(1) == 1
        assert same(slow.live, course.versions[1])
    else:
        with pytest.raises(VersionGoneError):
            slow.receiver.advance(1)
        assert slow.receiver.version is None
    assert slow.receiver.advance() == 6
    assert same(slow.live, course.versions[6])
    slow.receiver.verify()


@pytest.mark.parametrize("leases", [True, False])
def test_a_receiver_that_wants_the_newest_ends_with_it(course: Course, leases: bool) -> None:
    """Stopped on its way to version 1, which is the newest when it sets out."""
    slow = Slow(course, leases=leases)
    reached = slow.receiver.advance()
    assert reached == (1 if leases else 6)
    assert same(slow.live, course.versions[reached])


def test_a_receiver_whose_version_was_removed_goes_on_from_an_anchor(
    course: Course, caplog: pytest.LogCaptureFixture
) -> None:
    live = blank(course.tensors)
    receiver = deltafmt.Receiver(course.root, live, options=ReadOptions(lease_seconds=None))
    assert receiver.advance() == 1
    go_on(course, 5)
    with caplog.at_level(logging.INFO, "deltafmt"):
        assert receiver.advance() == 6
    assert same(live, course.versions[6])
    assert caplog.text.count("version 1, which is held, was removed") == 1
    assert "anchor of version 6" in caplog.text or "anchor of version 4" in caplog.text
    with pytest.raises(VersionGoneError):
        receiver.advance(1)
    assert receiver.version == 6
    assert same(live, course.versions[6])


def test_a_delta_keeps_the_anchor_that_it_needs() -> None:
    """Version 6 is only to be had from the anchor of version 0: all between stays, whatever is asked for."""
    course = beginning()
    go_on(course, 5)
    assert assert_listed_are_readable(store_of(course), course.versions) == list(range(7))
    plan = opened(store_of(course)).gc(keep_last=2, grace_seconds=0)
    assert plan.blocked is not None
    opened(store_of(course)).add_anchor(5)
    assert collected(store_of(course), 2, grace_seconds=0).floor == 5
    assert assert_listed_are_readable(store_of(course), course.versions) == [5, 6]
    assert opened(store_of(course)).verify().ok


def test_a_dead_readers_lease_runs_out(course: Course) -> None:
    lineage = deltafmt.open(course.root)
    reader = lineage.iter_read(1, batch_bytes=160)
    next(reader)
    lease = next(key for key in store_of(course).objects if key.startswith("leases/"))
    go_on(course, 5)
    plan = opened(store_of(course)).gc(keep_last=2, grace_seconds=0)
    assert [held.reader for held in plan.leases] == [lease]
    assert plan.oldest == 0
    store_of(course)._written[lease] -= 1000
    plan = collected(store_of(course), 2, grace_seconds=0)
    assert (plan.leases, plan.oldest) == ((), 4)
    assert not any(key.startswith("leases/") for key in store_of(course).objects)
    # Back from the dead, it still thinks that it holds its version, and is told that it does not.
    with pytest.raises(VersionGoneError):
        list(reader)


def test_a_lease_is_renewed_while_it_is_used_and_a_lapsed_one_is_not_used_again() -> None:
    course = past(3)
    store = store_of(course)
    live = copied(course.tensors)
    receiver = deltafmt.Receiver(course.root, live, options=ReadOptions(lease_seconds=900))
    receiver.advance(0)
    lease = receiver._lease

    def named() -> list[str]:
        return [key for key in store.objects if key.startswith("leases/")]

    first = named()
    receiver.advance(1)
    written = store._written[first[0]]
    assert named() == first, "one lease serves several steps"
    lease._renew_at = 0.0
    receiver.newest()
    assert named() == first
    assert store._written[first[0]] > written
    lease._until = 0.0
    receiver.advance(2)
    assert len(named()) == 1
    assert named() != first, "a collector may be about to remove the old name"
    receiver.close()
    assert named() == []
