"""Jobs of several ranks, one of which is killed by SIGKILL at a random moment; the job is then started anew.

Half of the jobs agree by a process group, half through the root alone, with two or three ranks in turn. Those that
are left over must end by themselves, with a typed error, and whatever version came to exist must be one
that the ranks announced, whole.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from deltafmt.errors import DeltafmtError
from tools.faults.kills import Announced, Place, complaint
from tools.faults.world import OPTIONS, Tally, Tensors, first_tensors, moved

_RANK_SECONDS, _GROUP_SECONDS = 3.0, 5.0
"""How long ranks wait for one another."""
_END_SECONDS = 60.0
"""A rank that has not ended so long after another one was killed hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    number: int
    ranks: int
    group: bool

    def seed(self, version: int) -> int:
        """What all ranks make of the version before."""
        return self.number * 10_000 + version


def campaign(tally: Tally, *, seed: int, kills: int) -> Iterator[Tally]:
    """Start so many jobs and kill a rank of each; yields after each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.faults.ranks", "tools.faults.warm"])
    folder = Path(tempfile.mkdtemp(prefix="deltafmt-faults-"))
    place = Place(folder=folder, root=str(folder / "run"), storage_options={}, longest=0.6)
    dice = random.Random(seed)
    try:
        world = Announced(place, seed)
        for number in range(1, kills + 1):
            job = _Job(number=number, ranks=2 + number // 2 % 2, group=number % 2 == 0)
            processes = [
                context.Process(target=_rank, args=(place, job, rank), daemon=True)
                for rank in range(job.ranks)
            ]
            for process in processes:
                process.start()
            for process in processes:
                place.await_ready(process)
            time.sleep(dice.uniform(0.0, place.longest))
            victim = dice.choice(processes)
            if victim.is_alive():
                assert victim.pid is not None
                os.kill(victim.pid, signal.SIGKILL)
            deadline = time.monotonic() + _END_SECONDS
            for rank, process in enumerate(processes):
                process.join(max(0.0, deadline - time.monotonic()))
                if process.exitcode is None:
                    tally.fail("unrepaired", f"{job}: rank {rank} waits for a dead one for ever")
                    process.kill()
                elif process.exitcode and process is not victim:
                    tally.fail("untyped", f"{job}: rank {rank} ended badly: {complaint(folder)}")
            tally.kills += 1
            tally.rounds += 1
            world.audit(tally)
            yield tally
    finally:
        shutil.rmtree(folder)


def _rank(place: Place, job: _Job, rank: int) -> None:
    """Publish on top of the newest version until killed, or until the others are gone."""
    torch.set_num_threads(1)
    try:
        _publish(place, job, rank)
    except DeltafmtError as error:
        (place.folder / f"end-{job.number}-{rank}").write_text(repr(error))
    except BaseException as error:  # noqa: BLE001 (the process ends here, with the exit code that says so)
        (place.folder / "complaint").write_text(repr(error))
        os._exit(1)
    # A rank that has lost its group would wait for it when the interpreter ends.
    os._exit(0)


def _publish(place: Place, job: _Job, rank: int) -> None:
    if job.group:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{place.folder}/group-{job.number}",
            rank=rank,
            world_size=job.ranks,
            timeout=timedelta(seconds=_GROUP_SECONDS),
        )
    writer = place.writer(
        replace(OPTIONS, job=f"job {job.number}", rank_timeout_seconds=_RANK_SECONDS, anchor_every=7),
        rank=rank,
        world_size=job.ranks,
    )
    log = os.open(place.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    held = writer.resume()
    read = place.open().read(held)
    # The order is that in which the audit moves them, too.
    tensors = {name: read[name] for name in first_tensors(0)}
    place.say_ready()
    while True:
        held += 1
        number = job.seed(held)
        tensors = moved(tensors, number)
        os.write(log, f"announce {held} {number}\n".encode())
        assert writer.publish(_part(tensors, job, rank), meta={"seed": number}) == held
        os.write(log, f"acknowledge {held} {number}\n".encode())


def _part(tensors: Tensors, job: _Job, rank: int) -> Tensors:
    """A rank's own tensors, and one that all have."""
    owner = {"embed": 0, "head": 0, "up": 1, "ids": job.ranks - 1, "scale": rank}
    return {name: tensor for name, tensor in tensors.items() if owner[name] == rank}
