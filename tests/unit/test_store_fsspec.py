"""The fsspec adapter: what is refused, what is repeated, what is never told, forks and listings."""

from __future__ import annotations

import errno
import os
import secrets
import traceback
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import assume, given
from hypothesis import strategies as st

from deltafmt import StoreError, UnsupportedError
from deltafmt.errors import DeltafmtError
from deltafmt.store import AlreadyExists, MemoryStore, Range, open_store, register_protocol
from deltafmt.store.fsspec import FsspecStore
from deltafmt.store.translate import public_url, translated
from deltafmt.testing.fsspec_stores import fsspec_store, locked_create


def root() -> str:
    return f"/{secrets.token_hex(8)}"


class Unlisted(MemoryFileSystem):  # type: ignore[misc]
    """A file system whose creates nobody has vouched for."""

    protocol = "unlisted"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("unlisted://").strip("/")


def test_a_back_end_without_exclusive_create_is_read_only() -> None:
    fsspec.register_implementation("unlisted", Unlisted, clobber=True)
    store = open_store(f"unlisted:/{root()}")
    store.put("versions/a", b"1")
    assert store.read("versions/a") == b"1"
    for refuse in (store.check_exclusive, lambda: store.put_if_absent("versions/b", b"1")):
        with pytest.raises(UnsupportedError, match="S3, GCS or Azure") as caught:
            refuse()
        assert caught.value.kind == "store-unsupported"
    assert list(store.list("versions")) == ["versions/a"]


@pytest.mark.parametrize("url", ["nonsense://x/y", "s3+nonsense://key:secret@x/y?token=secret"])
def test_an_unknown_protocol_is_unsupported(url: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        open_store(url)
    assert caught.value.kind == "store-unsupported"
    assert "secret" not in str(caught.value)


def test_a_host_that_does_not_answer_is_unreachable() -> None:
    with pytest.raises(StoreError) as caught:
        open_store("ftp://user:secret@localhost:1/run")
    assert caught.value.kind == "store-unreachable"
    assert "secret" not in str(caught.value)


def test_object_stores_are_known_for_their_conditional_put() -> None:
    s3fs = pytest.importorskip("s3fs")
    store = open_store("s3://bucket/run", {"key": "k", "secret": "hush", "use_listings_cache": True})
    assert isinstance(store, FsspecStore)
    store.check_exclusive()
    assert isinstance(store.fs, s3fs.S3FileSystem)
    assert store.root == "bucket/run"
    assert store.fs.dircache.use_listings_cache is False, "other machines write too"
    assert "hush" not in repr(store) + str(vars(store)["url"])


def test_urls_are_shown_without_credentials() -> None:
    for url, shown in {
        "s3://bucket/run": "s3://bucket/run",
        "https://user:pw@host:9/run?sig=abc&x=1": "https://host:9/run",
        "dir::ftp://user:p@w@host/run": "dir::ftp://host/run",
        "simplecache::https://u:p@a/x?t=1::s3://k:s@b/y": "simplecache::https://a/x::s3://b/y",
        "deltafmt://::s3://bucket/run": "deltafmt://::s3://bucket/run",
        "s3://bucket/run#1/a@b": "s3://bucket/run#1/a@b",
        "https://host/run#token=x": "https://host/run",
        "https://host?sig=a/b": "https://host",
        "ftp://user:p/w@host/run": "ftp://host/run",
        "ftp://user:p::w@host/run": "ftp://host/run",
        "ftp://user:p?w@host/run": "ftp://...",
        "https://host/run?to=a@b&sig=x": "https://...",
    }.items():
        assert public_url(url) == shown


@given(
    st.text(st.sampled_from("ab1/?#@:%=&+."), max_size=6),
    st.text(st.sampled_from("ab1/?#@:%=&+."), max_size=6),
)
def test_no_password_is_shown_whatever_it_consists_of(before: str, after: str) -> None:
    assume(not after.startswith("://"))  # a link of a chain, of a protocol that is called SECRET
    for url in (
        f"ftp://user:{before}SECRET{after}@host/run",
        f"zip://x::ftp://user:{before}SECRET{after}@host/run",
        f"https://host/run?{before}SECRET{after}",
        f"https://host?{before}SECRET{after}",
    ):
        assert "SECRET" not in public_url(url), url


class Flaky(MemoryFileSystem):  # type: ignore[misc]
    """fsspec's memory with failures to come: each call of a verb takes one from its list."""

    cachable = False
    plans: dict[str, list[Any]] = {}  # noqa: RUF012 (fsspec's instances share their class's state)

    def _fail(self, verb: str) -> Any:
        plan = self.plans.get(verb)
        outcome = plan.pop(0) if plan else None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        change = self._fail("cat_file")
        data: bytes = super().cat_file(path, start, end)
        return change(data) if change else data

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        lose_reply = self._fail("pipe_file")
        super().pipe_file(path, value)
        if lose_reply:
            raise lose_reply()

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self._fail("ls")
        return super().ls(path, detail, **options)

    def info(self, path: str, **options: Any) -> Any:
        self._fail("info")
        return super().info(path, **options)


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> tuple[FsspecStore, dict[str, list[Any]]]:
    plans: dict[str, list[Any]] = {}
    monkeypatch.setattr(Flaky, "plans", plans)
    store = FsspecStore(Flaky, root(), url="flaky://", create=locked_create)
    store.pause_seconds = 0.0
    return store, plans


FlakyStore = tuple[FsspecStore, dict[str, list[Any]]]
PASSING = [
    ConnectionResetError("reset"),
    TimeoutError("late"),
    type("ClientPayloadError", (Exception,), {})("cut"),
    type("HttpError", (Exception,), {"code": 503})("busy"),
    type("ClientError", (Exception,), {"response": {"ResponseMetadata": {"HTTPStatusCode": 503}}})("slow"),
]
LASTING = [PermissionError(errno.EACCES, "no"), ValueError("what"), OSError(errno.ENOSPC, "full")]


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
def test_passing_failures_are_tried_again(flaky: FlakyStore, error: Exception) -> None:
    store, plans = flaky
    for verb in ("cat_file", "pipe_file", "ls", "info"):
        plans[verb] = [error, error]
    store.put("versions/a", b"0123456789")
    assert store.read("versions/a", limit=10) == b"0123456789"
    plans["cat_file"] = [error, error]
    assert bytes(next(store.read_ranges([Range("versions/a", 9, 10)]))) == b"9"
    assert list(store.list("versions")) == ["versions/a"]
    assert not any(plans.values())


@pytest.mark.parametrize("error", LASTING, ids=lambda error: type(error).__name__)
def test_lasting_failures_are_not(flaky: FlakyStore, error: Exception) -> None:
    store, plans = flaky
    store.put("a", b"1")
    plans["cat_file"] = [error, AssertionError("tried again")]
    with pytest.raises(StoreError) as caught:
        store.read("a")
    assert caught.value.kind == "store-failed"
    assert caught.value.__cause__ is error
    plans["pipe_file"] = [error]
    with pytest.raises(StoreError) as caught:
        store.put("b", b"1")
    assert getattr(caught.value.__cause__, "errno", None) == getattr(error, "errno", None)
    assert not store.exists("b")


def test_a_create_is_tried_only_once(flaky: FlakyStore) -> None:
    store, plans = flaky
    plans["pipe_file"] = [lambda: ConnectionResetError("reply lost")]
    with pytest.raises(StoreError) as caught:
        store.put_if_absent("versions/a", b"mine")
    assert caught.value.kind == "store-unreachable", "whether it is there, only reading back can tell"
    assert store.read("versions/a") == b"mine"


@pytest.mark.parametrize(
    "error",
    [
        FileExistsError("x"),
        type("ClientError", (Exception,), {"response": {"ResponseMetadata": {"HTTPStatusCode": 412}}})("no"),
        type("HttpError", (Exception,), {"code": 412})("no"),
        type("ResourceExistsError", (Exception,), {"status_code": 409})("no"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_conflict_is_known_in_every_dialect(error: Exception) -> None:
    found: list[DeltafmtError] = [translated(error, "k")]
    try:
        # s3fs gives some servers' answers as EINVAL, with the client's error underneath.
        raise OSError(errno.EINVAL, "invalid") from error
    except OSError as wrapped:
        found.append(translated(wrapped, "k"))
    assert all(isinstance(each, AlreadyExists) for each in found)


def test_the_text_of_a_back_end_is_not_passed_on(flaky: FlakyStore) -> None:
    store, plans = flaky
    plans["cat_file"] = [PermissionError("https://key:hush@host/?sig=hush")]
    with pytest.raises(StoreError) as caught:
        store.read("a")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://user:hu%2Fsh@bucket/run", {}),
        ("s3://bucket/run", {"endpoint_url": "http://user:hu/sh@127.0.0.1:1"}),
        ("s3://bucket/run", {"endpoint_url": "http://127.0.0.1:1/?X-Amz-Signature=hu/sh"}),
        ("s3://bucket/hu/sh", {"client_kwargs": {"aws_session_token": "hu/sh"}}),
    ],
)
def test_tracebacks_hold_no_credentials(
    url: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drivers put URLs into their errors; a traceback ends up in a log."""
    pytest.importorskip("s3fs")
    monkeypatch.setattr(FsspecStore, "budget_seconds", 0.0)
    options = {"key": "k", "secret": "s" * 40, "endpoint_url": "http://127.0.0.1:1"} | options
    with pytest.raises(StoreError) as caught:
        open_store(url, options).read("a")
    shown = "".join(traceback.format_exception(caught.value))
    told = shown.replace(url, "")  # the call above
    assert "hu/sh" not in told
    assert "hu%2Fsh" not in told
    assert "not shown" in told


def test_causes_without_secrets_are_kept(flaky: FlakyStore) -> None:
    store, plans = flaky
    error = PermissionError("the disk is locked")
    plans["cat_file"] = [error]
    with pytest.raises(StoreError) as caught:
        store.read("a")
    assert caught.value.__cause__ is error


def test_ends_are_exclusive_and_lengths_are_checked(flaky: FlakyStore) -> None:
    store, plans = flaky
    store.put("a", b"0123456789")
    plans["cat_file"] = [lambda data: data + b"!", lambda data: data + b"!"]
    with pytest.raises(StoreError) as caught:
        list(store.read_ranges([Range("a", 2, 5)]))
    assert caught.value.kind == "short-read"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_gets_a_file_system_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def make() -> Any:
        made.append(1)
        return fsspec.filesystem("memory")

    store = FsspecStore(make, root(), url="forked://", create=None)
    first = store.fs
    assert store.fs is first
    assert len(made) == 1
    # As a child sees it: another process number, the parent's instance.
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert store.fs is not None
    assert len(made) == 2


def test_big_objects_go_through_a_sink_in_parts(tmp_path: Any) -> None:
    store = fsspec_store("file", str(tmp_path / "root"))
    sink = store.open_sink("data/a")
    for number in range(50):
        sink.write(bytes([number]) * 200_000)
    sink.close()
    assert store.size("data/a") == 10_000_000
    assert bytes(next(store.read_ranges([Range("data/a", 399_999, 400_001)]))) == b"\1\2"


def test_a_back_end_of_ones_own_is_reached_by_its_url() -> None:
    asked: list[tuple[str, Any]] = []
    mine = MemoryStore("mine")

    def opener(rest: str, options: Any) -> MemoryStore:
        asked.append((rest, dict(options)))
        return mine

    register_protocol("my-store", opener)
    assert open_store("my-store://a/b", {"x": 1}) is mine
    assert asked == [("a/b", {"x": 1})]
