"""A17: a crash in the middle of an apply, then a second try: by a process that is really killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deltafmt
from deltafmt.kernels import apply
from deltafmt.testing.faulty import Crash
from tests.cases.common import assert_same, copied

TENSORS, ROWS = 10, 4096

# Live tensors in files, so that what a killed process had written by then outlives it.
RECEIVER = """
import sys, numpy as np, deltafmt
root, folder = sys.argv[1:]
live = {f"t{k}": np.memmap(f"{folder}/t{k}", np.float32, "r+") for k in range(10)}
receiver = deltafmt.Receiver(root, live)
receiver.adopt(1)
receiver.advance(2)
receiver.invalidate()
print("ready", flush=True)
while True:
    # Forwards and back again, so that whenever the kill comes, an apply is likely under way.
    receiver.adopt(2)
    receiver.advance(1)
    receiver.advance(2)
    receiver.invalidate()
"""


def published(root: str) -> list[dict[str, torch.Tensor]]:
    rng = np.random.default_rng(0)
    states = [
        {f"t{k}": torch.from_numpy(rng.standard_normal(ROWS).astype(np.float32)) for k in range(TENSORS)}
    ]
    writer = deltafmt.Writer(root, options=deltafmt.WriterOptions(domain_elements=ROWS))
    writer.publish_anchor(states[0])
    for _ in range(3):
        state = copied(states[-1])
        for tensor in state.values():
            at = torch.from_numpy(rng.integers(0, ROWS, 500))
            tensor.view(torch.int32)[at] += 1
        writer.publish(state)
        states.append(state)
    return states


@pytest.mark.parametrize("after", [0.0, 0.01, 0.03, 0.08, 0.2])
def test_a_killed_receiver_is_repaired_by_the_next_one(tmp_path: Path, after: float) -> None:
    root, folder = str(tmp_path / "run"), tmp_path / "live"
    folder.mkdir()
    states = published(root)
    for name, tensor in states[1].items():
        tensor.numpy().tofile(folder / name)
    command = [sys.executable, "-c", RECEIVER, root, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(after)
        os.kill(process.pid, signal.SIGKILL)
    live = {f"t{k}": np.memmap(folder / f"t{k}", np.float32, "r+") for k in range(TENSORS)}
    receiver = deltafmt.Receiver(root, live)
    assert receiver.version is None
    receiver.advance(2)
    receiver.advance(3)
    assert_same({name: torch.from_numpy(np.array(array)) for name, array in live.items()}, states[3])


@pytest.mark.parametrize("writes", [0, 1, 5, 9])
def test_a_failure_between_two_domains_restores_every_bit(
    tmp_path: Path, writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = published(str(tmp_path / "run"))
    live = copied(states[1])
    receiver = deltafmt.Receiver(str(tmp_path / "run"), live)
    receiver.adopt(1)
    done: list[int] = []
    whole = apply.apply_step

    def counted(*arguments: Any) -> None:
        done.append(1)
        if len(done) > writes:
            raise Crash
        whole(*arguments)

    monkeypatch.setattr(apply, "apply_step", counted)
    with pytest.raises(Crash):
        receiver.advance(2)
    monkeypatch.undo()
    assert receiver.version in (1, None)
    assert_same(live, states[1])
    receiver.advance(3)
    assert_same(live, states[3])
