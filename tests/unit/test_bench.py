"""The benchmarks run, on something tiny: their numbers mean nothing here, their shape does."""

from __future__ import annotations

import json

import pytest
import torch

from tools.bench import chain
from tools.bench.__main__ import main
from tools.bench.models import synthetic, trained


def test_whole(capsys: pytest.CaptureFixture[str]) -> None:
    main(["whole", "--size", "4", "--versions", "1", "--share", "0.01", "0.3", "--no-traces", "--json"])
    result = json.loads(capsys.readouterr().out)
    sparse, dense = result["rows"]
    assert sparse["identical"]
    assert dense["identical"]
    assert 0.009 < sparse["changed_share"] < 0.011
    assert 9.5 < sparse["bits_per_changed"] < 12
    main(["whole", "--size", "1", "--versions", "1", "--no-traces"])
    assert "two-stream" in capsys.readouterr().out


def test_codec(capsys: pytest.CaptureFixture[str]) -> None:
    main(["codec", "--size", "2", "--share", "0.01", "--repeat", "1", "--no-traces", "--json"])
    (workload,) = json.loads(capsys.readouterr().out)["workloads"]
    bits = {row["coding"]: row["bits_per_changed"] for row in workload["codings"]}
    assert all(row["identical"] for row in workload["codings"])
    assert workload["limit_bits"] < bits["step"] < bits["u16 gap + XOR, zstd-1"] < bits["set"] < 21
    assert bits["int32 + bf16"] == 48
    main(["codec", "--size", "1", "--share", "0.03", "--repeat", "1", "--only", "step", "--no-traces"])
    assert "3.0" in capsys.readouterr().out


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--tensors", "20", "--json"])
    assert json.loads(capsys.readouterr().out)["chunks"] == 40
    main(["plan", "--tensors", "3"])
    assert "plan" in capsys.readouterr().out


def test_storage(capsys: pytest.CaptureFixture[str]) -> None:
    main(["storage", "--size", "1", "--ranks", "2", "--repeat", "1", "--json"])
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["identical"]
    assert row["stored_bytes"] > 1 << 20
    assert row["publish_rate_of_bare"] > 0
    assert row["delta_rate_of_bare"] > 0


def test_chain(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "chain",
            "--size",
            "tiny",
            "--squash",
            "4",
            "--behind",
            "3",
            "--versions",
            "6",
            "--warm-up",
            "1",
            "--json",
        ]
    )
    result = json.loads(capsys.readouterr().out)
    assert [row["held"] for row in result["chains"]] == [0, 1, 2, 3]
    assert all(row["direct_bytes"] > 0 for row in result["chains"])
    assert result["further_ways_per_version"] == 4 / 6
    assert any("at worst" in line for line in chain.render(result))


def test_synthetic_updates_move_the_share_that_they_say() -> None:
    workload = synthetic(1 << 20, 0.03, 2)
    before = {name: tensor.clone() for name, tensor in workload.tensors.items()}
    assert workload.nbytes == 1 << 20
    assert len(list(workload.steps())) == 2
    changed = sum(
        int((before[n].view(torch.int16) != t.view(torch.int16)).sum()) for n, t in workload.tensors.items()
    )
    assert 0.05 < changed / (1 << 19) < 0.06


def test_a_model_trained_here_stands_in_for_a_trace() -> None:
    workload = trained(1, size="tiny", warm_up=1)
    before = {name: tensor.clone() for name, tensor in workload.tensors.items()}
    assert len(list(workload.steps())) == 1
    assert any(not torch.equal(before[name], tensor) for name, tensor in workload.tensors.items())
