from __future__ import annotations

import logging
import time

import pytest
import torch

import deltafmt
from tests.ranks import anchor, memory_root, publish, writers

STAGES = ("detect_seconds", "encode_seconds", "upload_seconds", "commit_seconds")


def test_a_record_counts_what_a_version_holds(caplog: pytest.LogCaptureFixture) -> None:
    root = memory_root()
    told: list[deltafmt.PublishMetrics] = []
    options = deltafmt.WriterOptions(threads=1, on_publish=told.append)
    writer = deltafmt.Writer(root, options=options)
    assert writer.last_publish is None
    state = {"a": torch.zeros(300, dtype=torch.bfloat16), "b": torch.zeros(4, 50), "c": torch.zeros(7)}
    writer.publish_anchor(state, step=5)
    first = writer.last_publish
    assert first is not None
    assert (first.version, first.base, first.step, first.changed, first.listed) == (0, None, 5, None, 507)
    state["a"][10:13] = 1
    state["b"][3, 7] = 1
    before = time.monotonic()
    with caplog.at_level(logging.INFO, logger="deltafmt"):
        writer.publish(state)
    passed = time.monotonic() - before
    found = writer.last_publish
    assert found is not None
    assert told == [first, found]
    assert (found.version, found.base, found.step, found.rank) == (1, 0, None, 0)
    assert (found.changed, found.listed) == (4, 4)
    assert {n: (t.changed, t.elements) for n, t in found.tensors.items()} == {
        "a": (3, 300),
        "b": (1, 200),
        "c": (0, 7),
    }
    assert found.tensors["a"].density == 0.01
    info = deltafmt.open(root).info(1)
    assert found.stored_bytes == info.stored_bytes > 0
    assert all(0 <= getattr(found, stage) <= found.seconds for stage in STAGES)
    assert found.seconds <= passed
    assert "version 1: 4 of 507 elements changed" in caplog.text


def test_each_rank_counts_its_own_part() -> None:
    ranks = writers(memory_root(), 2)
    parts = [{"a": torch.zeros(9)}, {"b": torch.zeros(6)}]
    anchor(ranks, parts)
    parts[1]["b"][2] = 1
    publish(ranks, parts)
    found = [w.last_publish for w in ranks]
    assert [m.changed for m in found if m is not None] == [0, 1]
    assert [list(m.tensors) for m in found if m is not None] == [["a"], ["b"]]


def test_a_hook_that_fails_undoes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def hook(metrics: deltafmt.PublishMetrics) -> None:
        raise OSError("no such host")

    writer = deltafmt.Writer(memory_root(), options=deltafmt.WriterOptions(on_publish=hook))
    assert writer.publish_anchor({"a": torch.zeros(3)}) == 0
    assert writer.publish_async({"a": torch.ones(3)}).result() == 1
    assert caplog.text.count("on_publish failed") == 2
    assert writer.last_publish is not None
    assert writer.last_publish.changed == 3
