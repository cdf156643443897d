from __future__ import annotations

import os
from pathlib import Path

import pytest

import deltafmt
from deltafmt.cli import main
from tests.cli_help import make_lineage, run, run_json


@pytest.fixture
def root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Versions 0 to 2 with an anchor at 1 and an old leftover at 2."""
    root = make_lineage(tmp_path)
    deltafmt.open(str(root)).add_anchor(1)
    left = root / "data" / f"{2:020d}" / ("ab" * 16) / "00000.dfs"
    left.parent.mkdir(parents=True)
    left.write_bytes(bytes(1000))
    os.utime(left, (1e9, 1e9))
    capsys.readouterr()
    return root


def objects(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_a_dry_run_says_what_would_go(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = objects(root)
    assert main(["gc", str(root), "--keep-last", "1"]) == 0
    out, err = capsys.readouterr()
    assert objects(root) == before
    assert "versions 1 to 2 stay" in out
    assert "version 0 goes" in out
    assert "no version from 2 to 2 has an anchor" in out
    assert "shards that no manifest names" in out
    assert "to be removed" in out
    assert "--apply" in err
    assert "ab" * 16 not in out
    assert "ab" * 16 in run(capsys, "gc", root, "--keep-last", 1, "--list")


def test_apply_removes_what_was_planned(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = objects(root)
    plan = run_json(capsys, "gc", root, "--keep-last", 2)
    assert (plan["applied"], plan["floor"], plan["newest"], plan["blocked"]) == (False, 1, 2, None)
    done = run_json(capsys, "gc", root, "--keep-last", 2, "--apply")
    assert done["applied"] is True
    assert done["removals"] == plan["removals"]
    assert before - objects(root) == {removal["object"] for removal in done["removals"]}
    assert done["bytes"] == sum(removal["bytes"] for removal in done["removals"])
    assert {row["reason"] for row in done["reasons"]} == {"version", "shard", "orphan"}
    again = run(capsys, "gc", root, "--keep-last", 2, "--apply")
    assert "0 objects" in again
    assert run_json(capsys, "verify", root)["ok"]
    assert [row["version"] for row in run_json(capsys, "log", root)] == [1, 2]
    assert run_json(capsys, "show", root, 0, code=2)["kind"] == "version-gone"
    assert run_json(capsys, "export", root, 0, root / "out", code=2)["kind"] == "version-gone"


def test_leases_are_shown(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reader = deltafmt.open(str(root)).iter_read(0)
    next(reader)
    text = run(capsys, "gc", root, "--keep-last", 2, "--apply")
    assert "readers at work hold back the objects from version 0 on" in text
    assert "from version 0, " in text
    list(reader)
    run(capsys, "gc", root, "--keep-last", 2, "--apply")
    assert not (root / "versions" / f"{0:020d}.dfm").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--keep-last", "0"],
        ["--keep-last", "few"],
        ["--keep-last", "2", "--grace", "soon"],
        ["--keep-last", "2", "--grace", "-1s"],
    ],
)
def test_usage(root: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    run(capsys, "gc", root, *arguments, code=2)


def test_no_lineage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, "gc", tmp_path, "--keep-last", 1, code=2)["kind"] == "lineage-missing"


def test_damage_is_told(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = root / "versions" / f"{2:020d}.dfm"
    manifest.write_bytes(manifest.read_bytes()[:-1] + b"?")
    plan = run_json(capsys, "gc", root, "--keep-last", 2, code=1)
    assert [found["object"] for found in plan["damaged"]] == [f"versions/{2:020d}.dfm"]
    assert main(["gc", str(root), "--keep-last", "2"]) == 1
    assert "damaged, so that all that they may name stays" in capsys.readouterr().out
