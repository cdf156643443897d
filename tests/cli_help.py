"""A small lineage made by the command itself, and a way to run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deltafmt.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """The command's stdout; it must end with the given exit code."""
    try:
        found = main([str(argument) for argument in arguments])
    except SystemExit as stop:
        found = int(stop.code or 0)
    out, err = capsys.readouterr()
    assert found == code, err
    if code:
        assert out or err, "a failure says why"
    return out


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    return json.loads(run(capsys, *arguments, "--json", code=code))


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(64, 32, generator=random).bfloat16(),
        "layer.weight": torch.randn(48, 32, generator=random).bfloat16(),
        "norm.weight": torch.ones(32),
        "steps": torch.tensor(7),
    }


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor], *, sharded: bool = False) -> Path:
    """A safetensors folder with side files, as save_pretrained leaves it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "none"}')
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.txt").write_text("a\nb\n")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "junk").write_text("hidden")
    if not sharded:
        save_file(tensors, folder / "model.safetensors")
        return folder
    places = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        file = f"model-{number:05d}.safetensors"
        save_file({name: tensor}, folder / file)
        places[name] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with three elements of one tensor one step away, and a NaN in another."""
    result = {name: tensor.clone() for name, tensor in tensors.items()}
    result["layer.weight"].view(torch.int16).view(-1)[[0, 40, 900]] += 1
    result["norm.weight"][3] = float("nan")
    return result


def make_lineage(tmp_path: Path) -> Path:
    """Version 0 from a folder, version 1 with four changed elements, version 2 equal to it."""
    first = weights()
    root = tmp_path / "run"
    second = checkpoint(tmp_path / "b", changed(first), sharded=True)
    labels = ["--meta", "reward=0.5", "--meta", "note=warm up"]
    for arguments in (
        ["create", root, "--from", checkpoint(tmp_path / "a", first), "--step", 0],
        ["publish", root, second, "--step", 10, *labels],
        ["publish", root, second, "--step", 20],
    ):
        assert main([str(argument) for argument in arguments]) == 0
    return root
