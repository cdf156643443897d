"""Ranks of a process group, each a process: versions, failures, and kills at exact places."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import deltafmt
from tests.faults.processes import KILLED, run_ranks
from tests.ranks import assert_holds, changed, model

SECRET = bytes(range(32))
STATES = [changed(model(), seed) for seed in range(6)]


def test_a_life_of_four_ranks(tmp_path: Path) -> None:
    found = run_ranks(tmp_path, 4, "life", group=True)
    for rank, (
        anchor,
        first,
        broken,
        differs,
        second,
        lost,
        version,
        resumed,
        behind,
        proven,
        last,
    ) in enumerate(found):
        assert [anchor, first, second] == [0, 1, 2]
        assert broken[0] == ("LayoutError" if rank == 1 else "IncompleteError")
        assert "rank 1" in broken[2] or rank == 1
        assert differs[:2] == ["IncompleteError", "replicas-differ"]
        assert "'norm'" in differs[2]
        assert lost[:2] == ["CommitConflictError", "version-taken"]
        assert version == 2, "nobody's version is ahead"
        assert [resumed, behind, proven, last] == [3, 4, 4, 5]
    root = str(tmp_path / "root")
    for number, state in enumerate(STATES):
        assert_holds(root, number, state)
    assert deltafmt.open(root).verify().ok


@pytest.mark.parametrize(
    ("rank", "where", "newest"),
    [
        (1, ["open_sink", "data/", "after", 2], 0),
        (2, ["close", "data/", "after", 2], 0),
        (0, ["put_if_absent", "versions/", "before", 2], 0),
        (0, ["put_if_absent", "versions/", "after", 2], 1),
    ],
)
def test_a_killed_rank_leaves_a_whole_lineage(
    tmp_path: Path, rank: int, where: list[object], newest: int
) -> None:
    found = run_ranks(tmp_path, 3, "steps", group=True, first=0, last=1, die={rank: where}, seconds=30.0)
    assert found.pop(rank) == KILLED
    root = str(tmp_path / "root")
    assert deltafmt.open(root).latest() == newest
    for anchor, outcome, version in found:
        assert anchor == 0
        if rank == 0 and newest == 1:
            assert (outcome, version) == (1, 1), "the manifest that is there tells"
        else:
            assert outcome[:2] == ["IncompleteError", "rank-missing"]
            assert f"rank {rank}" in outcome[2] or outcome[2].startswith("rank 0 is gone")
            assert version == 0
    names = deltafmt.open(root).schema().names
    assert_holds(root, newest, {name: STATES[newest][name] for name in names})
    assert deltafmt.open(root).verify().ok


def test_rank_0_alone_needs_the_key_and_all_add_anchors(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"group": True, "secret_of_rank_0": SECRET.hex(), "anchor_every": 1}
    assert run_ranks(tmp_path, 3, "steps", first=0, last=2, **settings) == [[0, 1, 2, 2]] * 3
    lineage = deltafmt.open(str(tmp_path / "root"), trust=[deltafmt.HmacKey(SECRET)])
    assert [info.ways for info in lineage.log()] == [(None,), (0, None), (1, None)]
    for version in (1, 2):
        for stored in lineage.history.ways(version):
            assert stored.manifest.shards.writer.tolist() == [0, 1, 2]
    assert lineage.verify().ok
    lineage.gc(keep_last=1, grace_seconds=0.0, dry_run=False)
    read = lineage.read(2)
    assert all((read[name] == STATES[2][name]).all() for name in read)


def test_a_rank_of_a_group_that_dies_before_its_anchor_leaves_the_version(tmp_path: Path) -> None:
    die = {2: ["close", "ways-data/", "before", 1]}
    settings: dict[str, Any] = {"group": True, "anchor_every": 1}
    found = run_ranks(tmp_path, 3, "steps", first=0, last=1, die=die, seconds=30.0, **settings)
    assert found == [[0, 1, 1], [0, 1, 1], KILLED]
    lineage = deltafmt.open(str(tmp_path / "root"))
    assert lineage.info(1).ways == (0,)
    assert_holds(str(tmp_path / "root"), 1, {name: STATES[1][name] for name in lineage.schema().names})
    assert lineage.verify().ok


@pytest.mark.parametrize("world", [2, 8])
def test_the_example_runs_under_torchrun(tmp_path: Path, world: int) -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    run = subprocess.run(
        [*command, str(root / "tools" / "examples" / "ranks.py"), str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(root), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert f"elements changed, by {world} ranks" in run.stdout
    assert "version 3, step 3" in run.stdout
    assert deltafmt.open(str(tmp_path / "run")).verify().ok
