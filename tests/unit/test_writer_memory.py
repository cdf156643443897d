"""What publishing takes of memory, and that what is not held is found again."""

from __future__ import annotations

import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import deltafmt
from deltafmt import WriterOptions
from deltafmt.format.constants import DENSE, SET, STEP
from deltafmt.kernels import diff
from deltafmt.tensors import numpy_bits
from deltafmt.write import detect, pack
from deltafmt.write.pack import Room, in_order

_MEASURE = """
import sys, threading, time
from pathlib import Path
import torch, deltafmt

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def peak_over(action):
    before, top, done = resident(), [0], threading.Event()
    def watch():
        while not done.wait(0.001):
            top[0] = max(top[0], resident())
    watcher = threading.Thread(target=watch)
    watcher.start()
    action()
    done.set()
    watcher.join()
    return (top[0] - before) >> 20

def change(tensor, how):
    bits = tensor.view(getattr(torch, f"int{8 * tensor.itemsize}"))
    if how == "near":
        bits += 1
    elif how == "some":
        bits[::20] += 1
    else:
        bits.random_()

folder, dtype, mib = sys.argv[1], getattr(torch, sys.argv[2]), int(sys.argv[3])
warm = torch.zeros(40_000, dtype=dtype)
with deltafmt.Writer(folder + "/warm") as writer:
    writer.publish_anchor({"w": warm})
    for how in ("near", "some", "far"):
        change(warm, how)
        writer.publish({"w": warm})
live = torch.zeros(mib * (1 << 20) // dtype.itemsize, dtype=dtype)
change(live, "far")
writer = deltafmt.Writer(folder + "/run")
found = [peak_over(lambda: writer.publish_anchor({"w": live})) - mib]
for how in ("some", "near", "far"):
    change(live, how)
    found.append(peak_over(lambda: writer.publish({"w": live})))
print(*found)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "int64"])
def test_publishing_is_bounded_whatever_changes(dtype: str, tmp_path: object) -> None:
    """One tensor: an anchor, 5 % changed, all by one step, all at random; the copy is not counted."""
    command = [sys.executable, "-c", _MEASURE, str(tmp_path), dtype, "128"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert all(extra <= 160 for extra in map(int, done.stdout.split())), done.stdout


@pytest.fixture
def url() -> str:
    return f"memory://writer-memory/{uuid.uuid4().hex}"


def _crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold so few changes that domains are crowded early."""
    monkeypatch.setattr(diff, "_ROOM_BYTES", 0)
    monkeypatch.setattr(detect, "_CROWDED", 1 << 30)


def _moved(tensor: torch.Tensor, how: str, random: np.random.Generator) -> None:
    bits = numpy_bits(tensor)
    if how == "near":
        bits += bits.dtype.type(1)
    elif how == "far":
        bits[...] = np.frombuffer(random.bytes(bits.nbytes), bits.dtype).reshape(bits.shape)
    elif how == "many far":
        at = random.random(bits.shape) < 0.5
        bits[at] ^= bits.dtype.type(3 << 8 * bits.itemsize - 3)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "int64"])
def test_crowded_domains_are_stored_as_any_other(
    dtype: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    shapes = {"a": (300, 700), "b": (123,), "c": (90_000,), "d": ()}
    tensors = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, shape in shapes.items()}
    tensors["a"] = tensors["a"].T
    _crowd(monkeypatch)
    writer = deltafmt.Writer(url, options=WriterOptions(domain_elements=200_000))
    writer.publish_anchor(tensors)
    operations = set()
    for how in ("near", "many far", "far", "near", "nothing"):
        for tensor in tensors.values():
            _moved(tensor, how, random)
        version = writer.publish(tensors)
        lineage = deltafmt.open(url)
        operations |= set(lineage.manifest(version).chunks.operation.tolist())
        for name, tensor in lineage.read().items():
            np.testing.assert_array_equal(numpy_bits(tensor), numpy_bits(tensors[name]))
    assert lineage.verify().ok
    # A byte is never far enough from another.
    assert operations == ({STEP, DENSE} if dtype == "uint8" else {STEP, SET, DENSE})


@pytest.mark.parametrize("limits", [(40, 0), (40, 1 << 20), (0, 200)])
def test_the_copy_follows_by_whatever_was_kept(
    limits: tuple[int, int], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some domains by their changes, some by their chunks, some by what storage has."""
    monkeypatch.setattr(pack, "CHANGES_BYTES", limits[0])
    monkeypatch.setattr(pack, "KEPT_BYTES", limits[1])
    tensors = {"w": torch.zeros(8000, dtype=torch.bfloat16)}
    copy = deltafmt.SnapshotDetector()
    options = WriterOptions(domain_elements=1000, threads=3)
    writer = deltafmt.Writer(url, detector=copy, options=options)
    writer.publish_anchor(tensors)
    bits = numpy_bits(tensors["w"])
    for step in range(1, 4):
        bits[step::200] += np.uint16(step)
        writer.publish(tensors)
        assert deltafmt.open(url).manifest(step).changed == 40
        assert torch.equal(copy.tensors["w"], tensors["w"])
    assert deltafmt.open(url).verify().ok


@pytest.mark.parametrize("threads", [1, 4])
def test_large_work_waits_for_room_but_not_for_ever(threads: int) -> None:
    room, lock, held, most = Room(100), threading.Lock(), [0], [0]

    def work(item: int) -> int:
        room.take(item, 60)
        with lock:
            held[0] += 1
            most[0] = max(most[0], held[0])
        return item

    done = []
    for item in in_order(work, range(20), threads, room):
        done.append(item)
        with lock:
            held[0] -= 1
    assert done == list(range(20))
    assert most[0] <= 2


def test_waiting_work_ends_when_nobody_wants_it() -> None:
    room = Room(0)

    def work(item: int) -> int:
        room.take(item, 1)
        return item

    results: Iterator[int] = in_order(work, range(20), 4, room)
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]
