"""The handle: what it lists, reads, streams and compares."""

from __future__ import annotations

import uuid
from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

import deltafmt
from deltafmt import FormatError, NotFoundError, Schema, WriterOptions
from deltafmt.changes import CHANGES
from deltafmt.format import keys
from deltafmt.format.objects import emit_manifest
from deltafmt.lineage import Lineage
from deltafmt.read.history import History
from deltafmt.store import MemoryStore
from deltafmt.testing.faulty import FaultyStore, failing


@pytest.fixture
def url() -> str:
    return f"memory://lineage/{uuid.uuid4().hex}"


def published(url: str) -> dict[str, torch.Tensor]:
    """Three versions: an anchor, a delta, and a delta with another schema."""
    tensors = {"a": torch.arange(600).float(), "b": torch.ones(40).bfloat16()}
    tensors["tied"] = tensors["a"]
    writer = deltafmt.Writer(url, options=WriterOptions(domain_elements=250))
    writer.publish_anchor(tensors, step=10, meta={"run": "x"})
    tensors["a"][5] = -0.0
    tensors["b"][39] = 2
    writer.publish(tensors, step=20)
    del tensors["b"]
    tensors["c"] = torch.zeros(3, dtype=torch.int64)
    tensors["a"][599] += 1
    writer.publish(tensors)
    return tensors


def test_an_empty_lineage(url: str) -> None:
    schema = Schema.of({"w": torch.ones(3)})
    lineage = deltafmt.create(url, schema)
    assert (lineage.latest(), lineage.log(), lineage.schema()) == (None, [], schema)
    assert deltafmt.open(url).url == lineage.url
    with pytest.raises(NotFoundError):
        lineage.read()
    with pytest.raises(deltafmt.CommitConflictError) as caught:
        deltafmt.create(url, schema)
    assert caught.value.kind == "lineage-exists"
    assert lineage.verify().ok
    writer = deltafmt.Writer(url)
    assert writer.publish_anchor({"w": torch.ones(3)}) == 0
    assert lineage.latest() == 0


def test_no_lineage(url: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        deltafmt.open(url)
    assert caught.value.kind == "lineage-missing"


def test_log(url: str) -> None:
    published(url)
    lineage = deltafmt.open(url)
    lineage.add_anchor(1)
    log = lineage.log()
    assert [(i.version, i.base, i.step, i.changed, i.ways) for i in log] == [
        (0, None, 10, None, (None,)),
        (1, 0, 20, 2, (0, None)),
        (2, 1, None, 4, (1,)),
    ]
    assert log[0].meta == {"run": "x", "step": 10}
    assert log[0].created <= log[1].created <= log[2].created
    assert all(info.stored_bytes > 0 for info in log)
    assert lineage.manifest(1).version == 1
    assert lineage.schema(0).names == ("a", "b", "tied")
    assert lineage.schema().names == ("a", "tied", "c")
    with pytest.raises(NotFoundError):
        lineage.manifest(3)


def test_reading_some_names(url: str) -> None:
    tensors = published(url)
    lineage = deltafmt.open(url)
    assert list(lineage.read(names=["tied", "c"])) == ["tied", "c"]
    assert torch.equal(lineage.read(names=["tied"])["tied"], tensors["a"])
    both = lineage.read(0)
    assert both["a"].data_ptr() == both["tied"].data_ptr()
    with pytest.raises(deltafmt.DeltafmtError) as caught:
        lineage.read(names=["nothing"])
    assert caught.value.kind == "name-unknown"


@pytest.mark.parametrize("batch_bytes", [1, 2500, 1 << 20])
def test_streaming_reads_the_same(batch_bytes: int, url: str) -> None:
    published(url)
    lineage = deltafmt.open(url)
    for version in range(3):
        streamed = dict(lineage.iter_read(version, batch_bytes=batch_bytes))
        whole = lineage.read(version)
        assert list(streamed) == list(whole)
        assert all(torch.equal(streamed[name], whole[name]) for name in whole)


def test_changes_are_exactly_the_elements_whose_bits_differ(url: str) -> None:
    published(url)
    lineage = deltafmt.open(url)
    reader = lineage.changes(1)
    assert isinstance(reader, pa.RecordBatchReader)
    assert reader.schema == CHANGES
    assert reader.read_all().to_pylist() == [
        {"tensor": "a", "index": 5, "old": 0x40A00000, "new": 0x80000000},
        {"tensor": "b", "index": 39, "old": 0x3F80, "new": 0x4000},
    ]
    rows = lineage.changes(2).read_all().to_pylist()
    assert [(row["tensor"], row["index"]) for row in rows] == [("a", 599), ("c", 0), ("c", 1), ("c", 2)]
    assert [row["old"] is None for row in rows] == [False, True, True, True]
    with pytest.raises(NotFoundError) as caught:
        lineage.changes(0)
    assert caught.value.kind == "base-none"
    assert [row["index"] for row in lineage.diff(0, 2).read_all().to_pylist()] == [5, 599, 0, 1, 2]


def test_a_version_without_changes_has_none(url: str) -> None:
    writer = deltafmt.Writer(url)
    writer.publish_anchor({"w": torch.ones(9)})
    writer.publish({"w": torch.ones(9)})
    assert deltafmt.open(url).changes(1).read_all().num_rows == 0


@pytest.mark.parametrize("domain_elements", [250, 1 << 20])
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_wrong_table_of_tensors_is_an_error_when_its_tensor_is_read(
    url: str, domain_elements: int, name: str
) -> None:
    """In domains of their own, and in one that both share; swapping the two would keep the domain's sum."""
    tensors = {"a": torch.arange(300).float(), "b": torch.ones(300), "c": torch.zeros(300).bfloat16()}
    writer = deltafmt.Writer(url, options=WriterOptions(domain_elements=domain_elements))
    writer.publish_anchor(tensors)
    for version in range(2):
        tensors[name][7 + version] = -1
        writer.publish(tensors)
    history = deltafmt.open(url).history
    stored = history.first_way(2)
    table = stored.manifest.tensors
    swapped = table.take([1, 0, 2])
    for wrong in (swapped, table.replaced(digest1=table.digest1 + np.array([1, 1, 0], np.uint64))):
        data = emit_manifest(replace(stored.manifest, tensors=wrong))
        history.store.put(stored.key, data)
        lineage = deltafmt.open(url)
        with pytest.raises(FormatError) as caught:
            lineage.read(2, [name])
        assert caught.value.kind == "content-mismatch"
        assert repr(name) in str(caught.value.where)
        with pytest.raises(FormatError):
            lineage.read()
        assert (lineage.read(2, ["c"])["c"] == tensors["c"]).all()
        assert list(lineage.read(1)) == ["a", "b", "c"]
        assert [problem.versions for problem in lineage.verify().problems] == [(2,)]


def test_a_long_log_is_two_listings_and_one_read_of_each_manifest() -> None:
    inner = MemoryStore.named("long-log")
    value = torch.zeros(4)
    writer = deltafmt.Writer(inner.url, options=WriterOptions(anchor_every=10))
    writer.publish_anchor({"w": value})
    for version in range(1, 70):
        value[version % 4] += 1
        writer.publish({"w": value}, step=version)
    store = FaultyStore(inner)
    log = Lineage(History(store)).log()
    assert [(info.version, info.step) for info in log] == [(0, None), *((k, k) for k in range(1, 70))]
    assert [info.ways for info in log[9:12]] == [(8,), (9, None), (10,)]
    verbs = Counter(call.verb for call in store.log if call.key.startswith(("versions", "ways")))
    assert verbs == {"entries": 2, "read_range": 70}
    # Storage that tells no sizes with its names, and a version that is collected between listing and reading.
    store.heal()
    refuse = failing(deltafmt.UnsupportedError("no times", kind="store-unsupported"))
    store.inject(refuse, verb="entries", times=99)
    assert Lineage(History(store)).log() == log
    store.heal()
    store.inject(failing(NotFoundError("gone", kind="object-missing")), key=f"{0:020d}.dfm", times=9)
    assert Lineage(History(store)).log() == log[1:]
    # A cut manifest at the end is no version yet; further down it is damage.
    inner.put(keys.version_key(70), b"")
    assert Lineage(History(inner)).log() == log
    inner.put(keys.version_key(3), inner.read(keys.version_key(3))[:-1])
    with pytest.raises(FormatError):
        Lineage(History(inner)).log()
    lines = dict(Lineage(History(inner)).lines(last=69))
    assert [version for version, line in lines.items() if isinstance(line, FormatError)] == [3, 70]
