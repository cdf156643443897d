"""The handle: what it lists, reads, streams and compares."""

from __future__ import annotations

import uuid

import pyarrow as pa
import pytest
import torch

import deltafmt
from deltafmt import NotFoundError, Schema, WriterOptions
from deltafmt.changes import CHANGES


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
