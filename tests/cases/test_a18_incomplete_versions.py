"""A18: a version with a rank missing, or a marker ahead of the data."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch

import deltafmt
from deltafmt.errors import IncompleteError
from tests.cases.common import assert_same
from tests.ranks import anchor, publish, together, writers

STATES = [{f"t{k}": torch.full((300,), float(10 * n + k)) for k in range(4)} for n in range(3)]


def parts(state: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{name: tensor} for name, tensor in state.items()]


def test_a_missing_rank_is_named_and_a_second_try_of_all_succeeds(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    ranks = writers(root, 4)
    assert anchor(ranks, parts(STATES[0])) == [0] * 4
    impatient = writers(root, 4, options={"rank_timeout_seconds": 1.0, "job": "b"})
    new = parts(STATES[1])
    found = together([partial(impatient[k].publish, new[k]) for k in (0, 1, 3)])
    assert isinstance(found[0], IncompleteError)
    assert (found[0].kind, found[0].where) == ("rank-missing", "rank 2")
    assert all(isinstance(error, IncompleteError) for error in found)
    assert deltafmt.open(root).latest() == 0
    assert publish(ranks, new) == [1] * 4
    assert_same(deltafmt.open(root).read(1), STATES[1])


@pytest.mark.parametrize("left", [b"", b"\x89DFM\r\n\x1a\n cut"])
def test_a_manifest_that_is_empty_or_cut_is_not_committed(tmp_path: Path, left: bytes) -> None:
    root = tmp_path / "run"
    ranks = writers(str(root), 4)
    assert anchor(ranks, parts(STATES[0])) == [0] * 4
    manifest = root / "versions" / f"{1:020d}.dfm"
    manifest.write_bytes(left)
    assert deltafmt.open(str(root)).latest() == 0
    assert_same(deltafmt.open(str(root)).read(), STATES[0])
    manifest.unlink()
    assert publish(ranks, parts(STATES[1])) == [1] * 4
    assert_same(deltafmt.open(str(root)).read(), STATES[1])


def test_every_shard_is_on_the_disk_before_the_manifest_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []
    sync, link = os.fsync, os.link

    def noted_sync(descriptor: int) -> None:
        sync(descriptor)
        calls.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))

    def noted_link(source: os.PathLike[str], target: os.PathLike[str]) -> None:
        calls.append(("link", str(target)))
        link(source, target)

    root = tmp_path / "run"
    ranks = writers(str(root), 4)
    assert anchor(ranks, parts(STATES[0])) == [0] * 4
    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "link", noted_link)
    assert publish(ranks, parts(STATES[1])) == [1] * 4
    monkeypatch.undo()
    manifest = deltafmt.open(str(root)).manifest(1)
    commit = calls.index(("link", str(root / "versions" / f"{1:020d}.dfm")))
    shards = [str(root / key) for key in manifest.shard_keys]
    assert len(shards) == 4
    for shard in shards:
        # Its bytes, and then its name in its folder.
        at = calls.index(("sync", shard))
        assert ("sync", str(Path(shard).parent)) in calls[at:commit]
