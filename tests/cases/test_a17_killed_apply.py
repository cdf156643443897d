"""A17: a crash in the middle of an apply, then a second try: by a process that is really killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deltafmt
from deltafmt.errors import BaseMismatchError
from deltafmt.kernels import apply
from deltafmt.testing.faulty import Crash
from tests.cases.common import assert_same, copied

TENSORS, ROWS = 10, 4096

# Live tensors in files, so that what a killed process had written by then outlives it. Every tensor is a
# domain of its own; the process kills itself, as hard as can be, when so many have been written.
RECEIVER = """
import os, signal, sys, numpy as np, deltafmt
from deltafmt.read import replica
from deltafmt.read.options import ReadOptions
root, folder, after = sys.argv[1], sys.argv[2], int(sys.argv[3])
real, done = replica.apply_domain, 0
def apply_domain(*arguments):
    global done
    if done == after:
        os.kill(os.getpid(), signal.SIGKILL)
    real(*arguments)
    done += 1
    if done == after == 10:
        os.kill(os.getpid(), signal.SIGKILL)
live = {f"t{k}": np.memmap(f"{folder}/t{k}", np.float32, "r+") for k in range(10)}
receiver = deltafmt.Receiver(root, live, options=ReadOptions(threads=1))
receiver.adopt(1)
replica.apply_domain = apply_domain
receiver.advance(2)
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


@pytest.mark.parametrize("after", [0, 1, 5, 9, 10])
def test_a_killed_receiver_is_repaired_by_the_next_one(tmp_path: Path, after: int) -> None:
    root, folder = str(tmp_path / "run"), tmp_path / "live"
    folder.mkdir()
    states = published(root)
    for name, tensor in states[1].items():
        tensor.numpy().tofile(folder / name)
    command = [sys.executable, "-c", RECEIVER, root, str(folder), str(after)]
    killed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    live = {f"t{k}": np.memmap(folder / f"t{k}", np.float32, "r+") for k in range(TENSORS)}
    written = [name for name, array in live.items() if (array == states[2][name].numpy()).all()]
    assert len(written) == after, "what it wrote has outlived it"
    receiver = deltafmt.Receiver(root, live)
    assert receiver.version is None, "live bits of an unknown past are trusted by nobody"
    if after:
        with pytest.raises(BaseMismatchError):
            receiver.adopt(1)
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
