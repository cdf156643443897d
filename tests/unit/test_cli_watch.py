from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from deltafmt import Lineage, StoreError
from deltafmt.cli import main
from tests.cli_help import changed, checkpoint, make_lineage, weights


@pytest.fixture
def root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    root = make_lineage(tmp_path)
    capsys.readouterr()
    return root


def test_versions_that_are_there_and_one_that_comes(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = checkpoint(tmp_path / "next", changed(weights()))

    def publish() -> None:
        time.sleep(0.1)
        assert main(["publish", str(root), str(directory), "--quiet", "--json", "--step", "30"]) == 0

    publisher = threading.Thread(target=publish)
    publisher.start()
    assert main(["watch", str(root), "--from", "1", "--count", "3", "--poll", "0.01"]) == 0
    publisher.join()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = [line for line in lines if line and line[0] in ("version", "1", "2", "3")]
    assert [line[0] for line in table] == ["version", "1", "2", "3"]
    assert table[3][1:3] == ["2", "30"]


def test_one_json_document_a_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(root), "--from", "0", "--count", "2", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["version"], row["base"], row["changed"]) for row in rows] == [(0, None, None), (1, 0, 4)]


def test_storage_that_comes_back(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outage = iter(range(3))
    latest = Lineage.latest

    def sometimes(lineage: Lineage) -> int | None:
        if next(outage, None) is not None:
            raise StoreError("the connection is gone", kind="store-unreachable")
        return latest(lineage)

    monkeypatch.setattr(Lineage, "latest", sometimes)
    assert main(["watch", str(root), "--from", "2", "--count", "1", "--poll", "0.001"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[1].split()[0] == "2"
    assert shown.err.count("trying again") == 1
    assert shown.err.count("storage is back") == 1


def test_a_pause_must_be_one(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(root), "--poll", "0"]) == 2
    assert "positive" in capsys.readouterr().err
