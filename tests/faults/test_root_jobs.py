"""Jobs on one root, each of several processes: stragglers, races, and ranks that start from different versions."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import torch

import deltafmt
from deltafmt.format import keys
from tests.faults.processes import durable_calls, outcomes, start_ranks
from tests.faults.worker import awaited
from tests.ranks import anchor, assert_holds, changed, model, staged_parts, writers

STATES = [changed(model(), seed) for seed in range(3)]


def begun(root: str) -> None:
    assert anchor(writers(root, 3, options={"job": "first"}), staged_parts(STATES[0])) == [0] * 3


def test_a_straggler_of_an_older_attempt_comes_too_late(tmp_path: Path) -> None:
    """Rank 1 stands still in its upload until the others have given it up, and then goes on."""
    root = tmp_path / "root"
    begun(str(root))
    die = {1: ["close", f"data/{1:020d}", "stop", 1]}
    processes = start_ranks(tmp_path, 3, "again", group=False, die=die, seconds=8.0)
    verdicts = root / keys.ATTEMPTS / f"{1:020d}"
    given_up = None
    while given_up is None:
        given_up = next((p for p in verdicts.rglob("verdict.dfm") if b"rank-missing" in p.read_bytes()), None)
        assert processes[0].poll() is None
        time.sleep(0.02)
    processes[1].send_signal(signal.SIGCONT)
    for rank, (first, second, version) in enumerate(outcomes(processes)):
        assert first[:2] == ["IncompleteError", "rank-missing"]
        assert "rank 1" in first[2]
        assert (second, version) == (1, 1), rank
    lineage = deltafmt.open(str(root))
    late = given_up.parent.name
    assert lineage.manifest(1).attempt.hex() != late
    straggler = f"data/{1:020d}/{late}/00001.dfs"
    assert ("close", straggler) in durable_calls(tmp_path), "it did arrive"
    assert not (root / straggler).exists(), "its rank has learnt that nobody wants it"
    assert_holds(str(root), 1, {name: STATES[1][name] for name in lineage.schema().names})
    assert lineage.verify().ok


def test_two_jobs_that_resume_at_once_one_wins(tmp_path: Path) -> None:
    root = tmp_path / "root"
    begun(str(root))
    jobs = [
        start_ranks(tmp_path, 3, "steps", group=False, first=number, last=number, job=f"job {number}")
        for number in (1, 2)
    ]
    found = [outcomes(job) for job in jobs]
    won = [number for number, job in enumerate(found, 1) if job == [[1, 1]] * 3]
    assert len(won) == 1
    for outcome, version in found[2 - won[0]]:
        assert outcome[:2] == ["CommitConflictError", "version-taken"]
        assert version is None
    names = deltafmt.open(str(root)).schema().names
    assert_holds(str(root), 1, {name: STATES[won[0]][name] for name in names})
    lineage = deltafmt.open(str(root))
    assert lineage.latest() == 1
    assert {p.parent.name for p in (root / "data" / f"{1:020d}").rglob("*.dfs")} == {
        lineage.manifest(1).attempt.hex()
    }


def test_ranks_with_different_baselines_are_refused_and_resume(tmp_path: Path) -> None:
    root = tmp_path / "root"
    begun(str(root))
    processes = start_ranks(tmp_path, 3, "stale", group=False)
    awaited(tmp_path / "resumed")
    deltafmt.Writer(str(root)).publish(
        {name: STATES[1][name] for name in deltafmt.open(str(root)).schema().names}
    )
    (tmp_path / "published").touch()
    for rank, (resumed, refused, resumed_again, version) in enumerate(outcomes(processes)):
        assert resumed == (0 if rank == 1 else 1)
        assert refused[:2] == ["BaseMismatchError", "base-differs"]
        assert rank == 1 or "rank 1" in refused[2]
        assert (resumed_again, version) == (1, 2)
    read = deltafmt.open(str(root)).read(2)
    assert all(torch.equal(read[name], STATES[2][name]) for name in read)
