"""A19: several writers, one version: of all who try exactly one wins, wherever the root lies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import deltafmt
from tests.cases.common import new_root
from tests.racing import LANES, Processes, commits, publishes, state

ROUNDS = 100


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    running = Processes()
    yield running
    running.close()


@pytest.fixture(params=["local", "seaweed", "moto"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """A root that several processes can reach, and its storage options."""
    if request.param == "local":
        return str(tmp_path / "run"), {}
    server = request.getfixturevalue(request.param)
    return server.url(), server.storage_options


def begin(url: str, options: dict[str, Any]) -> None:
    """Version 0; without data it has no shards that the racers' manifests would have to share."""
    writer = deltafmt.Writer(url, storage_options=options)
    writer.publish_anchor({"w": state(0, 0)}, store_data=False)


def assert_one_winner_each(
    url: str, options: dict[str, Any], tries: list[dict[int, tuple[str, bytes]]]
) -> None:
    lineage = deltafmt.open(url, storage_options=options)
    for version in range(1, ROUNDS + 1):
        outcomes = [racer[version] for racer in tries]
        assert sorted(outcome for outcome, _ in outcomes) == ["ours"] + ["theirs"] * (len(tries) - 1)
        winner = next(attempt for outcome, attempt in outcomes if outcome == "ours")
        assert lineage.manifest(version).attempt == winner


@pytest.mark.parametrize("racers", [2, 4])
def test_of_racing_processes_one_commits(
    place: tuple[str, dict[str, Any]], processes: Processes, racers: int
) -> None:
    url, options = place
    begin(url, options)
    assert_one_winner_each(url, options, processes.race(commits, url, options, racers, ROUNDS))


@pytest.mark.parametrize("racers", [2, 4])
@pytest.mark.parametrize("where", ["memory", "local"])
def test_of_racing_threads_one_commits(where: str, racers: int, tmp_path: Path) -> None:
    url = new_root() if where == "memory" else str(tmp_path / "run")
    begin(url, {})
    gates = [threading.Barrier(racers) for _ in range(LANES)]
    with ThreadPoolExecutor(racers) as pool:
        jobs = [pool.submit(commits, url, {}, racer, ROUNDS, gates) for racer in range(racers)]  # type: ignore[arg-type]
        tries = [job.result() for job in jobs]
    assert_one_winner_each(url, {}, tries)


def test_of_two_trainers_one_publishes_and_the_other_goes_on_from_there(
    place: tuple[str, dict[str, Any]], processes: Processes
) -> None:
    """Each has a delta of its own from the same base; nothing of the loser's is seen, or left."""
    url, options = place
    rounds = 5 if options else 25
    deltafmt.Writer(url, storage_options=options).publish_anchor({"w": state(0, 0)})
    won = processes.race(publishes, url, options, 2, rounds)
    lineage = deltafmt.open(url, storage_options=options)
    assert lineage.latest() == rounds
    for version in range(1, rounds + 1):
        winners = [racer for racer in (0, 1) if won[racer][version]]
        manifest = lineage.manifest(version)
        assert winners == [manifest.meta["racer"]]
        stored = [entry.key for entry in lineage.history.store.entries(f"data/{version:020d}")]
        assert stored == list(manifest.shard_keys)
    (last,) = [racer for racer in (0, 1) if won[racer][rounds]]
    assert torch.equal(lineage.read(rounds)["w"], state(last, rounds))
