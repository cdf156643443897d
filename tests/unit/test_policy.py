"""What a writer adds behind its versions, and that it never costs a version."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch

import deltafmt
from deltafmt import StoreError
from deltafmt.format import keys
from deltafmt.read.chain import cheapest_chain
from deltafmt.testing.faulty import Crash, FaultyStore, crashing, delayed, failing
from deltafmt.write.policy import spans
from tests.reading import Course, new_root, same


def course(versions: int, *, share: float = 0.02, **options: Any) -> Course:
    random = torch.Generator().manual_seed(0)
    found = Course(
        {"w": torch.randn(4000, generator=random).bfloat16()},
        **{"domain_elements": 4000, "squash": 16, **options},
    )
    found.anchor()
    for version in range(1, versions + 1):
        found.step(seed=version, share=share)
    return found


def broken(run: Course) -> FaultyStore:
    store = FaultyStore(run.writer._history.store)
    run.writer._history.store = store
    return store


@pytest.mark.parametrize(
    ("version", "expected"),
    [(0, []), (1, []), (6, [2]), (16, [2, 4, 8, 16]), (24, [2, 4, 8, 24]), (48, [2, 4, 8, 16, 24, 48])],
)
def test_spans(version: int, expected: list[int]) -> None:
    assert spans(version, 64) == expected
    assert spans(version, 8) == [span for span in expected if span <= 8]


def test_every_span_is_made_of_two_ways_that_are_there() -> None:
    """So that adding one reads what two ways hold, not all deltas under it."""
    for version in range(1, 300):
        for span in spans(version, 128):
            base = version - span
            assert any(
                left - base in (1, *spans(left, 128)) and version - left in (1, *spans(version, 128))
                for left in range(base + 1, version)
            )


def test_a_receiver_behind_reads_few_ways() -> None:
    run = course(33)
    lineage = deltafmt.open(run.root)
    assert lineage.info(16).ways == (15, 0, 8, 12, 14)
    assert lineage.info(17).ways == (16,)
    for held, wanted in itertools.combinations((0, 1, 7, 15, 16, 18, 31, 33), 2):
        path = cheapest_chain(lineage.history, held, wanted)
        assert len(path) <= 2 * (wanted - held).bit_length()
        assert path[0].manifest.base == held
    live = {name: tensor.clone() for name, tensor in run.versions[1].items()}
    receiver = deltafmt.Receiver(run.root, live)
    receiver.adopt(1)
    receiver.advance()
    assert same(live, run.versions[33])
    assert lineage.verify().ok


def test_changes_of_the_model_are_not_bridged() -> None:
    run = course(3)
    run.tensors["new"] = torch.zeros(5)
    run.publish()
    run.anchor()
    for version in range(6, 9):
        run.step(seed=version)
    lineage = deltafmt.open(run.root)
    assert [lineage.info(version).ways for version in (4, 6, 8)] == [(3,), (5,), (7, 6)]
    assert lineage.verify().ok


def test_storage_that_fails_costs_no_version(caplog: pytest.LogCaptureFixture) -> None:
    run = course(3, anchor_every=4)
    store = broken(run)
    store.inject(failing(StoreError("no space", kind="store-failed")), key="ways", times=1000)
    with caplog.at_level(logging.WARNING, "deltafmt"):
        assert run.step(seed=4) == 4
    assert ["no anchor" in r.message or "no way from 2" in r.message for r in caplog.records] == [True, True]
    store.heal()
    assert run.step(seed=5) == 5
    lineage = deltafmt.open(run.root)
    assert [lineage.info(version).ways for version in (4, 5)] == [(3,), (4,)]
    assert same(lineage.read(5), run.versions[5])
    assert lineage.verify().ok


def test_a_crash_between_leaves_nothing_half_visible() -> None:
    calls, crashed = 0, True
    while crashed:
        calls += 4
        run = course(3, share=0.05)
        store = broken(run)
        store.inject(crashing(), key="ways", first=calls, times=1000)
        try:
            run.step(seed=4)
            crashed = False
        except Crash:
            run.versions.append({name: tensor.clone() for name, tensor in run.tensors.items()})
        lineage = deltafmt.open(run.root)
        assert lineage.latest() == 4
        for base in lineage.history.further_bases(4):
            assert lineage.history.store.exists(lineage.history.further_way(4, base).manifest.shard_keys[0])
        assert same(lineage.read(4), run.versions[4])
        assert calls < 100
    assert keys.way_key(4, 0) in set(lineage.history.store.list(keys.ways_folder(4)))


def test_anchors_of_a_detector_that_keeps_no_bits(caplog: pytest.LogCaptureFixture) -> None:
    """They are taken from the live tensors, and left out where these have moved on in the background."""
    torch.manual_seed(2)
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    detector = deltafmt.AdamWDetector(optimizer, model.named_parameters())
    root = new_root()
    options = deltafmt.WriterOptions(anchor_every=1)
    writer = deltafmt.Writer(root, detector=detector, publish_dtype="bfloat16", options=options)
    writer.publish_anchor(model.state_dict())

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()
        return model.weight.detach().bfloat16()

    for version in (1, 2):
        expected = step()
        assert writer.publish(model.state_dict()) == version
        deltafmt.open(root).gc(keep_last=1, grace_seconds=0.0, dry_run=False)
        assert torch.equal(deltafmt.open(root).read(version)["weight"], expected)
    expected = step()
    store = FaultyStore(writer._history.store)
    writer._history.store = store
    store.inject(delayed(0.3), verb="put_if_absent", key="versions/")
    pending = writer.publish_async(model.state_dict())
    step()
    with caplog.at_level(logging.WARNING, "deltafmt"):
        assert pending.result() == 3
    assert "no anchor" in caplog.text
    lineage = deltafmt.open(root)
    assert [info.ways for info in lineage.log()] == [(None,), (2,)]
    assert torch.equal(lineage.read(3)["weight"], expected)
    assert not [key for key in lineage.history.store.list("ways-data") if f"{3:020d}/" in key]
