"""The local store: what it writes in which order, full disks, links, racing processes."""

from __future__ import annotations

import errno
import multiprocessing
import os
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from deltafmt import StoreError, UnsupportedError
from deltafmt.store import AlreadyExists, LocalStore, MemoryStore, Range, local, open_store


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


def files(store: LocalStore) -> set[str]:
    return {str(path.relative_to(store.root)) for path in store.root.rglob("*") if path.is_file()}


def test_a_plain_path_is_literal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a b", "100%", "~", "x:y", "#1", "*?[a]", "mémoire"):
        open_store(name).put("k", b"1")
        assert (tmp_path / name / "k").read_bytes() == b"1"
    monkeypatch.chdir("/")
    assert open_store(str(tmp_path / "100%")).read("k") == b"1"
    assert open_store(f"file://{tmp_path}/100%").read("k") == b"1"


def test_a_root_may_be_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    store = LocalStore(tmp_path / "link")
    store.put("files/a", b"1")
    assert (tmp_path / "real/files/a").read_bytes() == b"1"
    assert list(store.list("files")) == ["files/a"]


def test_a_memory_root_is_shared_by_name() -> None:
    open_store("memory://shared/by").put("k", b"1")
    assert open_store("memory://shared/by").read("k") == b"1"
    assert not open_store("memory://shared").exists("k")
    assert not MemoryStore("shared/by").exists("k"), "one made by hand is one's own"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """System calls that make bytes durable or visible, with the kind of what they are about."""
    log: list[tuple[str, str]] = []
    real = {name: getattr(os, name) for name in ("fsync", "link", "replace", "unlink")}

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        log.append(("fsync", "folder" if path.is_dir() else "file"))
        real["fsync"](descriptor)

    def named(name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> None:
            log.append((name, Path(arguments[-1]).name))
            real[name](*arguments, **options)

        return call

    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("link", "replace"):
        monkeypatch.setattr(os, name, named(name))
    return log


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to name descriptors")
def test_bytes_are_durable_before_they_are_seen(store: LocalStore, calls: list[tuple[str, str]]) -> None:
    store.put("a", b"1")
    calls.clear()
    store.put_if_absent("m", b"1")
    assert calls == [("fsync", "file"), ("link", "m"), ("fsync", "folder")]
    calls.clear()
    store.put("b", b"1")
    assert calls == [("fsync", "file"), ("replace", "b"), ("fsync", "folder")]
    calls.clear()
    sink = store.open_sink("c")
    sink.write(b"1")
    assert calls == []
    sink.close()
    assert calls == [("fsync", "file"), ("fsync", "folder")]
    calls.clear()
    store.put("deep/er/d", b"1")
    made, rest = calls[:2], calls[2:]
    assert made == [("fsync", "folder")] * 2, "the folders' own names are durable too"
    assert rest == [("fsync", "file"), ("replace", "d"), ("fsync", "folder")]


@pytest.mark.parametrize("failing", ["fsync", "link"])
@pytest.mark.parametrize("verb", ["put", "put_if_absent"])
def test_a_full_disk_leaves_nothing_and_says_so(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, failing: str, verb: str
) -> None:
    store.put("there", b"1")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if (verb, failing) == ("put", "link"):
        failing = "replace"
    with monkeypatch.context() as patch:
        patch.setattr(os, failing, full)
        with pytest.raises(StoreError, match="No space left") as caught:
            getattr(store, verb)("new", b"2")
    assert caught.value.kind == "store-failed"
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert files(store) == {"there"}
    getattr(store, verb)("new", b"2")
    assert store.read("new") == b"2"


def test_a_sink_that_cannot_be_flushed_is_taken_back(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = store.open_sink("data/a")
    sink.write(b"1")

    def full(*_: Any) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreError):
            sink.close()
    sink.abort()
    assert files(store) == set()


def test_a_file_system_without_hard_links_is_refused_by_name(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(UnsupportedError, match="hard links") as caught:
        store.put_if_absent("a", b"1")
    assert caught.value.kind == "store-unsupported"
    assert files(store) == set()


def test_a_stale_handle_of_a_network_file_system_is_tried_again(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a", b"0123456789")
    store.pause_seconds = 0.0
    real, times = os.preadv, iter(range(100))

    def stale(*arguments: Any) -> int:
        if next(times) < 2:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", stale)
    assert bytes(next(store.read_ranges([Range("a", 3, 5)]))) == b"34"


def test_reads_that_the_kernel_cuts_are_put_together(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a", b"0123456789")
    real = os.preadv

    def cut(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return real(descriptor, [buffers[0][:3]], offset)

    monkeypatch.setattr(os, "preadv", cut)
    assert bytes(next(store.read_ranges([Range("a", 1, 9)]))) == b"12345678"


def test_unfinished_files_are_not_listed(store: LocalStore) -> None:
    store.put("versions/a", b"1")
    (store.root / "versions/.a.tmp").write_bytes(b"2")
    (store.root / "versions/folder").mkdir()
    (store.root / "versions/link").symlink_to("a")
    assert list(store.list("versions")) == ["versions/a"]


def test_unfinished_files_are_remnants(store: LocalStore) -> None:
    store.put("versions/1.dfm", b"1")
    left = store.root / "versions" / ".2.dfm.0123456789abcdef"
    left.write_bytes(b"12")
    foreign = store.root / "versions" / ".2.dfm"
    foreign.write_bytes(b"123")
    (store.root / "outside").symlink_to(store.root.parent)
    assert [(r.key, r.size) for r in store.remnants()] == [("versions/.2.dfm.0123456789abcdef", 2)]
    assert [entry.key for entry in store.entries("versions")] == ["versions/1.dfm"]
    store.discard(list(store.remnants()))
    assert not left.exists()
    assert foreign.exists()


def test_folders_go_with_their_last_object(store: LocalStore) -> None:
    for key in ("data/1/a/0", "data/1/b/0", "data/2/a/0"):
        store.put(key, b"")
    store.delete(["data/1/a/0", "data/2/a/0"])
    assert [path.name for path in (store.root / "data").iterdir()] == ["1"]
    store.delete(["data/1/b/0"])
    assert list(store.root.iterdir()) == []
    store.put("data/1/a/0", b"1")
    assert store.read("data/1/a/0") == b"1"


def test_a_folder_may_be_removed_while_a_file_is_made_in_it(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector takes folders away as soon as they are empty, also those just made."""
    make = local._make_folder
    removed: list[Path] = []

    def make_and_lose(folder: Path) -> None:
        make(folder)
        if folder.name in ("1", "2", "3") and removed.count(folder) < 3:
            removed.append(folder)
            folder.rmdir()

    monkeypatch.setattr(local, "_make_folder", make_and_lose)
    store.put("ways/1/a", b"1")
    store.put_if_absent("ways/2/a", b"1")
    sink = store.open_sink("ways/3/a")
    sink.close()
    assert [entry.key for entry in store.entries("ways")] == ["ways/1/a", "ways/2/a", "ways/3/a"]


def test_no_descriptor_is_kept(store: LocalStore) -> None:
    folder = Path("/proc/self/fd")
    if not folder.exists():
        pytest.skip("needs /proc to count descriptors")
    store.put("data/a", bytes(100))
    before = len(list(folder.iterdir()))
    for number in range(20):
        store.put_if_absent(f"versions/{number}", b"1")
        list(store.read_ranges([Range("data/a", number, 50), Range("data/a", 0, 9)]))
        list(store.list("versions"))
    assert len(list(folder.iterdir())) == before


def race(root: str, racer: int, rounds: int, barrier: Barrier, results: Any) -> None:
    """Create one object after another at the same time as others; report the rounds won."""
    store = LocalStore(root)
    won = []
    for number in range(rounds):
        barrier.wait()
        try:
            store.put_if_absent(f"versions/{number}", bytes([racer]) * 5000)
        except AlreadyExists:
            continue
        won.append(number)
    results.put((racer, won))


@pytest.mark.parametrize("racers", [2, 4])
def test_of_racing_processes_one_wins_each_round(tmp_path: Path, racers: int) -> None:
    rounds = 40
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(racers), context.Queue()
    arguments = [(str(tmp_path), racer, rounds, barrier, results) for racer in range(racers)]
    processes = [context.Process(target=race, args=each) for each in arguments]
    for process in processes:
        process.start()
    winners: dict[int, list[int]] = {number: [] for number in range(rounds)}
    for _ in processes:
        racer, won = results.get(timeout=120)
        for number in won:
            winners[number].append(racer)
    for process in processes:
        process.join()
        assert process.exitcode == 0
    store = LocalStore(tmp_path)
    for number, won in winners.items():
        assert len(won) == 1, f"round {number} was won by {won}"
        assert store.read(f"versions/{number}") == bytes(won) * 5000
    assert len(files(store)) == rounds, "losers leave nothing behind"
