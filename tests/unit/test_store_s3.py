"""S3 through s3fs: what a server is asked, what is refused, what survives, and what is never told."""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import botocore.exceptions
import pytest
import torch
from aiobotocore.client import AioBaseClient

import deltafmt
from deltafmt import StoreError, UnsupportedError
from deltafmt.store import AlreadyExists, Range, open_store, s3
from deltafmt.store.s3 import PART_BYTES, S3Store
from deltafmt.testing.servers import JuiceServer, MotoServer, SeaweedServer, Server, free_ports


def opened(server: Server, **options: Any) -> S3Store:
    store = open_store(server.url(), {**server.storage_options, **options})
    assert isinstance(store, S3Store)
    return store


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the requests that are made."""
    made: list[str] = []
    call = AioBaseClient._make_api_call

    async def counted(self: Any, operation_name: str, arguments: Any) -> Any:
        made.append(operation_name)
        return await call(self, operation_name, arguments)

    monkeypatch.setattr(AioBaseClient, "_make_api_call", counted)
    return made


def test_a_server_that_ignores_the_condition_is_refused_for_writing(juice: JuiceServer) -> None:
    url, options = juice.url(), juice.storage_options
    schema = deltafmt.Schema.of({"w": torch.zeros(3)})
    writer = deltafmt.Writer(url, storage_options=options)
    for refuse in (
        lambda: deltafmt.create(url, schema, storage_options=options),
        lambda: writer.publish_anchor({"w": torch.zeros(3)}),
    ):
        with pytest.raises(UnsupportedError, match="If-None-Match") as caught:
            refuse()
        assert caught.value.kind == "create-not-exclusive"
        assert juice.endpoint in str(caught.value)
        assert juice.secret not in str(caught.value)
    assert list(open_store(url, options).entries("probes")) == []
    assert juice.filesystem().find(url) == [], "nothing is left where nothing can be published"


def test_a_root_that_was_moved_to_such_a_server_can_be_read_only(
    moto: MotoServer, juice: JuiceServer
) -> None:
    model = {"w": torch.arange(6.0)}
    url, options = moto.url(), moto.storage_options
    writer = deltafmt.Writer(url, storage_options=options)
    writer.publish_anchor(model)
    fs, other = moto.filesystem(), juice.filesystem()
    for path in fs.find(url):
        other.pipe_file(path, fs.cat_file(path))
    lineage = deltafmt.open(url, storage_options=juice.storage_options)
    assert torch.equal(lineage.read()["w"], model["w"])
    before = {path: other.cat_file(path) for path in other.find(url)}
    with pytest.raises(UnsupportedError) as caught:
        deltafmt.Writer(url, storage_options=juice.storage_options)
    assert caught.value.kind == "create-not-exclusive"
    assert {path: other.cat_file(path) for path in other.find(url)} == before


def test_opening_a_writer_costs_one_put(moto: MotoServer, asked: list[str]) -> None:
    url, options = moto.url(), moto.storage_options
    deltafmt.Writer(url, storage_options=options).publish_anchor({"w": torch.zeros(3)})
    asked.clear()
    deltafmt.Writer(url, storage_options=options)
    assert asked.count("PutObject") == 1


def test_each_call_is_one_request(moto: MotoServer, asked: list[str]) -> None:
    store = opened(moto)
    for action, requests in (
        (lambda: store.put("files/a", b"1234"), ["PutObject"]),
        (lambda: store.put_if_absent("files/b", bytes(2 << 20)), ["PutObject"]),
        (lambda: store.read("files/a"), ["GetObject"]),
        (lambda: store.size("files/a"), ["HeadObject"]),
        (lambda: store.exists("files/missing"), ["HeadObject"]),
        (lambda: next(store.read_ranges([Range("files/a", 1, 2)])), ["GetObject"]),
        (lambda: list(store.list("files")), ["ListObjectsV2"]),
        (lambda: list(store.list("missing")), ["ListObjectsV2"]),
        (lambda: store.delete(f"files/{n}" for n in range(900)), ["DeleteObjects"]),
    ):
        asked.clear()
        action()
        assert asked == requests


def test_listings_longer_than_a_page(moto: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "_PAGE", 10)
    store = opened(moto)
    names = [f"versions/{number:04d}" for number in range(25)]
    for name in names:
        store.put(name, b"")
    assert list(store.list("versions")) == names
    assert list(store.list("versions", after=names[3])) == names[4:]
    assert [entry.key for entry in store.entries("versions")] == names
    store.delete(names)
    assert list(store.list("versions")) == []


def test_a_missing_bucket_is_named(moto: MotoServer) -> None:
    store = open_store("s3://nobody-made-this/run", moto.storage_options)
    with pytest.raises(StoreError, match="bucket does not exist"):
        store.put("files/a", b"1")
    with pytest.raises(StoreError, match="bucket does not exist"):
        deltafmt.open("s3://nobody-made-this/run", storage_options=moto.storage_options)


def test_wrong_credentials_are_no_reason_to_wait(seaweed: SeaweedServer) -> None:
    options = {**seaweed.storage_options, "secret": "not-the-secret"}
    store = open_store(seaweed.url(), options)
    with pytest.raises(StoreError, match="credentials") as caught:
        store.put("files/a", b"1")
    assert caught.value.kind == "store-failed"
    for text in (repr(store), str(caught.value), repr(caught.value)):
        assert "not-the-secret" not in text
        assert seaweed.key not in text


class Refuses:
    """s3fs's calls, of which the first ones of a method fail as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: S3Store) -> None:
        self.plan: dict[str, list[Exception | Callable[[], Exception]]] = {}
        self.calls: list[str] = []
        call = store.fs.call_s3

        def refusing(method: str, **arguments: Any) -> Any:
            self.calls.append(method)
            failures = self.plan.get(method, [])
            failure = failures.pop(0) if failures else None
            if isinstance(failure, Exception):
                raise failure
            result = call(method, **arguments)
            if failure is not None:
                raise failure()
            return result

        monkeypatch.setattr(store.fs, "call_s3", refusing)
        monkeypatch.setattr(store, "pause_seconds", 0.0)


def answer(status: int, code: str) -> Exception:
    """What s3fs makes of an error that a server answers with."""
    cause = botocore.exceptions.ClientError(
        {"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": {"HTTPStatusCode": status}},
        "PutObject",
    )
    error = OSError(5, "m")
    error.__cause__ = cause
    return error


def test_a_conflict_under_way_is_waited_for(moto: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(moto, use_ssl=False)
    refuses = Refuses(monkeypatch, store)
    refuses.plan["put_object"] = [answer(409, "ConditionalRequestConflict")] * 2
    store.put_if_absent("versions/1", b"mine")
    assert store.read("versions/1") == b"mine"
    refuses.plan["put_object"] = [answer(409, "ConditionalRequestConflict")]
    with pytest.raises(AlreadyExists):
        store.put_if_absent("versions/1", b"theirs")
    refuses.plan["put_object"] = [answer(409, "ConditionalRequestConflict")] * 100
    with pytest.raises(StoreError) as caught:
        store.put_if_absent("versions/2", b"mine")
    assert caught.value.kind == "store-busy", "the number is still free: no conflict"
    assert not store.exists("versions/2")


def test_a_create_whose_reply_is_lost_is_ours(moto: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(moto, use_ssl=False)
    refuses = Refuses(monkeypatch, store)
    refuses.plan["put_object"] = [lambda: ConnectionResetError("the reply is lost")]
    with pytest.raises(StoreError) as caught:
        store.put_if_absent("versions/1", b"mine")
    assert caught.value.kind == "store-unreachable"
    assert refuses.calls.count("put_object") == 1, "only the caller can tell what a second try would meet"
    refuses.plan["put_object"] = [lambda: ConnectionResetError("the reply is lost")]
    store.create("versions/2", b"mine as well")
    assert store.read("versions/2") == b"mine as well"


def test_parts_are_sent_again_and_a_lost_completion_is_settled(
    moto: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(moto, use_ssl=False)
    refuses = Refuses(monkeypatch, store)
    data = secrets.token_bytes(2 * PART_BYTES + 5)
    refuses.plan["upload_part"] = [answer(503, "SlowDown"), lambda: ConnectionResetError("lost")]
    refuses.plan["complete_multipart_upload"] = [lambda: ConnectionResetError("lost")]
    sink = store.open_sink("data/a")
    sink.write(data)
    sink.close()
    assert refuses.calls.count("upload_part") == 5
    assert store.read("data/a") == data


def test_a_failed_upload_is_given_up_whole(moto: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(moto, use_ssl=False)
    refuses = Refuses(monkeypatch, store)
    refuses.plan["upload_part"] = [answer(403, "AccessDenied")]
    sink = store.open_sink("data/a")
    sink.write(bytes(PART_BYTES + 1))
    with pytest.raises(StoreError):
        sink.close()
    sink.abort()
    assert not store.exists("data/a")
    assert list(store.remnants()) == []


def test_uploads_of_the_dead_are_remnants(seaweed: SeaweedServer) -> None:
    store = opened(seaweed)
    for key in ("data/1/a", "data/2/b"):
        sink = store.open_sink(key)
        sink.write(bytes(PART_BYTES + 1))
        del sink
    other = opened(seaweed).open_sink("data/1/a")
    other.write(bytes(PART_BYTES))
    found = list(store.remnants())
    assert sorted(entry.key.partition("?")[0] for entry in found) == ["data/1/a", "data/2/b"]
    store.discard(found)
    store.discard(found)
    assert list(store.remnants()) == []
    other.abort()


def test_uploads_hold_few_parts_in_memory(moto: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(moto, use_ssl=False)
    release, started = threading.Event(), threading.Semaphore(0)
    call = store.fs.call_s3

    def slow(method: str, **arguments: Any) -> Any:
        if method == "upload_part":
            started.release()
            assert release.wait(30)
        return call(method, **arguments)

    monkeypatch.setattr(store.fs, "call_s3", slow)
    sink = store.open_sink("data/a")
    written: list[int] = []

    def write() -> None:
        for number in range(12):
            sink.write(bytes(PART_BYTES))
            written.append(number)
        sink.close()

    thread = threading.Thread(target=write)
    thread.start()
    for _ in range(4):
        assert started.acquire(timeout=30)
    time.sleep(0.3)
    assert len(written) <= 5, "a writer waits for the storage, not the memory for the writer"
    release.set()
    thread.join()
    assert store.size("data/a") == 12 * PART_BYTES


def test_nobody_listening_is_unreachable_within_the_budget() -> None:
    store = open_store(
        "s3://bucket/run", {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{free_ports(1)[0]}"}
    )
    store.budget_seconds = 1.0
    began = time.monotonic()
    with pytest.raises(StoreError) as caught:
        store.read("lineage.dfm")
    assert caught.value.kind == "store-unreachable"
    assert time.monotonic() - began < 30, "tries are not multiplied by those of the layers below"


def _write_in_child(store: S3Store, number: int) -> None:
    store.put(f"files/{number}", store.read("files/parent") + b" and child")


def test_objects_that_a_busy_server_did_not_delete_are_deleted_at_another_try(
    seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so in the reply about many, whose own status is fine."""
    store = opened(seaweed)
    names = [f"data/{number}" for number in range(5)]
    for name in names:
        store.put(name, b"x")
    call, codes = AioBaseClient._make_api_call, ["SlowDown", "InternalError", "AccessDenied"]

    async def busy(self: Any, operation_name: str, arguments: Any) -> Any:
        if operation_name != "DeleteObjects" or not codes:
            return await call(self, operation_name, arguments)
        left = arguments["Delete"]["Objects"].pop()
        reply = await call(self, operation_name, arguments)
        return reply | {"Errors": [{"Key": left["Key"], "Code": codes.pop(0)}]}

    monkeypatch.setattr(AioBaseClient, "_make_api_call", busy)
    with pytest.raises(StoreError, match="AccessDenied") as caught:
        store.delete(names)
    assert (caught.value.kind, caught.value.where) == ("store-failed", names[-1])
    assert list(store.list("data")) == [names[-1]]
    store.delete(names)
    assert list(store.list("data")) == []


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_parent_and_children_go_on_after_a_fork(seaweed: SeaweedServer) -> None:
    store = opened(seaweed)
    store.put("files/parent", b"parent")
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=_write_in_child, args=(store, number)) for number in range(3)]
    for child in children:
        child.start()
    # The parent's connections are its own all the while.
    for _ in range(20):
        assert store.read("files/parent") == b"parent"
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert [store.read(f"files/{number}") for number in range(3)] == [b"parent and child"] * 3
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            os.write(writer, store.read("files/parent"))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b"parent"
    os.wait()
    assert store.read("files/0") == b"parent and child"


def test_a_server_that_is_killed_and_comes_back(
    seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was acknowledged is there; what is asked meanwhile waits."""
    # A busy machine may take longer to start it than anybody would wait for by default.
    monkeypatch.setattr(S3Store, "budget_seconds", 120.0)
    monkeypatch.setattr(S3Store, "attempts", 100)
    url, options = seaweed.url(), seaweed.storage_options
    model = {"w": torch.arange(40_000, dtype=torch.int16)}
    writer = deltafmt.Writer(url, storage_options=options)
    writer.publish_anchor(model)
    live = {"w": torch.zeros(40_000, dtype=torch.int16)}
    receiver = deltafmt.Receiver(url, live, storage_options=options)
    for version in range(1, 3):
        model["w"][version::100] += 1
        assert writer.publish(model) == version
        seaweed.kill()
        back = threading.Thread(target=seaweed.start)
        back.start()
        try:
            assert receiver.advance() == version
        finally:
            back.join()
        assert torch.equal(live["w"], model["w"])
    assert [info.version for info in deltafmt.open(url, storage_options=options).log()] == [0, 1, 2]
    assert deltafmt.open(url, storage_options=options).verify().ok


def test_options_reach_the_driver_and_stay_there(moto: MotoServer) -> None:
    secret = "do-not-tell"
    options = {
        "key": "access",
        "secret": secret,
        "client_kwargs": {"endpoint_url": moto.endpoint, "region_name": "eu-north-1"},
        "config_kwargs": {"read_timeout": 77},
    }
    url = f"s3://{moto.buckets[0]}/{secrets.token_hex(4)}"
    writer = deltafmt.Writer(url, storage_options=options)
    writer.publish_anchor({"w": torch.zeros(2)}, meta={"note": 1})
    store = open_store(url, options)
    assert isinstance(store, S3Store)
    config = store.fs.s3.meta.config
    assert (config.read_timeout, config.region_name) == (77, "eu-north-1")
    assert config.max_pool_connections > store.readers
    assert options["config_kwargs"] == {"read_timeout": 77}, "the caller's own are not touched"
    fs = moto.filesystem()
    assert not any(secret.encode() in fs.cat_file(path) for path in fs.find(url))
    assert secret not in repr(writer) + repr(store) + json.dumps(store.url)


def by_obstore(server: Server, **options: Any) -> S3Store:
    return opened(server, obstore=True, **options)


def test_obstore_reads_what_s3fs_writes(seaweed: SeaweedServer, asked: list[str]) -> None:
    store = by_obstore(seaweed)
    data = secrets.token_bytes(3 << 20)
    store.put("files/a", data)
    asked.clear()
    assert store.read_all("files/a") == data
    assert [bytes(part) for part in store.read_ranges([Range("files/a", 5, 1 << 20)])] == [data[5 : 1 << 20]]
    with pytest.raises(deltafmt.NotFoundError):
        store.read("files/none")
    assert set(asked) <= {"HeadObject"}, "s3fs reads nothing"


def test_a_receiver_reads_by_obstore(seaweed: SeaweedServer, asked: list[str]) -> None:
    url, options = seaweed.url(), {**seaweed.storage_options, "obstore": True}
    tensors = {"w": torch.zeros(5000, dtype=torch.bfloat16)}
    with deltafmt.Writer(url, storage_options=options) as writer:
        writer.publish_anchor(tensors)
        tensors["w"][::7] += 1
        writer.publish(tensors)
    asked.clear()
    live = {"w": torch.ones(5000, dtype=torch.bfloat16)}
    receiver = deltafmt.Receiver(url, live, storage_options=options)
    assert receiver.advance() == 1
    assert torch.equal(live["w"], tensors["w"])
    receiver.close()
    assert "GetObject" not in asked


def test_what_obstore_cannot_do_s3fs_does(
    moto: MotoServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = by_obstore(moto)
    store.put("files/a", b"abc")
    assert store.read_all("files/a") == b"abc"
    quick = store._quick
    assert quick is not None
    monkeypatch.setattr(quick, "_buckets", {store._place("files/a")[0]: None})
    for _ in range(5):
        assert store.read_all("files/a") == b"abc"
        assert bytes(store.read_range("files/a", 1, 2)) == b"b"
    assert caplog.text.count("obstore cannot read here") == 1


def test_errors_are_the_same_by_obstore(seaweed: SeaweedServer) -> None:
    options = {**seaweed.storage_options, "secret": "wrong"}
    found = []
    for more in ({}, {"obstore": True}):
        store = open_store(seaweed.url(), {**options, **more})
        with pytest.raises(deltafmt.DeltafmtError) as caught:
            store.read("files/a")
        found.append((type(caught.value), caught.value.kind, str(caught.value)))
    assert found[0] == found[1]


def test_a_child_reads_by_s3fs_after_a_fork(seaweed: SeaweedServer) -> None:
    store = by_obstore(seaweed)
    store.put("files/a", b"abc")
    assert store.read_all("files/a") == b"abc"
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=lambda: theirs.send(store.read_all("files/a")))
    child.start()
    assert ours.poll(60)
    assert ours.recv() == b"abc"
    child.join()
