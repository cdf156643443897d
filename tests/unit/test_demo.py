from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

import deltafmt
from deltafmt.cli.demo.engine import blank, layout, shards
from deltafmt.cli.demo.model import SHAPES, Policy
from deltafmt.cli.demo.trainer import Trainer
from deltafmt.cli.main import main
from deltafmt.layout import TargetInfo
from deltafmt.tensors import dtype_name


def test_the_demo_ends_with_identical_bits(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deltafmt", "demo", str(tmp_path / "run"), "--size", "tiny", "--json"]
    done = subprocess.run([*command, "--versions", "3"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["identical"]
    assert [proof["receiver"] for proof in result["proofs"]] == ["rank 0 of 2", "rank 1 of 2", "late joiner"]
    assert all(proof["blake2b"] == proof["trainer_blake2b"] for proof in result["proofs"])
    assert [row["version"] for row in result["versions"]] == [0, 1, 2]
    assert all(0 < row["changed"] < row["elements"] for row in result["versions"][1:])
    assert deltafmt.open(str(tmp_path / "run")).latest() == 2
    assert main(["verify", str(tmp_path / "run")]) == 0


def test_the_layout_of_each_rank_fits_its_tensors() -> None:
    shape = SHAPES["small"]
    with torch.device("meta"):
        full = Policy(shape).state_dict()
    schema = deltafmt.Schema.of({name: t.to(torch.bfloat16) for name, t in full.items()})
    for rank in range(2):
        live = blank(full, shape, rank, 2)
        assert {name: t.shape for name, t in live.items()} == {
            name: t.shape for name, t in shards(full, shape, rank, 2).items()
        }
        infos = {name: TargetInfo(dtype_name(t), tuple(t.shape), t.stride()) for name, t in live.items()}
        layout(full, shape, rank, 2).validate(schema, infos)


def test_the_trainer_learns_and_repeats_itself() -> None:
    one, two = Trainer("tiny", 3), Trainer("tiny", 3)
    first = one.warm_up(1)
    assert one.warm_up(8) < first
    two.warm_up(1)
    two.warm_up(8)
    assert 0 <= one.step() == two.step() <= 1
    assert all(torch.equal(a, two.cast()[name]) for name, a in one.cast().items())
