"""A sample of the fault campaign; `python -m tools.faults` runs all of it."""

from __future__ import annotations

import pytest

from tools.faults import injected, kills, ranks, space
from tools.faults.world import Tally, World


def finished(tally: Tally, steps: object) -> Tally:
    for _ in steps:  # type: ignore[attr-defined]
        pass
    assert tally.clean, tally.notes
    return tally


@pytest.mark.parametrize("operation", [operation.name for operation in injected.operations()])
def test_faults_at_calls_of(operation: str) -> None:
    tally = Tally()
    finished(tally, injected.campaign(tally, seed=1, only={operation}, every=41))
    assert tally.faults == tally.rounds >= 10


def test_processes_that_are_killed() -> None:
    tally = Tally()
    finished(tally, kills.campaign(tally, seed=1, kills=12))
    assert tally.kills == 12


def test_processes_that_are_killed_while_they_talk_to_s3() -> None:
    tally = Tally()
    finished(tally, kills.on_s3(tally, seed=1, kills=6))
    assert tally.kills == 6


def test_jobs_that_lose_a_rank() -> None:
    tally = Tally()
    finished(tally, ranks.campaign(tally, seed=2, kills=4))
    assert tally.kills == 4


@pytest.mark.skipif(not space.possible(), reason="a small disk needs Linux, root and mount")
def test_a_disk_that_fills_up() -> None:
    tally = Tally()
    finished(tally, space.campaign(tally, seed=1))
    assert tally.faults >= 3


def test_the_campaign_sees_what_is_lost_and_what_is_wrong() -> None:
    """A campaign that cannot find anything proves nothing."""
    world = World(seed=1)
    shard = next(key for key in world.inner.objects if key.startswith("data/00000000000000000002"))
    del world.inner.objects[shard]
    tally = Tally()
    world.audit(tally, "a shard is gone")
    assert (tally.lost, tally.wrong_bits) == (2, 0), "version 2, and 3 that is built on it"
    world = World(seed=1)
    world.versions[3] = world.versions[2]
    tally = Tally()
    world.audit(tally, "other bits than expected")
    assert (tally.lost, tally.wrong_bits) == (0, 1)
    assert not tally.clean
