from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli_help import make_lineage, run, run_json


@pytest.fixture
def root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    root = make_lineage(tmp_path)
    capsys.readouterr()
    return root


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_sound_lineage(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, "verify", root)["ok"]
    assert "no damage" in run(capsys, "verify", root, "--shallow")
    assert "no damage" in run(capsys, "verify", root, "latest")


def test_a_damaged_shard_takes_its_version_and_the_later_ones_down(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shard,) = (root / "data" / f"{1:020d}").glob("*/*.dfs")
    _flip(shard, 12)
    found = run_json(capsys, "verify", root, code=1)
    assert not found["ok"]
    assert found["versions_lost"] == [1, 2]
    assert shard.relative_to(root).as_posix() in {problem["object"] for problem in found["problems"]}


def test_a_lost_shard_of_the_anchor_takes_all_down(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shard,) = (root / "data" / f"{0:020d}").glob("*/*.dfs")
    shard.unlink()
    out = run_json(capsys, "verify", root, "--shallow", code=1)
    assert out["versions_lost"] == [0, 1, 2]


def test_a_damaged_manifest_and_side_file_are_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _flip(root / "versions" / f"{2:020d}.dfm", 40)
    (first, *_) = sorted((root / "files").iterdir())
    _flip(first, 0)
    found = run_json(capsys, "verify", root, code=1)
    objects = {problem["object"] for problem in found["problems"]}
    assert {f"versions/{2:020d}.dfm", f"files/{first.name}"} <= objects
