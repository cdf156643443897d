"""Ranks that share nothing but the root, each a process: kills at exact places, and the same job started again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import deltafmt
from tests.faults.processes import KILLED, durable_calls, run_ranks
from tests.ranks import assert_holds, changed, model

SECRET = bytes(range(32))
STATES = [changed(model(), seed) for seed in range(3)]


@pytest.mark.parametrize(
    ("rank", "where", "newest"),
    [
        (1, ["write", "data/00000000000000000001", "after", 1], 0),
        (0, ["put_if_absent", "versions/00000000000000000001", "before", 1], 0),
        (0, ["put_if_absent", "versions/00000000000000000001", "after", 1], 1),
    ],
)
def test_a_killed_rank_and_the_next_start_of_its_job(
    tmp_path: Path, rank: int, where: list[object], newest: int
) -> None:
    settings: dict[str, Any] = {"group": False, "secret": SECRET.hex()}
    found = run_ranks(tmp_path, 3, "steps", first=0, last=1, die={rank: where}, seconds=12.0, **settings)
    assert found.pop(rank) == KILLED
    root = str(tmp_path / "root")
    lineage = deltafmt.open(root, trust=[deltafmt.HmacKey(SECRET)])
    assert lineage.latest() == newest
    for anchor, outcome, version in found:
        assert anchor == 0
        if newest == 1:
            assert (outcome, version) == (1, 1), "the manifest that is there tells"
        else:
            assert outcome[:2] == ["IncompleteError", "rank-missing"]
            assert f"rank {rank}" in outcome[2] or outcome[2].startswith("rank 0 is gone")
            assert version == 0
    again = run_ranks(tmp_path, 3, "steps", first=2, last=2, seconds=60.0, **settings)
    assert again == [[newest + 1, newest + 1]] * 3
    names = lineage.schema().names
    assert_holds(root, newest + 1, {name: STATES[2][name] for name in names})
    referred = {key for version in range(newest + 2) for key in lineage.manifest(version).shard_keys}
    stored = {str(p.relative_to(root)) for p in (Path(root) / "data").rglob("*.dfs")}
    assert referred <= stored
    assert lineage.verify().ok
    _check_order(tmp_path)


def test_a_coordinator_that_dies_before_the_anchor_leaves_the_version(tmp_path: Path) -> None:
    die = {0: ["put_if_absent", f"ways/{1:020d}/anchor", "before", 1]}
    settings: dict[str, Any] = {"group": False, "anchor_every": 1}
    found = run_ranks(tmp_path, 3, "steps", first=0, last=1, die=die, seconds=12.0, **settings)
    assert found == [KILLED, [0, 1, 1], [0, 1, 1]]
    lineage = deltafmt.open(str(tmp_path / "root"))
    assert lineage.info(1).ways == (0,)
    assert run_ranks(tmp_path, 3, "steps", first=2, last=2, **settings) == [[2, 2]] * 3
    assert lineage.info(2).ways == (1, None)
    lineage.gc(keep_last=1, grace_seconds=0.0, dry_run=False)
    assert_holds(str(tmp_path / "root"), 2, {name: STATES[2][name] for name in lineage.schema().names})
    assert lineage.verify().ok
    assert len({p.parent.name for p in (tmp_path / "root" / "ways-data").rglob("*.dfs")}) == 1


def _check_order(folder: Path) -> None:
    """Of every version all shards were flushed before its manifest was created, and each before its receipt."""
    calls = durable_calls(folder)
    manifests = [
        at for at, (verb, key) in enumerate(calls) if (verb, key[:9]) == ("put_if_absent", "versions/")
    ]
    assert manifests
    lineage = deltafmt.open(str(folder / "root"))
    for at in manifests:
        manifest = lineage.manifest(int(Path(calls[at][1]).stem))
        for key in manifest.shard_keys:
            assert ("close", key) in calls[:at]
            writer = int(Path(key).stem)
            receipt = f"attempts/{manifest.version:020d}/{manifest.attempt.hex()}/{writer:05d}.dfm"
            if writer:
                assert calls.index(("close", key)) < calls.index(("put_if_absent", receipt)) < at
