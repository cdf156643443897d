"""Squashing: what it adds, refuses, survives and costs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import deltafmt
from deltafmt import CommitConflictError, NotFoundError, SchemaError, StoreError
from deltafmt.format import keys
from deltafmt.read.chain import cheapest_chain
from deltafmt.store.memory import MemoryStore
from deltafmt.testing.faulty import Crash, FaultyStore, crashing, crashing_after, lost_reply, unreachable
from tests.reading import Course, same


def course(versions: int = 6, **options: Any) -> Course:
    """A lineage of deltas, in memory."""
    random = torch.Generator().manual_seed(0)
    tensors = {"w": torch.randn(6000, generator=random).bfloat16(), "v": torch.randn(9, 50, generator=random)}
    found = Course(tensors, **{"domain_elements": 2000, **options})
    found.anchor()
    for version in range(1, versions + 1):
        found.step(seed=version)
    return found


def bases(lineage: deltafmt.Lineage, version: int) -> tuple[int | None, ...]:
    return lineage.info(version).ways


def test_a_squash_is_taken_by_receivers_and_read() -> None:
    run = course()
    lineage = deltafmt.open(run.root)
    single = sum(lineage.manifest(version).stored_bytes for version in range(1, 7))
    way = lineage.squash(0, 6)
    assert (way.base, way.version, way.is_way) == (0, 6, True)
    assert 0 < way.stored_bytes < single
    assert bases(lineage, 6) == (5, 0)
    live = {name: torch.full_like(tensor, 3) for name, tensor in run.tensors.items()}
    receiver = deltafmt.Receiver(run.root, live)
    receiver.advance(0)
    assert [stored.manifest.base for stored in cheapest_chain(lineage.history, 0, 6)] == [0]
    receiver.advance()
    assert same(live, run.versions[6])
    assert same(lineage.read(6), run.versions[6])
    assert lineage.verify().ok


def test_a_squash_of_squashes_is_the_same_as_of_single_ways() -> None:
    run = course()
    lineage = deltafmt.open(run.root)
    halves = [lineage.squash(0, 3), lineage.squash(3, 6)]
    whole = lineage.squash(0, 6)
    again = deltafmt.open(course().root).squash(0, 6)
    assert whole.stored_bytes == again.stored_bytes
    for name in ("listed", "changed"):
        assert getattr(whole, name) == getattr(again, name)
        assert getattr(whole, name) < sum(getattr(half, name) for half in halves)
    assert lineage.verify().ok


def test_changes_that_go_back_drop_out() -> None:
    run = course(1)
    run.step(seed=2, share=0.05)
    run.tensors["w"].copy_(run.versions[0]["w"])
    run.tensors["v"].copy_(run.versions[0]["v"])
    run.publish()
    way = deltafmt.open(run.root).squash(0, 3)
    assert (way.listed, way.changed, way.stored_bytes) == (0, 0, 0)
    assert deltafmt.open(run.root).verify().ok


def test_a_way_that_is_there_is_no_error() -> None:
    run = course()
    lineage = deltafmt.open(run.root)
    first = lineage.squash(2, 5)
    assert lineage.squash(2, 5) == first
    assert lineage.squash(4, 5) == lineage.manifest(5), "the version's own way"
    assert bases(lineage, 5) == (4, 2)


def test_progress_reaches_all_bytes() -> None:
    run = course()
    seen: list[tuple[int, int]] = []
    deltafmt.open(run.root).squash(1, 4, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


@pytest.mark.parametrize("pair", [(3, 3), (4, 3)])
def test_a_base_is_older(pair: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="older"):
        deltafmt.open(course(4).root).squash(*pair)


@pytest.mark.parametrize("pair", [(0, 9), (-1, 2)])
def test_versions_that_are_not_there(pair: tuple[int, int]) -> None:
    with pytest.raises(NotFoundError) as caught:
        deltafmt.open(course(2).root).squash(*pair)
    assert caught.value.kind == "version-missing"


def test_a_change_of_dtype_cannot_be_bridged() -> None:
    run = course(2)
    run.tensors["v"] = run.tensors["v"].double()
    run.anchor()
    run.step(seed=9)
    lineage = deltafmt.open(run.root)
    with pytest.raises(SchemaError) as caught:
        lineage.squash(1, 4)
    assert caught.value.kind == "dtype-mismatch"
    assert bases(lineage, 4) == (3,)


def test_what_cannot_be_read_cannot_be_bridged() -> None:
    run = course(4)
    lineage = deltafmt.open(run.root)
    lineage.history.store.delete([keys.version_key(2)])
    with pytest.raises(NotFoundError) as caught:
        deltafmt.open(run.root).squash(1, 4)
    assert caught.value.kind == "chain-broken"


def faulty(run: Course) -> tuple[deltafmt.Lineage, FaultyStore]:
    lineage = deltafmt.open(run.root)
    lineage.history.store = FaultyStore(lineage.history.store)
    return lineage, lineage.history.store


def test_shards_that_were_collected_take_the_way_with_them() -> None:
    run = course()
    lineage, store = faulty(run)
    assert isinstance(store.inner, MemoryStore)
    objects = store.inner.objects

    def collect(_call: Any, action: Any) -> object:
        for key in [key for key in objects if key.startswith(keys.WAYS_DATA)]:
            del objects[key]
        return action()

    store.inject(collect, verb="put_if_absent")
    with pytest.raises(CommitConflictError) as caught:
        lineage.squash(0, 4)
    assert caught.value.kind == "way-withdrawn"
    assert bases(deltafmt.open(run.root), 4) == (3,)
    lineage.squash(0, 4)
    assert deltafmt.open(run.root).verify().ok


def test_a_lost_reply_is_settled() -> None:
    run = course()
    lineage, store = faulty(run)
    store.inject(lost_reply(StoreError("lost", kind="store-unreachable")), verb="put_if_absent")
    lineage.squash(0, 4)
    assert bases(deltafmt.open(run.root), 4) == (3, 0)
    assert deltafmt.open(run.root).verify().ok


@pytest.mark.parametrize("effect", [crashing, crashing_after, unreachable])
def test_whatever_call_fails_a_way_is_there_whole_or_not_at_all(effect: Any) -> None:
    run = course(3)
    calls = 0
    while True:
        calls += 1
        lineage, store = faulty(run)
        store.inject(effect(), first=calls, times=100)
        try:
            lineage.squash(0, 3)
        except (Crash, deltafmt.DeltafmtError):
            assert calls < 60
        else:
            break
        finally:
            store.heal()
        found = deltafmt.open(run.root)
        if found.history.further_bases(3):
            assert found.verify(3, deep=False).ok
            found.history.store.delete([keys.way_key(3, 0)])
    assert calls > 6


MEMORY = """
    import sys
    from pathlib import Path

    import deltafmt
    from deltafmt.write import compare, squash

    squash.BATCH_BYTES = compare.BATCH_BYTES = 1 << 20

    def resident(what):
        (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(what)]
        return int(line.split()[1]) * 1024

    small, large = (deltafmt.open(url) for url in sys.argv[1:3])
    pairs = [(0, 2), (1, 3)]
    for pair in pairs:
        small.squash(*pair)
    for pair in pairs:
        Path("/proc/self/clear_refs").write_text("5")  # The peak is from now on.
        before = resident("VmRSS")
        large.squash(*pair)
        print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_memory_is_bounded_by_chunks_not_by_the_model(tmp_path: Path) -> None:
    """Where all elements change, by deltas of one tiling, and where the tiling changes in between."""
    model = 32 << 20
    for name, elements in (("small", 1 << 12), ("large", model // 2)):
        tensors = {"w": torch.zeros(elements, dtype=torch.int16)}
        for cut, publish in ((6, "publish_anchor"), (6, "publish"), (6, "publish"), (5, "publish")):
            options = deltafmt.WriterOptions(domain_elements=elements >> cut)
            tensors["w"] += 1
            getattr(deltafmt.Writer(str(tmp_path / name), options=options), publish)(tensors)
    script = textwrap.dedent(MEMORY)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "small"), str(tmp_path / "large")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    composed, compared = map(int, done.stdout.split())
    print(composed / 2**20, compared / 2**20)
    assert composed < model * 3 / 4
    assert compared < model * 3 / 2, "both versions take twice as much"
    lineage = deltafmt.open(str(tmp_path / "large"))
    assert (lineage.info(2).ways, lineage.info(3).ways) == ((1, 0), (2, 1))
