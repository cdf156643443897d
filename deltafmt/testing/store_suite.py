"""The promises of a store as tests; subclass `StoreSuite`, give it a `store`, and run pytest."""

from __future__ import annotations

import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltafmt.errors import FormatError, NotFoundError, StoreError
from deltafmt.store import AlreadyExists, Range, Store

UNSAFE_KEYS = (
    "",
    ".",
    "..",
    "../x",
    "a/../../x",
    "a/./x",
    "a//x",
    "a/",
    "/etc/passwd",
    "s3://other/x",
    "file:///etc/passwd",
    "C:\\x",
    "..\\x",
    "%2e%2e/x",
    "x\0y",
    "x\ny",
)
"""Names that no store may open, list, write or delete."""


class StoreSuite:
    """Tests that every store must pass.

    A subclass provides a fixture `store`: an empty store, a new one for each test. Names the tests write are
    all below `versions/`, `data/` and `files/`.
    """

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError("a subclass provides the store under test")

    def test_what_was_put_is_read_back_whole(self, store: Store) -> None:
        for number, data in enumerate((b"", b"x", secrets.token_bytes(100_003))):
            key = f"files/{number}"
            store.put(key, data)
            assert store.read(key) == data
            assert store.read(key, limit=len(data)) == data
            assert store.size(key) == len(data)
            assert store.exists(key)

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_any_buffer_is_written_and_not_kept(self, store: Store, kind: type) -> None:
        source = bytearray(b"abc")
        data = kind(source)
        store.put("files/a", data)
        store.put_if_absent("files/b", data)
        sink = store.open_sink("files/c")
        sink.write(data)
        source[:] = b"xyz"
        if kind is bytearray:
            data[:] = b"xyz"
        sink.close()
        assert [store.read(f"files/{name}") for name in "abc"] == [b"abc"] * 3

    def test_an_equal_object_may_be_put_again(self, store: Store) -> None:
        store.put("files/a", b"same")
        store.put("files/a", b"same")
        assert store.read("files/a") == b"same"

    def test_what_is_absent_is_not_found(self, store: Store) -> None:
        store.put("files/there", b"1")
        for key in ("files/gone", "files/there/below", "files", "nowhere/at/all"):
            assert not store.exists(key)
            for call in (store.read, store.size, lambda key: next(store.read_ranges([Range(key, 0, 1)]))):
                with pytest.raises(NotFoundError) as caught:
                    call(key)
                assert caught.value.kind == "object-missing"
                assert key in str(caught.value)

    def test_an_object_over_the_limit_is_refused(self, store: Store) -> None:
        store.put("files/a", bytes(11))
        with pytest.raises(StoreError) as caught:
            store.read("files/a", limit=10)
        assert caught.value.kind == "object-too-large"

    def test_ranges_come_in_the_order_asked(self, store: Store) -> None:
        first, second = secrets.token_bytes(300_000), secrets.token_bytes(70_000)
        store.put("data/a", first)
        store.put("data/b", second)
        wanted = [
            Range("data/a", 0, len(first)),
            Range("data/b", 69_999, 70_000),
            Range("data/a", 10, 10),
            Range("data/a", 5, 17),
            Range("data/a", 18, 20),
            Range("data/a", 200_000, 300_000),
            Range("data/a", 3, 4),
            Range("data/b", 0, 1),
            Range("data/b", 70_000, 70_000),
        ]
        whole = {"data/a": first, "data/b": second}
        for ahead in (1, 1 << 20):
            found = [bytes(view) for view in store.read_ranges(wanted, ahead_bytes=ahead)]
            assert found == [whole[r.key][r.start : r.stop] for r in wanted]
        assert list(store.read_ranges([])) == []

    def test_many_ranges_from_several_threads(self, store: Store) -> None:
        data = secrets.token_bytes(200_000)
        store.put("data/a", data)
        wanted = [Range("data/a", start, start + 97) for start in range(0, 190_000, 1_900)]

        def read(_: int) -> list[bytes]:
            return [bytes(view) for view in store.read_ranges(wanted)]

        with ThreadPoolExecutor(4) as pool:
            for found in pool.map(read, range(4)):
                assert found == [data[r.start : r.stop] for r in wanted]

    @pytest.mark.parametrize(("start", "stop"), [(0, 11), (9, 12), (10, 11), (500, 600)])
    def test_a_range_beyond_the_end_is_a_short_read(self, store: Store, start: int, stop: int) -> None:
        store.put("data/a", b"0123456789")
        with pytest.raises(StoreError) as caught:
            list(store.read_ranges([Range("data/a", start, stop)]))
        assert caught.value.kind == "short-read"
        assert "data/a" in str(caught.value)
        assert f"[{start}, {stop})" in str(caught.value)

    def test_ranges_may_be_left_unread(self, store: Store) -> None:
        store.put("data/a", bytes(100))
        views = store.read_ranges([Range("data/a", 0, 1), Range("data/a", 99, 100), Range("data/b", 0, 1)])
        assert bytes(next(views)) == b"\0"
        del views

    def test_a_create_succeeds_once(self, store: Store) -> None:
        store.put_if_absent("versions/1", b"mine")
        with pytest.raises(AlreadyExists) as caught:
            store.put_if_absent("versions/1", b"theirs")
        assert caught.value.kind == "already-exists"
        assert store.read("versions/1") == b"mine"
        store.check_exclusive()

    def test_a_probe_accepts_it_and_leaves_nothing(self, store: Store) -> None:
        store.put("files/a", b"as it was")
        store.probe_exclusive()
        store.probe_exclusive("files/a")
        assert store.read("files/a") == b"as it was"
        assert list(store.list("probes")) == []

    def test_a_create_that_met_its_own_object_succeeded(self, store: Store) -> None:
        store.put_if_absent("versions/1", b"mine, of an earlier try")
        store.create("versions/1", b"mine, of an earlier try")
        store.create("versions/2", b"mine")
        with pytest.raises(AlreadyExists):
            store.create("versions/2", b"another one's")
        assert store.read("versions/2") == b"mine"

    def test_of_racing_creates_one_wins(self, store: Store) -> None:
        keys = [f"versions/{number}" for number in range(10)]
        barriers = {key: threading.Barrier(4) for key in keys}
        # All rounds at once: servers that lock an object may let a second one wait for a while.
        with ThreadPoolExecutor(4 * len(keys)) as pool:
            racers = {
                key: [pool.submit(_race, store, key, racer, barriers[key]) for racer in range(4)]
                for key in keys
            }
        for key in keys:
            won = [racer for racer, future in enumerate(racers[key]) if future.result()]
            assert len(won) == 1
            assert store.read(key) == bytes(won) * 1000

    def test_a_create_is_never_seen_in_part(self, store: Store) -> None:
        data, stop = secrets.token_bytes(1 << 20), threading.Event()
        seen: list[bool] = []

        def watch() -> None:
            while not stop.is_set():
                if any(key == "versions/1" for key in store.list("versions")):
                    seen.append(store.read("versions/1") == data)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            store.put_if_absent("versions/1", data)
            assert store.read("versions/1") == data
        finally:
            stop.set()
            watcher.join()
        assert all(seen)

    def test_a_sink_makes_one_object_of_its_pieces(self, store: Store) -> None:
        sink = store.open_sink("data/1/a")
        pieces = [secrets.token_bytes(n) for n in (0, 1, 70_000, 5)]
        for piece in pieces:
            sink.write(piece)
        sink.close()
        assert store.read("data/1/a") == b"".join(pieces)
        empty = store.open_sink("data/1/b")
        empty.close()
        assert store.size("data/1/b") == 0

    def test_a_large_object_goes_through_a_sink(self, store: Store) -> None:
        """Larger than any one request: drivers send it in parts."""
        sink = store.open_sink("data/1/a")
        pieces = [bytes([number]) * (3 << 20) for number in range(8)]
        for piece in pieces:
            sink.write(piece)
        sink.close()
        assert store.size("data/1/a") == 24 << 20
        middle = (3 << 20) - 2
        wanted = [Range("data/1/a", middle, middle + 4), Range("data/1/a", (24 << 20) - 1, 24 << 20)]
        assert [bytes(view) for view in store.read_ranges(wanted)] == [b"\0\0\1\1", b"\7"]

    def test_an_aborted_sink_leaves_no_object(self, store: Store) -> None:
        for size in (0, 3, 3 << 20, 20 << 20):
            sink = store.open_sink("data/1/a")
            sink.write(bytes(size))
            sink.abort()
            del sink
            assert not store.exists("data/1/a")
            assert list(store.list("data/1")) == []

    def test_a_listing_names_the_objects_of_one_folder(self, store: Store) -> None:
        for key in ("versions/b", "versions/a", "versions/deep/c", "versionsx/d", "files/e"):
            store.put(key, b"1")
        assert list(store.list("versions")) == ["versions/a", "versions/b"]
        assert list(store.list("versions/deep")) == ["versions/deep/c"]
        assert list(store.list("nowhere")) == []
        assert list(store.list("files/e")) == [], "an object is no folder"

    def test_a_listing_begins_behind_a_key(self, store: Store) -> None:
        keys = [f"versions/{number:03d}" for number in range(0, 20, 2)]
        for key in keys:
            store.put(key, b"1")
        for after, count in (("versions/000", 9), ("versions/007", 6), ("versions/018", 0)):
            assert list(store.list("versions", after=after)) == keys[10 - count :]
        assert list(store.list("versions", after=None)) == keys
        assert list(store.list("nowhere", after="nowhere/1")) == []

    def test_a_listing_is_never_old(self, store: Store) -> None:
        for number in range(3):
            assert len(list(store.list("versions"))) == number
            key = f"versions/{number}"
            assert not store.exists(key)
            store.put_if_absent(key, b"1")
            assert store.exists(key)

    def test_entries_are_all_objects_below_a_folder_with_size_and_time(self, store: Store) -> None:
        sizes = {"data/1/b/00000.dfs": 3, "data/1/a/00000.dfs": 0, "data/2": 5, "data/10/x": 1}
        for key, size in sizes.items():
            store.put(key, bytes(size))
        sink = store.open_sink("data/2x")
        sink.write(b"12")
        sink.close()
        store.put_if_absent("datax/1", b"1")
        found = list(store.entries("data"))
        assert [(entry.key, entry.size) for entry in found] == sorted((sizes | {"data/2x": 2}).items())
        assert [entry.key for entry in store.entries("data/1")] == [
            "data/1/a/00000.dfs",
            "data/1/b/00000.dfs",
        ]
        assert list(store.entries("nowhere")) == []
        assert list(store.entries("data/2")) == [], "an object is no folder"
        times = [entry.modified for entry in found]
        # The clock is the storage's own, but one object can be no day older than another.
        assert max(times) - min(times) < 86_400
        assert min(times) > 1_600_000_000

    def test_writing_again_makes_an_object_new(self, store: Store) -> None:
        store.put("files/a", b"1")
        first = next(iter(store.entries("files"))).modified
        time.sleep(1.1)
        store.put("files/a", b"1")
        assert next(iter(store.entries("files"))).modified > first

    def test_remnants_are_no_objects_and_can_be_removed(self, store: Store) -> None:
        store.put("files/a", b"1")
        keys = {remnant.key for remnant in store.remnants()}
        assert not keys & {"files/a"}
        store.discard(list(store.remnants()))
        assert store.read("files/a") == b"1"

    def test_the_deleted_is_gone_and_the_absent_no_error(self, store: Store) -> None:
        for key in ("files/a", "files/b", "files/c"):
            store.put(key, b"1")
        store.delete(["files/a", "files/missing", "files/c"])
        assert list(store.list("files")) == ["files/b"]
        store.delete([])
        store.put_if_absent("files/a", b"2")
        assert store.read("files/a") == b"2"

    @pytest.mark.parametrize("key", UNSAFE_KEYS)
    def test_a_name_that_leaves_the_root_is_refused(self, store: Store, key: str) -> None:
        calls = (
            lambda: store.read(key),
            lambda: store.read(key, limit=10),
            lambda: list(store.read_ranges([Range(key, 0, 1)])),
            lambda: store.size(key),
            lambda: store.exists(key),
            lambda: store.put(key, b"1"),
            lambda: store.put_if_absent(key, b"1"),
            lambda: store.open_sink(key),
            lambda: list(store.list(key)),
            lambda: list(store.entries(key)),
            lambda: store.delete([key]),
        )
        for call in calls:
            with pytest.raises((FormatError, StoreError)) as caught:
                call()
            assert caught.value.kind == "key-unsafe"

    def test_it_names_itself(self, store: Store) -> None:
        assert store.url
        assert store.url in repr(store)


def _race(store: Store, key: str, racer: int, barrier: threading.Barrier) -> bool:
    """Whether this racer created the object."""
    barrier.wait()
    try:
        store.put_if_absent(key, bytes([racer]) * 1000)
    except AlreadyExists:
        return False
    return True
