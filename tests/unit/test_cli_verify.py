from __future__ import annotations

from pathlib import Path

import pytest

import deltafmt
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


def test_a_side_file_is_named_with_the_versions_that_have_it(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (config,) = (file for file in (root / "files").iterdir() if b"model_type" in file.read_bytes())
    config.unlink()
    found = run_json(capsys, "verify", root, code=1)
    (problem,) = found["problems"]
    assert "'config.json' of 3 versions from 0 to 2" in problem["message"]
    assert problem["versions"] == found["versions_lost"] == []
    assert "cannot be exported" in run(capsys, "verify", root, "--shallow", code=1)


@pytest.mark.parametrize("missing", [True, False])
def test_a_lost_or_damaged_descriptor_is_a_finding(
    root: Path, missing: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if missing:
        (root / "lineage.dfm").unlink()
    else:
        _flip(root / "lineage.dfm", 60)
    found = run_json(capsys, "verify", root, code=1)
    assert [problem["object"] for problem in found["problems"]] == ["lineage.dfm"]
    assert found["versions_lost"] == [0, 1, 2]


def test_no_lineage_at_all_is_no_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, "verify", tmp_path / "none", code=2)["kind"] == "lineage-missing"


@pytest.mark.parametrize("version", [1, 2])
def test_the_log_shows_what_is_left_beside_a_damaged_version(
    root: Path, version: int, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = root / "versions" / f"{version:020d}.dfm"
    manifest.write_bytes(manifest.read_bytes()[:50])
    rows = run_json(capsys, "log", root, code=1)
    assert [row.get("damage") for row in rows] == ["truncated" if v == version else None for v in range(3)]
    assert "damaged: truncated" in run(capsys, "log", root, code=1)
    if version == 2:
        # A manifest that is cut and the newest has not been committed.
        assert [info.version for info in deltafmt.open(root).log()] == [0, 1]


def test_dump_wants_an_object_and_shows_digests_in_hex(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is a folder" in run_json(capsys, "dump", root, code=2)["message"]
    shown = run_json(capsys, "dump", root, f"versions/{0:020d}.dfm")["fields"]["files"]
    assert {file["digest"] for file in shown.values()} == {file.name for file in (root / "files").iterdir()}
