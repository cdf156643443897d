"""Damage is named object by object, with the versions that it takes down."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import torch

import deltafmt
from deltafmt import WriterOptions
from deltafmt.errors import DeltafmtError
from deltafmt.format import keys
from deltafmt.store.memory import MemoryStore


class Course:
    """Versions 0 to 4: an anchor and deltas, with a second anchor at 3."""

    def __init__(self) -> None:
        name = f"verify/{uuid.uuid4().hex}"
        self.store = MemoryStore.named(name)
        tensors = {"a": torch.randn(900), "b": torch.ones(40).bfloat16()}
        writer = deltafmt.Writer(f"memory://{name}", options=WriterOptions(domain_elements=300))
        writer.publish_anchor(tensors, files={"config.json": b"{}"})
        for version in range(1, 5):
            tensors["a"][version::7] *= 1.01
            writer.publish(tensors)
        self.lineage = deltafmt.open(f"memory://{name}")
        self.lineage.add_anchor(3)

    def shard(self, version: int, folder: str = "data/") -> str:
        start = f"{folder}{version:020d}/"
        return next(key for key in self.store.objects if key.startswith(start))

    def flip(self, key: str, at: int) -> None:
        data = bytearray(self.store.objects[key])
        data[at] ^= 1
        self.store.objects[key] = bytes(data)

    def problems(self, *, deep: bool = True) -> list[tuple[str, tuple[int, ...]]]:
        report = deltafmt.open(self.lineage.url).verify(deep=deep)
        assert report.ok == (not report.problems)
        return [(problem.key, problem.versions) for problem in report.problems]


@pytest.fixture
def course() -> Course:
    return Course()


def test_nothing_is_wrong(course: Course) -> None:
    seen: list[tuple[int, int]] = []
    report = course.lineage.verify(progress=lambda done, total: seen.append((done, total)))
    assert (report.ok, report.problems, report.versions) == (True, (), (0, 1, 2, 3, 4))
    assert report.checked_bytes > 0
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.parametrize(("version", "lost"), [(0, (0, 1, 2)), (1, (1, 2)), (2, (2,)), (3, ()), (4, (4,))])
def test_a_bit_in_a_chunk(version: int, lost: tuple[int, ...], course: Course) -> None:
    shard = course.shard(version)
    course.flip(shard, 20)
    assert course.problems() == [(shard, lost)]
    # Without reading chunks it cannot be seen.
    assert course.problems(deep=False) == []


@pytest.mark.parametrize("change", ["cut", "gone", "footer"])
def test_a_shard_that_is_cut_gone_or_spoiled_at_its_end(change: str, course: Course) -> None:
    shard = course.shard(1)
    if change == "gone":
        del course.store.objects[shard]
    elif change == "cut":
        course.store.objects[shard] = course.store.objects[shard][:-1]
    else:
        course.flip(shard, -40)
    assert course.problems(deep=False) == [(shard, (1, 2))]
    found = course.problems()
    assert (shard, (1, 2)) in found


def test_a_bit_in_a_manifest(course: Course) -> None:
    course.flip(keys.version_key(2), 60)
    found = dict(course.problems())
    assert found[keys.version_key(2)] == (2,)


def test_a_bit_in_a_schema_or_a_tiling(course: Course) -> None:
    for folder in ("schemas/", "tilings/"):
        spoiled = Course()
        key = next(key for key in spoiled.store.objects if key.startswith(folder))
        spoiled.flip(key, 60)
        found = dict(spoiled.problems())
        assert found[key] == (0, 1, 2, 3, 4)


def test_two_damaged_shards_of_one_chain(course: Course) -> None:
    shards = [course.shard(1), course.shard(2)]
    for shard in shards:
        course.flip(shard, 20)
    assert course.problems() == [(shards[0], (1, 2)), (shards[1], (2,))]


def test_manifests_that_are_gone(course: Course) -> None:
    del course.store.objects[keys.version_key(1)]
    assert course.problems() == [(keys.version_key(1), (1, 2))]
    del course.store.objects[keys.version_key(0)]
    # Nothing below is expected to be there; what others build on is.
    assert (keys.version_key(1), (1, 2)) in course.problems()


def test_a_side_file_takes_no_version_down(course: Course) -> None:
    key = next(key for key in course.store.objects if key.startswith("files/"))
    course.flip(key, 0)
    assert course.problems()[0] == (key, ())


def test_an_anchor_that_went_bad_beside_its_delta(course: Course) -> None:
    shard = next(key for key in course.store.objects if key.startswith("ways-data/"))
    course.flip(shard, 20)
    assert course.problems() == [(shard, ())]


def test_one_version_is_checked_with_all_that_it_needs(course: Course) -> None:
    course.flip(course.shard(4), 20)
    assert course.lineage.verify(2).versions == (0, 1, 2)
    assert course.lineage.verify(2).ok
    assert not course.lineage.verify(4).ok
    with pytest.raises(deltafmt.NotFoundError):
        course.lineage.verify(9)


@pytest.mark.parametrize("folder", ["schemas", "tilings"])
@pytest.mark.parametrize("cut", [True, False])
def test_a_damaged_schema_or_tiling_hides_no_version(tmp_path: Path, folder: str, cut: bool) -> None:
    """Only a manifest that is cut itself is not committed yet; what it refers to was stored before it."""
    root = tmp_path / "run"
    writer = deltafmt.Writer(root)
    writer.publish_anchor({"w": torch.ones(3)})
    writer.publish({"v": torch.ones(5)})
    lineage = deltafmt.open(root)
    key = getattr(keys, f"{folder[:-1]}_key")(getattr(lineage.manifest(1), folder[:-1]))
    if cut:
        (root / key).write_bytes((root / key).read_bytes()[:40])
    else:
        (root / key).unlink()
    with pytest.raises(DeltafmtError) as caught:
        deltafmt.open(root).read()
    assert str(caught.value.where).startswith(folder)
    assert deltafmt.open(root).read(0).keys() == {"w"}
    with pytest.raises(DeltafmtError):
        deltafmt.Writer(root).publish({"w": torch.ones(3)})
    assert not (root / keys.version_key(2)).exists()
