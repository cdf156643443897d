"""A writer moves on only when its version is known to exist."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deltafmt
from deltafmt import (
    BaseMismatchError,
    CommitConflictError,
    CommitUnknownError,
    StoreError,
    WriterOptions,
)
from deltafmt.store.memory import MemoryStore
from deltafmt.write import pack


@pytest.fixture
def name() -> str:
    return f"writer-state/{uuid.uuid4().hex}"


def url_of(name: str) -> str:
    return f"memory://{name}"


def begun(name: str, **options: Any) -> tuple[deltafmt.Writer, dict[str, torch.Tensor]]:
    tensors = {"a": torch.arange(1000).float(), "b": torch.ones(50).bfloat16()}
    writer = deltafmt.Writer(url_of(name), options=WriterOptions(domain_elements=300, **options))
    writer.publish_anchor(tensors)
    return writer, tensors


def check(name: str, tensors: dict[str, torch.Tensor], version: int) -> None:
    lineage = deltafmt.open(url_of(name))
    assert lineage.latest() == version
    assert all(torch.equal(tensor, tensors[key]) for key, tensor in lineage.read().items())
    report = lineage.verify()
    assert report.ok, report.problems


def down() -> Any:
    raise StoreError("storage is away", kind="store-unreachable")


def test_a_new_writer_goes_on_by_itself(name: str) -> None:
    _, tensors = begun(name)
    for version in range(1, 4):
        tensors["a"][version] += 0.5
        writer = deltafmt.Writer(url_of(name))
        assert writer.version is None
        assert writer.publish(tensors) == version
        assert deltafmt.open(url_of(name)).manifest().changed == 1
    check(name, tensors, 3)


def test_a_resumed_writer_may_cut_anew(name: str) -> None:
    _, tensors = begun(name)
    tensors["a"][7] += 1
    writer = deltafmt.Writer(url_of(name), options=WriterOptions(domain_elements=128))
    assert writer.publish(tensors) == 1
    lineage = deltafmt.open(url_of(name))
    assert lineage.manifest(1).tiling != lineage.manifest(0).tiling
    assert lineage.manifest(1).changed == 1
    live = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    receiver = deltafmt.Receiver(url_of(name), live)
    receiver.advance(0)
    receiver.advance(1)
    tensors["a"][8] += 1
    writer.publish(tensors)
    receiver.advance()
    assert torch.equal(live["a"], tensors["a"])
    check(name, tensors, 2)


def test_resume_from_tensors_proves_them(name: str) -> None:
    _, tensors = begun(name)
    writer = deltafmt.Writer(url_of(name))
    reads = MemoryStore.named(name).read_range
    MemoryStore.named(name).read_range = lambda *_: down()  # type: ignore[method-assign]
    assert writer.resume(named_tensors=tensors) == 0
    MemoryStore.named(name).read_range = reads  # type: ignore[method-assign]
    wrong = {**tensors, "a": tensors["a"] + 1}
    with pytest.raises(BaseMismatchError):
        writer.resume(named_tensors=wrong)
    with pytest.raises(BaseMismatchError):
        writer.resume(named_tensors={"a": tensors["a"]})
    # What failed left nothing half known: the next publish reads its base.
    tensors["b"][0] = 3
    assert writer.publish(tensors) == 1
    check(name, tensors, 1)


def test_only_the_newest_version_is_resumed(name: str) -> None:
    writer, tensors = begun(name)
    writer.publish(tensors)
    with pytest.raises(CommitConflictError):
        writer.resume(0)
    with pytest.raises(deltafmt.NotFoundError):
        deltafmt.Writer("memory://nothing-here").resume()


def test_of_two_writers_one_wins_and_the_other_changes_nothing(name: str) -> None:
    first, tensors = begun(name)
    second = deltafmt.Writer(url_of(name))
    other = {key: tensor + 1 for key, tensor in tensors.items()}
    assert first.publish(tensors) == 1
    before = dict(MemoryStore.named(name).objects)
    with pytest.raises(CommitConflictError) as caught:
        second.publish(other)
    assert caught.value.kind == "version-taken"
    assert MemoryStore.named(name).objects == before
    # The number was fixed; only a resume moves it.
    with pytest.raises(CommitConflictError):
        second.publish(other)
    assert second.resume() == 1
    assert second.publish(other) == 2
    check(name, other, 2)


def test_two_begin_one_root(name: str) -> None:
    writers = [deltafmt.Writer(url_of(name)) for _ in range(2)]
    assert writers[0].publish_anchor({"w": torch.ones(3)}) == 0
    with pytest.raises(CommitConflictError):
        writers[1].publish_anchor({"w": torch.zeros(3)})
    check(name, {"w": torch.ones(3)}, 0)


@pytest.mark.parametrize("method", ["open_sink", "put_if_absent"])
@pytest.mark.parametrize("kept", [True, False])
def test_a_failure_before_the_commit_leaves_the_base_where_it_was(
    method: str, kept: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_memory(monkeypatch, kept)
    writer, tensors = begun(name)
    store = MemoryStore.named(name)
    tensors["a"][3] += 1
    before = dict(store.objects)
    with monkeypatch.context() as patch:
        patch.setattr(store, method, lambda *_: down())
        with pytest.raises(StoreError):
            writer.publish(tensors)
    # A create that fails may still arrive later, so its shard stays for gc.
    left = store.objects.keys() - before.keys()
    assert all(key.startswith("data/") and method == "put_if_absent" for key in left)
    tensors["a"][4] += 1
    assert writer.publish(tensors) == 1
    assert deltafmt.open(url_of(name)).manifest(1).changed == 2
    tensors["a"][4] += 1
    assert writer.publish(tensors) == 2
    assert deltafmt.open(url_of(name)).manifest(2).changed == 1
    check(name, tensors, 2)


def _without_memory(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    monkeypatch.setattr(pack, "CHANGES_BYTES", 0)
    if not kept:
        monkeypatch.setattr(pack, "KEPT_BYTES", 0)


def _lose_reply(store: MemoryStore, readable: bool, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The next create happens, but its reply does not arrive; then storage is readable, or not."""
    create, read = store.put_if_absent, store.read_all

    def lost(key: str, data: bytes) -> None:
        create(key, data)
        if not readable:
            monkeypatch.setattr(store, "read_all", lambda *_: down())
        down()

    monkeypatch.setattr(store, "put_if_absent", lost)

    def back() -> None:
        monkeypatch.setattr(store, "put_if_absent", create)
        monkeypatch.setattr(store, "read_all", read)

    return back


def test_a_lost_reply_is_settled_by_reading_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, tensors = begun(name)
    tensors["a"][3] += 1
    back = _lose_reply(MemoryStore.named(name), True, monkeypatch)
    assert writer.publish(tensors) == 1
    back()
    tensors["a"][4] += 1
    assert writer.publish(tensors) == 2
    assert deltafmt.open(url_of(name)).manifest(2).changed == 1
    check(name, tensors, 2)


@pytest.mark.parametrize("memory", [True, False])
def test_an_unknown_commit_that_landed(memory: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not memory:
        _without_memory(monkeypatch, kept=False)
    writer, tensors = begun(name)
    tensors["a"][3] += 1
    back = _lose_reply(MemoryStore.named(name), False, monkeypatch)
    with pytest.raises(CommitUnknownError):
        writer.publish(tensors)
    with pytest.raises(CommitUnknownError):
        writer.publish(tensors)
    back()
    tensors["a"][4] += 1
    assert writer.publish(tensors) == 2
    lineage = deltafmt.open(url_of(name))
    assert [lineage.manifest(v).changed for v in (1, 2)] == [1, 1]
    check(name, tensors, 2)


def test_an_unknown_commit_that_did_not_land(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, tensors = begun(name)
    store = MemoryStore.named(name)
    tensors["a"][3] += 1
    with monkeypatch.context() as patch:
        patch.setattr(store, "put_if_absent", lambda *_: down())
        patch.setattr(store, "read_all", lambda *_: down())
        with pytest.raises(CommitUnknownError):
            writer.publish(tensors)
    tensors["a"][4] += 1
    assert writer.publish(tensors) == 1
    assert deltafmt.open(url_of(name)).manifest(1).changed == 2
    check(name, tensors, 1)


def test_an_unknown_commit_whose_number_another_took(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, tensors = begun(name)
    store = MemoryStore.named(name)
    with monkeypatch.context() as patch:
        patch.setattr(store, "put_if_absent", lambda *_: down())
        patch.setattr(store, "read_all", lambda *_: down())
        with pytest.raises(CommitUnknownError):
            writer.publish(tensors)
    other = deltafmt.Writer(url_of(name))
    assert other.publish(tensors) == 1
    with pytest.raises(CommitConflictError):
        writer.publish(tensors)
    assert writer.resume() == 1
    assert writer.publish(tensors) == 2
    check(name, tensors, 2)


def test_an_unknown_anchor_that_landed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, tensors = begun(name)
    back = _lose_reply(MemoryStore.named(name), False, monkeypatch)
    with pytest.raises(CommitUnknownError):
        writer.publish_anchor(tensors)
    back()
    # The tensors have moved on, so the base has to be read.
    tensors["a"][4] += 1
    assert writer.publish(tensors) == 2
    assert deltafmt.open(url_of(name)).manifest(2).changed == 1
    check(name, tensors, 2)


@pytest.mark.parametrize("memory", [True, False])
def test_following_by_changes_by_chunks_and_by_reading_back(
    memory: bool, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_memory(monkeypatch, kept=memory)
    tensors = {"a": torch.randn(5000), "b": torch.randn(300, 20).bfloat16()}
    copy = deltafmt.SnapshotDetector()
    options = WriterOptions(domain_elements=1000)
    writer = deltafmt.Writer(str(tmp_path / "run"), detector=copy, options=options)
    writer.publish_anchor(tensors)
    for step in range(1, 4):
        tensors["a"][::step] *= 1.01
        tensors["b"][step] = 0
        writer.publish(tensors)
        for key, tensor in tensors.items():
            assert torch.equal(copy.tensors[key], tensor)
    lineage = deltafmt.open(str(tmp_path / "run"))
    assert torch.equal(lineage.read()["a"], tensors["a"])
    assert lineage.verify().ok


def test_async_takes_its_picture_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, tensors = begun(name)
    store = MemoryStore.named(name)
    import threading

    release = threading.Event()
    sink = store.open_sink

    def slow(key: str) -> Any:
        assert release.wait(30)
        return sink(key)

    monkeypatch.setattr(store, "open_sink", slow)
    tensors["a"] += 1
    expected = tensors["a"].clone()
    pending = writer.publish_async(tensors)
    tensors["a"] += 1
    assert not pending.done()
    release.set()
    assert pending.result(30) == 1
    assert torch.equal(deltafmt.open(url_of(name)).read(1)["a"], expected)
    again = writer.publish_async(tensors)
    third = writer.publish_async(tensors)
    assert (again.result(30), third.result(30)) == (2, 3)
    check(name, tensors, 3)
    writer.close()


def test_async_failures_surface(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, tensors = begun(name)
    store = MemoryStore.named(name)
    tensors["a"] += 1
    with monkeypatch.context() as patch:
        patch.setattr(store, "open_sink", lambda *_: down())
        pending = writer.publish_async(tensors)
        with pytest.raises(StoreError):
            pending.result(30)
        untold = writer.publish_async(tensors)
        with pytest.raises(StoreError):
            writer.publish(tensors)
    # What `result` has told is not told again.
    with pytest.raises(StoreError):
        untold.result(30)
    assert writer.publish(tensors) == 1
    check(name, tensors, 1)


def test_a_closed_writer_starts_anew(name: str) -> None:
    _, tensors = begun(name)
    copy = deltafmt.SnapshotDetector()
    with deltafmt.Writer(url_of(name), detector=copy) as writer:
        assert writer.resume() == writer.version == 0
        assert copy.nbytes == 4100
    assert writer.version is None
    assert copy.nbytes == 0
    tensors["a"][0] = 9
    assert writer.publish(tensors) == 1
    check(name, tensors, 1)


def test_an_interrupt_while_committing_keeps_what_may_have_landed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, tensors = begun(name)
    store = MemoryStore.named(name)
    create = store.put_if_absent

    def interrupted(key: str, data: bytes) -> None:
        create(key, data)
        raise KeyboardInterrupt

    tensors["a"][3] += 1
    with monkeypatch.context() as patch:
        patch.setattr(store, "put_if_absent", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.publish(tensors)
    check(name, tensors, 1)
    tensors["a"][4] += 1
    assert writer.publish(tensors) == 2
    assert deltafmt.open(url_of(name)).manifest(2).changed == 1
    check(name, tensors, 2)


def test_a_create_that_arrives_after_its_failure_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, tensors = begun(name)
    store = MemoryStore.named(name)
    late: dict[str, bytes] = {}

    def lost(key: str, data: bytes) -> None:
        late[key] = data
        down()

    tensors["a"][3] += 1
    with monkeypatch.context() as patch:
        patch.setattr(store, "put_if_absent", lost)
        with pytest.raises(StoreError):
            writer.publish(tensors)
    store.objects.update(late)
    check(name, tensors, 1)
    tensors["a"][4] += 1
    assert writer.publish(tensors) == 2
    check(name, tensors, 2)


def test_a_version_is_published_even_if_it_cannot_be_read_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_memory(monkeypatch, kept=False)
    writer, tensors = begun(name)
    store = MemoryStore.named(name)
    monkeypatch.setattr(store, "pause_seconds", 0, raising=False)
    tensors["a"][3] += 1
    with monkeypatch.context() as patch:
        patch.setattr(store, "read_range", lambda *_: down())
        assert writer.publish(tensors) == 1
    assert writer.version == 1
    tensors["a"][4] += 1
    assert writer.publish(tensors) == 2
    assert deltafmt.open(url_of(name)).manifest(2).changed == 1
    check(name, tensors, 2)


def test_an_anchor_that_fails_does_not_undo_its_version(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, tensors = begun(name, anchor_every=1)
    store = MemoryStore.named(name)
    sink = store.open_sink

    def only_versions(key: str) -> Any:
        return down() if key.startswith("ways-data") else sink(key)

    tensors["a"][3] += 1
    with monkeypatch.context() as patch:
        patch.setattr(store, "open_sink", only_versions)
        assert writer.publish(tensors) == 1
    tensors["a"][4] += 1
    assert writer.publish(tensors) == 2
    assert [info.ways for info in deltafmt.open(url_of(name)).log()] == [(None,), (0,), (1, None)]
    check(name, tensors, 2)


def test_resume_needs_no_second_try_after_an_unknown_commit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, tensors = begun(name)
    store = MemoryStore.named(name)
    with monkeypatch.context() as patch:
        patch.setattr(store, "put_if_absent", lambda *_: down())
        patch.setattr(store, "read_all", lambda *_: down())
        with pytest.raises(CommitUnknownError):
            writer.publish(tensors)
    deltafmt.Writer(url_of(name)).publish(tensors)
    assert writer.resume() == 1
    assert writer.publish(tensors) == 2
    check(name, tensors, 2)


@pytest.mark.parametrize("place", ["ending.leave_hint", "course.merged_digests"])
def test_an_interrupt_right_after_the_commit_is_no_conflict(
    name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, tensors = begun(name)
    tensors["a"][3] += 1

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"deltafmt.write.{place}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            writer.publish(tensors)
    tensors["a"][7] += 2
    assert writer.publish(tensors) == 2
    assert [info.changed for info in deltafmt.open(url_of(name)).log()] == [None, 1, 1]
    check(name, tensors, 2)
