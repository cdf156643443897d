"""The command on an S3 server, with credentials from the environment as everybody has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import deltafmt
from deltafmt.cli import main
from deltafmt.store.s3 import S3Store
from deltafmt.testing.servers import SeaweedServer
from tests.cli_help import run, run_json


@pytest.fixture
def environment(seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweed.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweed.secret)
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweed.endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


@pytest.mark.usefixtures("environment")
def test_a_root_on_s3_is_looked_at_like_any_other(
    seaweed: SeaweedServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, model = seaweed.url(), {"w": torch.arange(600, dtype=torch.int32)}
    writer = deltafmt.Writer(url)
    writer.publish_anchor(model, step=10)
    model["w"][::50] += 1
    writer.publish(model, step=20)
    assert [row["step"] for row in run_json(capsys, "log", url)] == [10, 20]
    assert run_json(capsys, "show", url)["listed"] == 12
    assert run_json(capsys, "diff", url, 0, 1)["changed"] == 12
    assert "no damage" in run(capsys, "verify", url)
    run(capsys, "export", url, "v1", tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    assert torch.equal(load_file(file)["w"], model["w"])
    monkeypatch.setattr(S3Store, "budget_seconds", 0.5)
    seaweed.kill()
    try:
        assert main(["log", url]) == 3
    finally:
        seaweed.start()
    told = capsys.readouterr().err
    assert seaweed.secret not in told
    assert seaweed.key not in told
