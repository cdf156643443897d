from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deltafmt.cli.targets import find_target
from tests.cli_help import make_lineage, run, run_json, weights


@pytest.fixture
def root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    root = make_lineage(tmp_path)
    capsys.readouterr()
    return root


def _shard(root: Path, version: int) -> Path:
    (shard,) = (root / "data" / f"{version:020d}").glob("*/*.dfs")
    return shard


def test_every_object_of_a_root_can_be_dumped(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = set()
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        by_path = run_json(capsys, "dump", path)
        by_key = run_json(capsys, "dump", root, path.relative_to(root).as_posix())
        assert by_path == by_key
        assert by_path["bytes"] == path.stat().st_size
        kinds.add(by_path.get("kind", "file"))
        assert run(capsys, "dump", path, "--rows", 2)
    assert kinds == {"lineage", "schema", "tiling", "version", "shard", "latest", "file"}


def test_tables_are_cut_unless_all_is_asked(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = root / "versions" / f"{0:020d}.dfm"
    fields = run_json(capsys, "dump", manifest, "--rows", 1)["fields"]
    assert fields["tensors"]["rows"] == 4
    assert len(fields["tensors"]["columns"]["digest0"]) == 1
    whole = run_json(capsys, "dump", manifest, "--all")["fields"]
    assert len(whole["tensors"]["columns"]["digest0"]) == 4
    assert "more rows" in run(capsys, "dump", manifest, "--rows", 1)


def test_a_chunk_from_its_shard_and_from_the_manifest(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lone = run_json(capsys, "dump", _shard(root, 1), "--chunk", 0)
    assert lone == run_json(capsys, "dump", root / "versions" / f"{1:020d}.dfm", "--chunk", 0)
    assert lone["operation"] == "step"
    assert {"gap", "block", "code"} <= {column["column"] for column in lone["columns"]}
    assert all(column["problem"] is None for column in lone["columns"])
    changes = [e for row in range(2) for e in _elements(root, row, capsys)]
    assert [(e["tensor"], e["flat"], e["step"]) for e in changes if e["tensor"] == "layer.weight"] == [
        ("layer.weight", flat, step) for flat, step in zip((0, 40, 900), _steps(), strict=True)
    ]
    assert next(e["index"] for e in changes if e["flat"] == 40) == [1, 8]
    assert "layer.weight" in run(capsys, "dump", _shard(root, 1), "--chunk", 0) + run(
        capsys, "dump", _shard(root, 1), "--chunk", 1
    )
    run(capsys, "dump", _shard(root, 1), "--chunk", 99, code=2)
    run(capsys, "dump", root / "lineage.dfm", "--chunk", 0, code=2)


def _elements(root: Path, row: int, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run_json(capsys, "dump", _shard(root, 1), "--chunk", row)["elements"]
    return found


def _steps() -> list[int]:
    """One up in bits is one step away from zero: up for a positive value, down for a negative one."""
    signs = weights()["layer.weight"].view(-1)[[0, 40, 900]] < 0
    return [-1 if negative else 1 for negative in signs.tolist()]


def test_a_lone_shard_shows_columns_without_elements(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lone = tmp_path / "lone.dfs"
    lone.write_bytes(_shard(root, 1).read_bytes())
    assert "elements" not in run_json(capsys, "dump", lone, "--chunk", 0)
    (tmp_path / "data").mkdir()
    moved = lone.rename(tmp_path / "data" / "lone.dfs")
    assert run_json(capsys, "dump", moved, "--chunk", 0)["elements"] is None


def test_columns_as_decoded_and_as_stored(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = _shard(root, 1)
    gaps = run_json(capsys, "dump", shard, "--chunk", 0, "--column", "gap", "--all")
    assert gaps["as"] == "decoded"
    stored = run_json(capsys, "dump", shard, "--chunk", 0, "--column", "gap", "--stored", "--hex", "--all")
    place = next(c for c in run_json(capsys, "dump", shard, "--chunk", 0)["columns"] if c["column"] == "gap")
    data = shard.read_bytes()[place["offset"] : place["offset"] + place["stored_bytes"]]
    assert stored["hex"] == data.hex()
    assert run(capsys, "dump", shard, "--chunk", 0, "--column", "gap", "--hex").count("\n") >= 2
    run(capsys, "dump", shard, "--chunk", 0, "--column", "b7", code=2)


def test_hex_of_any_object(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "dump", root / "lineage.dfm", "--hex", "--rows", 1)
    assert "89 44 46 4d 0d 0a 1a 0a" in text
    assert "more bytes" in text


def test_damage_is_shown_as_far_as_it_goes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = _shard(root, 1)
    data = bytearray(shard.read_bytes())
    data[9] ^= 1
    shard.write_bytes(data)
    text = run(capsys, "dump", shard, "--chunk", 0, code=1)
    assert text.count("damaged") == 1
    assert run(capsys, "dump", shard)
    shard.write_bytes(data[:-20])
    assert run_json(capsys, "dump", shard, code=1)["kind"] == "magic-wrong"
    assert run(capsys, "dump", shard, "--hex")


def test_a_broken_metadata_object_is_damage(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lineage = root / "lineage.dfm"
    data = bytearray(lineage.read_bytes())
    data[30] ^= 1
    lineage.write_bytes(data)
    assert run_json(capsys, "dump", lineage, code=1)["kind"] == "crc-mismatch"
    lineage.write_bytes(b"something else")
    assert run_json(capsys, "dump", lineage, code=1)["kind"] == "magic-wrong"


def test_what_dump_is_pointed_at() -> None:
    in_bucket = find_target("s3://bucket/run/data/00000000000000000001/ab/00000.dfs", None)
    assert (in_bucket.root, in_bucket.key) == ("s3://bucket/run", "data/00000000000000000001/ab/00000.dfs")
    here = find_target("lineage.dfm", None)
    assert (here.root, here.key) == (".", "lineage.dfm")
    assert find_target("./run", "/versions/1.dfm").key == "versions/1.dfm"
    odd = find_target("/tmp/one.dfs", None)
    assert (odd.root, odd.key, odd.in_lineage) == ("/tmp", "one.dfs", False)
