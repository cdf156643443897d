"""Every example runs, as its own docstring says."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import deltafmt

EXAMPLES = Path(__file__).resolve().parents[2] / "tools" / "examples"


def run(name: str, *arguments: object) -> str:
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_training_and_what_it_changed(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert run("train_and_follow.py", root).splitlines()[-1].endswith("bit for bit")
    infos = deltafmt.open(root).log()
    assert [info.step for info in infos] == list(range(6))
    assert all("loss" in info.meta for info in infos[1:])
    shown = run("what_changed.py", root, 3)
    assert f"{infos[3].changed:,}  elements in all" in shown
    assert "2.weight" in shown


def test_two_ranks(tmp_path: Path) -> None:
    shown = sorted(run("two_ranks.py", tmp_path / "run").splitlines())
    assert shown == [f"rank {rank} holds its half of version 2" for rank in range(2)]


def test_transformers_trainer(tmp_path: Path) -> None:
    shown = run("hf_trainer.py", tmp_path / "run").splitlines()
    assert shown[-1].endswith("bit for bit")
    assert [info.step for info in deltafmt.open(str(tmp_path / "run")).log()] == list(range(5))


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_say_how_they_are_run(example: Path) -> None:
    lines = [line.split() for line in (ast.get_docstring(ast.parse(example.read_text())) or "").splitlines()]
    told = [line for line in lines if line and line[0] in {"python", "torchrun"}]
    assert any(f"tools/examples/{example.name}" in line for line in told)


@pytest.mark.parametrize("example", ["ranks.py", "two_ranks.py", "train_and_follow.py", "what_changed.py"])
def test_examples_without_a_root_say_what_they_need(example: str) -> None:
    command = [sys.executable, str(EXAMPLES / example)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 1
    assert f"tools/examples/{example} ./run" in done.stderr
    assert "Traceback" not in done.stderr
