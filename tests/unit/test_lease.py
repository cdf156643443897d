"""Leases of processes that are forked."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch

import deltafmt
from deltafmt import Receiver


def _advance_and_close(receiver: Receiver) -> None:
    receiver.advance(2)
    receiver.close()


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_child_leaves_its_parents_lease_alone(tmp_path: Path) -> None:
    root = tmp_path / "run"
    weights = {"w": torch.arange(50.0)}
    writer = deltafmt.Writer(root)
    writer.publish_anchor(weights)
    for _ in range(2):
        weights["w"] += 1
        writer.publish(weights)
    with Receiver(root, {"w": torch.zeros(50)}) as receiver:
        receiver.advance(1)
        leases = {path: path.read_bytes() for path in (root / "leases").iterdir()}
        assert len(leases) == 1
        child = multiprocessing.get_context("fork").Process(target=_advance_and_close, args=(receiver,))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert {path: path.read_bytes() for path in (root / "leases").iterdir()} == leases
    assert list(root.glob("leases/*")) == []
