"""Trainers sharded by torch publish what each rank has, as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import deltafmt
from tests.cases.common import assert_same
from tests.faults.processes import ROOT, run_ranks

MESSAGES = {"c10d::send", "c10d::recv_"}


def run(folder: Path, world: int, *names: str) -> dict[str, list[dict[str, Any]]]:
    found = run_ranks(folder, world, "", group=True, worker="tests.integrations.worker", names=names)
    return {name: [report[name] for report in found] for name in names}


def check(root: Path) -> list[dict[str, torch.Tensor]]:
    """All versions are what torch gathered; a receiver follows through them bit for bit."""
    states = [torch.load(f"{root}-{version}.pt") for version in range(4)]
    lineage = deltafmt.open(str(root))
    live = {name: torch.zeros_like(tensor) for name, tensor in lineage.read(0).items()}
    receiver = deltafmt.Receiver(str(root), live)
    for version, state in enumerate(states):
        assert_same(lineage.read(version), state)
        assert receiver.advance(version) == version
        assert_same(live, state)
    assert lineage.verify().ok
    return states


def test_four_ranks_move_a_quarter_each_and_gather_nothing(tmp_path: Path) -> None:
    reports = run(tmp_path, 4, "fsdp2")["fsdp2"]
    root = tmp_path / "root" / "fsdp2"
    full = sum(t.nbytes for name, t in check(root)[0].items() if name != "head.weight")
    for report in reports:
        assert report["calls"].keys() <= MESSAGES
        # What ranks tell one another is far less than even a part of one tensor.
        assert report["moved"] < full / 4 / 10
        assert report["longest"] < full / 4 / 100
        assert report["largest"] < full / 3
        # A delta reads live tensors once, and so does who goes on from storage; an anchor several times.
        assert report["detected"] == pytest.approx(full / 4, rel=0.1)
        for name in ("anchored", "detected", "stored"):
            assert report[name] == pytest.approx(sum(other[name] for other in reports) / 4, rel=0.1), name
    assert sum(report["stored"] for report in reports) < full
    for version in range(4):
        shards = deltafmt.open(str(root)).manifest(version).shards
        assert len(shards.size) == 4
        for size in shards.size.tolist():
            assert size == pytest.approx(sum(shards.size.tolist()) / 4, rel=0.1)


def test_meshes_of_two_dimensions(tmp_path: Path) -> None:
    found = run(tmp_path, 4, "tensor-parallel", "hybrid")
    for name, reports in found.items():
        check(tmp_path / "root" / name)
        assert all(report["calls"].keys() <= MESSAGES for report in reports)


def test_uneven_parts_and_flat_parameters(tmp_path: Path) -> None:
    names = ("uneven", "second-dim", "flat", "flat-originals", "flat-whole")
    found = run(tmp_path, 3, *names)
    for name, reports in found.items():
        check(tmp_path / "root" / name)
        assert all(report["calls"].keys() <= MESSAGES for report in reports)


def test_each_rank_undoes_the_steps_on_its_own_part(tmp_path: Path) -> None:
    for name, reports in run(tmp_path, 3, "marked", "marked-flat").items():
        check(tmp_path / "root" / name)
        for report in reports:
            assert (report["lost"], report["reads"]) == (0, 0), name
            assert report["bytes_per_element"] < 0.3


def test_a_job_goes_on_with_other_ranks_than_before(tmp_path: Path) -> None:
    for version, world in enumerate((2, 3, 1)):
        reports = run(tmp_path, world, "restarted")["restarted"]
        assert [report["version"] for report in reports] == [version] * world
    root = tmp_path / "root" / "restarted"
    for version in range(3):
        assert_same(deltafmt.open(str(root)).read(version), torch.load(f"{root}-{version}.pt"))
    assert deltafmt.open(str(root)).verify().ok


def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*command, str(ROOT / "tools" / "examples" / "fsdp2.py"), str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    infos = deltafmt.open(str(tmp_path / "run")).log()
    assert [info.step for info in infos] == [0, 1, 2, 3]
    assert all(0 < (info.changed or 0) < 3 * 128 * 129 for info in infos[1:])
    lines = [line for line in run.stdout.splitlines() if line.startswith("rank ")]
    assert len(lines) == 6
    assert deltafmt.open(str(tmp_path / "run")).verify().ok
