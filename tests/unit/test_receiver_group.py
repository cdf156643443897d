"""Receivers of a group: every rank makes a step, or none keeps it; by real processes, one of them killed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import deltafmt
from deltafmt.errors import DeltafmtError, IncompleteError, StoreError
from deltafmt.read import replica as replica_module
from deltafmt.read.apply import apply_domain as real_apply_domain
from deltafmt.testing.faulty import FaultyStore, failing
from tests.cases.common import assert_same, blank, copied, faulty, new_root

VERSIONS = 4


def published(root: str) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    states = [{"a": torch.randn(64, 9).bfloat16(), "b": torch.randn(300)}]
    writer = deltafmt.Writer(root, options=deltafmt.WriterOptions(domain_elements=128))
    writer.publish_anchor(states[0])
    for step in range(1, VERSIONS):
        state = copied(states[-1])
        state["a"][step::5] += 1
        state["b"][:: step + 2] -= 1
        writer.publish(state)
        states.append(state)
    return states


class Threads:
    """Ranks that are threads of this process."""

    def __init__(self, world: int) -> None:
        self._values: list[Any] = [None] * world
        self._barrier = threading.Barrier(world, timeout=60)

    def rank(self, number: int) -> Any:
        outer = self

        class Rank:
            def all_gather_object(self, value: object) -> list[Any]:
                outer._values[number] = value
                outer._barrier.wait()
                values = list(outer._values)
                outer._barrier.wait()
                return values

        return Rank()


class Ranks:
    """Two receivers of one group, each with its own door to the storage."""

    def __init__(self) -> None:
        self.root = new_root()
        self.states = published(self.root)
        ranks = Threads(2)
        self.live = [blank(self.states[0]) for _ in range(2)]
        self.doors: list[FaultyStore] = []
        self.receivers = []
        for number, live in enumerate(self.live):
            url, door = faulty(self.root)
            self.doors.append(door)
            self.receivers.append(deltafmt.Receiver(url, live, group=ranks.rank(number)))

    def advance(self, *versions: int | None) -> list[int | DeltafmtError]:
        def step(receiver: deltafmt.Receiver, version: int | None) -> int | DeltafmtError:
            try:
                return receiver.advance(version)
            except DeltafmtError as error:
                return error

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(step, self.receivers, versions))

    def hold(self, version: int) -> None:
        assert [receiver.version for receiver in self.receivers] == [version, version]
        for live in self.live:
            assert_same(live, self.states[version])


def test_all_step_together_to_what_the_first_rank_has_staged_or_sees() -> None:
    ranks = Ranks()
    assert ranks.advance(0, 0) == [0, 0]
    ranks.hold(0)
    ranks.receivers[0].prefetch(1)
    ranks.receivers[1].prefetch(2)
    assert ranks.advance(None, None) == [1, 1]
    ranks.hold(1)
    assert ranks.advance(None, None) == [VERSIONS - 1] * 2
    ranks.hold(VERSIONS - 1)
    assert ranks.advance(None, None) == [VERSIONS - 1] * 2
    assert ranks.advance(0, 0) == [0, 0]
    ranks.hold(0)


def test_ranks_from_different_versions_end_at_one() -> None:
    ranks = Ranks()
    alone = deltafmt.Receiver(ranks.root, ranks.live[1])
    alone.advance(2)
    ranks.receivers[1].adopt(2)
    assert ranks.advance(3, 3) == [3, 3]
    ranks.hold(3)


@pytest.mark.parametrize("failing_rank", [0, 1])
@pytest.mark.parametrize("explicit", [True, False])
def test_a_rank_that_cannot_fetch_keeps_all_where_they_are(failing_rank: int, explicit: bool) -> None:
    ranks = Ranks()
    ranks.advance(1, 1)
    for verb in ("read_range", "read_all", "list"):
        ranks.doors[failing_rank].inject(
            failing(StoreError("refused", kind="store-failed")), verb=verb, times=1000
        )
    wanted = 3 if explicit else None
    outcomes = ranks.advance(wanted, wanted)
    own, other = outcomes[failing_rank], outcomes[1 - failing_rank]
    assert isinstance(own, StoreError)
    assert isinstance(other, IncompleteError)
    assert other.kind == "rank-failed"
    assert f"rank {failing_rank}: StoreError: refused" in str(other)
    ranks.hold(1)
    ranks.doors[failing_rank].heal()
    assert ranks.advance(wanted, wanted) == [3, 3]
    ranks.hold(3)


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("held", [1, None])
def test_a_rank_that_fails_while_it_writes_takes_all_back(
    after: int, held: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks()
    if held is not None:
        ranks.advance(held, held)
    bad, done = ranks.receivers[1]._replica, []

    def apply_domain(view: Any, *arguments: Any) -> None:
        if view.targets is bad.views.targets:
            done.append(1)
            if len(done) > after:
                raise StoreError("a device went away", kind="store-failed")
        real_apply_domain(view, *arguments)

    monkeypatch.setattr(replica_module, "apply_domain", apply_domain)
    good, broken = ranks.advance(3, 3)
    monkeypatch.undo()
    assert isinstance(broken, StoreError)
    assert isinstance(good, IncompleteError)
    if held is None:
        assert [receiver.version for receiver in ranks.receivers] == [None, None]
    else:
        ranks.hold(held)
    assert ranks.advance(3, 3) == [3, 3]
    ranks.hold(3)


def test_a_rank_whose_bits_drifted_is_repaired_within_the_step() -> None:
    ranks = Ranks()
    ranks.advance(1, 1)
    ranks.live[1]["a"][2] = 77
    ranks.live[1]["b"][:4] = 5
    assert ranks.advance(3, 3) == [3, 3]
    ranks.hold(3)


def test_ranks_that_ask_for_different_versions() -> None:
    ranks = Ranks()
    ranks.advance(1, 1)
    for versions in ((2, 3), (2, None)):
        for outcome in ranks.advance(*versions):
            assert isinstance(outcome, IncompleteError)
            assert outcome.kind == "rank-disagrees"
        ranks.hold(1)


# Each rank is a process of its own; rank 1 fails, then recovers, then is killed while both of them step.
RANK = """
import datetime, json, os, signal, sys, torch, torch.distributed as dist, deltafmt
from deltafmt.errors import DeltafmtError, StoreError
from deltafmt.read import replica
root, folder, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=60))
live = {"a": torch.zeros(64, 9, dtype=torch.bfloat16), "b": torch.zeros(300)}
receiver = deltafmt.Receiver(root, live, group=dist.group.WORLD)
log = []
def step(version):
    try:
        log.append(receiver.advance(version))
    except DeltafmtError as error:
        log.append(f"{type(error).__name__} {error.kind}, holds {receiver.version}")
    torch.save(live, f"{folder}/{rank}-{len(log)}.pt")
    open(f"{folder}/{rank}.json", "w").write(json.dumps(log))
whole = replica.apply_domain
def broken(*arguments):
    whole(*arguments)
    raise StoreError("a device went away", kind="store-failed")
def deadly(*arguments):
    whole(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
step(1)
if rank == 1: replica.apply_domain = broken
step(2)
replica.apply_domain = whole
step(2)
if rank == 1: replica.apply_domain = deadly
step(3)
"""


def test_processes_that_fail_and_are_killed(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    states = published(root)
    command: Callable[[int], list[str]] = lambda rank: [  # noqa: E731
        sys.executable, "-c", RANK, root, str(tmp_path), str(rank),
    ]  # fmt: skip
    ranks = [
        subprocess.Popen(command(rank), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    output = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert ranks[1].returncode == -9, output[1]
    logs = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert logs[1] == [1, "StoreError store-failed, holds 1", 2], output[1]
    assert logs[0] == [
        1,
        "IncompleteError rank-failed, holds 1",
        2,
        "IncompleteError rank-missing, holds 2",
    ], output[0]
    for rank, steps in ((0, (1, 1, 2, 2)), (1, (1, 1, 2))):
        for number, version in enumerate(steps, 1):
            assert_same(torch.load(tmp_path / f"{rank}-{number}.pt"), states[version])
