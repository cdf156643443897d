from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deltafmt.cli import main
from tests.cli_help import changed, checkpoint, make_lineage, run, run_json, weights


@pytest.fixture
def root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    root = make_lineage(tmp_path)
    capsys.readouterr()
    return root


def test_log(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_json(capsys, "log", root)
    assert [(row["version"], row["base"], row["step"], row["changed"]) for row in rows] == [
        (0, None, 0, None),
        (1, 0, 10, 4),
        (2, 1, 20, 0),
    ]
    assert rows[1]["meta"] == {"step": 10, "reward": 0.5, "note": "warm up"}
    assert [row["ways"] for row in rows] == [[None], [0], [1]]
    text = run(capsys, "log", root, "--last", 2)
    assert len(text.splitlines()) == 3
    assert "from 0" in text


def test_show(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = run_json(capsys, "show", root)
    assert (newest["version"], newest["listed"]) == (2, 0)
    shown = run_json(capsys, "show", root, "v1", "--tensors")
    assert sum(chunk["listed"] for chunk in shown["chunks"]) == 4
    assert {chunk["operation"] for chunk in shown["chunks"]} == {"step"}
    assert {spec["name"]: spec["shape"] for spec in shown["tensor_list"]} == {
        "embed.weight": [64, 32],
        "layer.weight": [48, 32],
        "norm.weight": [32],
        "steps": [],
    }
    assert shown["files"] == {"config.json": 22, "tokenizer/vocab.txt": 4}
    text = run(capsys, "show", root, 1, "--tensors")
    assert "reward=0.5" in text
    assert "layer.weight" in text


def test_diff(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "diff", root, 0, "latest")
    assert (found["changed"], found["equal_tensors"]) == (4, 2)
    assert {t["name"]: t["changed"] for t in found["tensors"]} == {"layer.weight": 3, "norm.weight": 1}
    assert run_json(capsys, "diff", root, 1, 2)["tensors"] == []
    assert "norm.weight" not in run(capsys, "diff", root, 0, 1, "--top", 1)


def test_diff_names_what_came_and_went(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = changed(weights())
    other["extra"] = torch.zeros(5)
    other["norm.weight"] = torch.ones(33)
    del other["embed.weight"]
    run(capsys, "publish", root, checkpoint(tmp_path / "c", other))
    found = run_json(capsys, "diff", root, 2, 3)
    assert {t["name"]: t["change"] for t in found["tensors"]} == {
        "embed.weight": "removed",
        "extra": "added",
        "norm.weight": "retyped",
    }


@pytest.mark.parametrize("version", [0, 1])
def test_export_gives_back_what_was_published(
    version: int, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    result = run_json(capsys, "export", root, version, target)
    index = "model.safetensors.index.json"
    assert set(result["files"]) == {"model.safetensors", index, "config.json", "tokenizer/vocab.txt"}
    assert (target / "tokenizer" / "vocab.txt").read_text() == "a\nb\n"
    expected = weights() if version == 0 else changed(weights())
    found = load_file(target / "model.safetensors")
    assert {name: tensor.numpy(force=True).tobytes() for name, tensor in _bits(found).items()} == {
        name: tensor.numpy(force=True).tobytes() for name, tensor in _bits(expected).items()
    }
    run(capsys, "export", root, version, target, code=2)


def _bits(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.view(torch.int16) if t.dtype == torch.bfloat16 else t for name, t in tensors.items()}


def test_cat(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, "cat", root, "steps")["values"] == 7
    assert run_json(capsys, "cat", root, "norm.weight", "--at", 0)["values"] == [1.0] * 32
    assert "bfloat16" in run(capsys, "cat", root, "layer.weight")
    run(capsys, "cat", root, "nothing", code=2)


def test_cat_writes_raw_bytes_and_side_files(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    root = str(make_lineage(tmp_path))
    capsysbinary.readouterr()
    assert main(["cat", root, "embed.weight", "--raw"]) == 0
    assert capsysbinary.readouterr().out == weights()["embed.weight"].view(torch.int16).numpy().tobytes()
    assert main(["cat", root, "config.json"]) == 0
    assert capsysbinary.readouterr().out == b'{"model_type": "none"}'


def test_create_refuses_a_root_that_is_taken(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = run_json(capsys, "create", root, "--from", tmp_path / "a", code=2)
    assert (error["kind"], error["exit_code"]) == ("lineage-exists", 2)


def test_create_with_a_schema_only_then_publish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path / "a", weights())
    root = "memory://cli-schema-only"
    assert run_json(capsys, "create", root, "--schema", source)["version"] is None
    assert run_json(capsys, "log", root) == []
    run(capsys, "show", root, code=2)
    assert run_json(capsys, "publish", root, source)["version"] == 0
    assert run_json(capsys, "publish", root, source, "--anchor")["version"] == 1
    assert run_json(capsys, "show", root)["base"] is None


def test_create_without_data_cannot_be_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "run"
    created = run_json(capsys, "create", root, "--from", checkpoint(tmp_path / "a", weights()), "--no-data")
    assert created["stored_bytes"] == 0
    run(capsys, "cat", root, "steps", code=2)


def test_publish_a_single_file(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = changed(changed(weights()))
    save_file(tensors, tmp_path / "one.safetensors")
    published = run_json(capsys, "publish", root, tmp_path / "one.safetensors")
    assert (published["version"], published["changed"]) == (3, 3)
    # A file has no folder of side files; those of the base stay.
    assert published["files"] == ["config.json", "tokenizer/vocab.txt"]


def test_publish_refuses_another_dtype(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = weights() | {"norm.weight": torch.ones(32, dtype=torch.float64)}
    other = checkpoint(tmp_path / "c", tensors)
    assert run_json(capsys, "publish", root, other, code=2)["kind"] == "dtype-mismatch"
    assert run_json(capsys, "publish", root, other, "--anchor")["version"] == 3


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "model.safetensors").write_bytes(b"no safetensors"),
        lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
        lambda folder: (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"steps": "gone.safetensors"}})
        ),
        lambda folder: (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"absent": "model.safetensors"}})
        ),
    ],
)
def test_publish_names_what_is_wrong_with_a_checkpoint(
    spoil: object, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint(tmp_path / "c", weights())
    assert callable(spoil)
    spoil(folder)
    error = run_json(capsys, "publish", root, folder, code=2)
    assert error["next"]


@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "/etc/passwd", "s3://other/x", "C:\\x", "%2e%2e/x", ""]
)
def test_an_index_cannot_name_files_elsewhere(
    name: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint(tmp_path / "c", weights())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"steps": name}}))
    assert run_json(capsys, "publish", root, folder, code=1)["kind"] == "key-unsafe"


def test_squash(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    added = run_json(capsys, "squash", root, 0, "latest")
    assert (added["base"], added["version"], added["existed"], added["listed"]) == (0, 2, False, 4)
    assert added["stored_bytes"] > 0
    assert [line["ways"] for line in run_json(capsys, "log", root)][-1] == [1, 0]
    assert "was there already" in run(capsys, "squash", root, 0, 2)
    assert run_json(capsys, "verify", root)["ok"]
    assert "older" in run(capsys, "squash", root, "latest", 1, "--json", code=2)
    assert run_json(capsys, "squash", root, 0, 9, code=2)["kind"] == "version-missing"


def test_anchor(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    added = run_json(capsys, "anchor", root, 1)
    assert (added["version"], added["existed"]) == (1, False)
    assert added["stored_bytes"] > 0
    assert [line["ways"] for line in run_json(capsys, "log", root)] == [[None], [0, None], [1]]
    assert "was there already" in run(capsys, "anchor", root, 1)
    assert "anchor of version 2 added" in run(capsys, "anchor", root)
    assert run_json(capsys, "verify", root)["ok"]
    assert run_json(capsys, "gc", root, "--keep-last", 1)["floor"] == 2
    assert run_json(capsys, "anchor", root, 9, code=2)["kind"] == "version-missing"


def test_nothing_there_and_no_driver(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_json(capsys, "log", tmp_path / "none", code=2)["kind"] == "lineage-missing"
    run(capsys, "log", "nosuchscheme://x/y", code=2)
    run(capsys, "publish", tmp_path / "none", tmp_path, code=2)


def test_failing_storage_ends_with_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "schemas").write_text("a file where a folder should be")
    run(capsys, "create", tmp_path / "run", "--from", checkpoint(tmp_path / "a", weights()), code=3)
