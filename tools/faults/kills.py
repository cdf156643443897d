"""Real processes, killed by SIGKILL at random times, on a local root or on a real S3 server.

Writers publish, janitors squash, add anchors and collect garbage, receivers follow; each says what it is about to do and
what was acknowledged. Time and again one is killed and a new one takes its place. What a version must hold
is known from what its writer announced.
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
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

import deltafmt
from deltafmt.errors import CommitConflictError, DeltafmtError, VersionGoneError
from deltafmt.testing.strategies import same
from tools.faults.world import OPTIONS, Tally, Tensors, first_tensors, moved

_KEEP_LAST = 8
_AUDIT_EVERY = 10
_GRACE_SECONDS = 20.0
"""How old what dead processes leave must be to be removed: older than any work takes here."""
_ROLES = ("writer", "writer", "receiver", "janitor")
"""Which role the next victim has, by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where it happens: a folder for announcements, and the root with what opens it."""

    folder: Path
    root: str
    storage_options: dict[str, Any]
    longest: float
    """Seconds that a process works at most before it is killed."""

    def open(self) -> deltafmt.Lineage:
        return deltafmt.open(self.root, storage_options=self.storage_options)

    def writer(self, options: deltafmt.WriterOptions, **ranks: Any) -> deltafmt.Writer:
        return deltafmt.Writer(self.root, storage_options=self.storage_options, options=options, **ranks)

    def say_ready(self) -> None:
        """Tell that this process begins its work."""
        (self.folder / f"ready-{os.getpid()}").touch()

    def await_ready(self, process: BaseProcess) -> None:
        """Wait until a process has begun its work, or is dead."""
        ready = self.folder / f"ready-{process.pid}"
        while not ready.exists() and process.is_alive():
            time.sleep(0.002)
        ready.unlink(missing_ok=True)


def on_s3(tally: Tally, *, seed: int, kills: int) -> Iterator[Tally]:
    """The same on SeaweedFS."""
    try:
        from deltafmt.testing.servers import SeaweedServer
    except ImportError:
        tally.notes.append("the test extra is not installed: this part did not run")
        return
    with SeaweedServer() as server:
        yield from campaign(
            tally, seed=seed, kills=kills, root=server.url(), storage_options=server.storage_options
        )


def campaign(
    tally: Tally,
    *,
    seed: int,
    kills: int,
    root: str | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Iterator[Tally]:
    """Kill so many processes at work on a new root (default: a local one); yields after each."""
    context = multiprocessing.get_context("forkserver")
    # Children start in milliseconds, from a process that has loaded and compiled everything.
    context.set_forkserver_preload(["tools.faults.kills", "tools.faults.warm", "s3fs"])
    folder = Path(tempfile.mkdtemp(prefix="deltafmt-faults-"))
    place = Place(
        folder=folder,
        root=root or str(folder / "run"),
        storage_options=storage_options or {},
        longest=1.5 if root else 0.4,
    )
    dice = random.Random(seed)
    try:
        world = Announced(place, seed)
        while tally.kills < kills:
            role = dice.choice(_ROLES)
            process = context.Process(target=_ROLE[role], args=(place, dice.randrange(1 << 30)), daemon=True)
            process.start()
            _kill(process, place, dice)
            tally.kills += 1
            tally.rounds += 1
            if process.exitcode != -signal.SIGKILL:
                tally.fail("untyped", f"a {role} ended by itself ({process.exitcode}): {complaint(folder)}")
            if tally.kills % _AUDIT_EVERY == 0 or tally.kills == kills:
                world.audit(tally)
            if tally.kills == kills:
                world.tidy(tally)
            yield tally
    finally:
        shutil.rmtree(folder)


def _kill(process: BaseProcess, place: Place, dice: random.Random) -> None:
    """Kill a process a random moment after it has begun its work."""
    place.await_ready(process)
    process.join(dice.uniform(0.0, place.longest))
    assert process.pid is not None
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join()


class Announced:
    """What must be there, from the announcements of the writers."""

    def __init__(self, place: Place, seed: int) -> None:
        self.place = place
        self.versions: list[Tensors] = [first_tensors(seed)]
        self.read = 0
        with place.writer(OPTIONS) as writer:
            writer.publish_anchor(self.versions[0])
        self.announced: dict[int, list[int]] = {}
        self.found: dict[int, int] = {}
        self.acknowledged = 0

    def audit(self, tally: Tally) -> None:
        """Read every version that has to be there, and compare it with what was announced."""
        self._take_in()
        lineage = self.place.open()
        newest = lineage.latest()
        if newest is None or newest < self.acknowledged:
            tally.fail("lost", f"version {self.acknowledged} was acknowledged, the newest is {newest}")
            return
        floor = lineage.history.floor()
        if floor > max(0, newest - _KEEP_LAST + 1):
            tally.fail("lost", f"the floor is {floor}, the newest {newest}, and {_KEEP_LAST} are to be kept")
        for version in range(len(self.versions), newest + 1):
            if not self._settle(lineage, version, floor, tally):
                return
        for version in range(floor, newest + 1):
            self._compare(lineage, version, tally)
        tally.acknowledged = self.acknowledged

    def tidy(self, tally: Tally) -> None:
        """When nobody is at work, one collection takes all that the dead have left, and the next finds nothing."""
        lineage = self.place.open()
        lineage.gc(keep_last=_KEEP_LAST, grace_seconds=0, dry_run=False)
        left = lineage.gc(keep_last=_KEEP_LAST, grace_seconds=0)
        if left.removals or left.damaged:
            tally.fail("unrepaired", f"a second collection finds {left.removals} {left.damaged}")
        self.audit(tally)

    def _take_in(self) -> None:
        """The writers' announcements since last time; a line that was cut off was written by one who died."""
        text = (self.place.folder / "log").read_text() if (self.place.folder / "log").exists() else ""
        for line in text[self.read :].splitlines():
            what, *numbers = line.split()
            if what == "announce" and len(numbers) == 2:
                self.announced.setdefault(int(numbers[0]), []).append(int(numbers[1]))
            if what == "acknowledge":
                self.acknowledged = max(self.acknowledged, int(numbers[0]))
            if what in ("acknowledge", "found") and len(numbers) == 2:
                self.found[int(numbers[0])] = int(numbers[1])
        self.read = len(text)

    def _settle(self, lineage: Any, version: int, floor: int, tally: Tally) -> bool:
        """Which of the announced contents a version has: of two writers who died one may have come through."""
        candidates = [moved(self.versions[-1], seed) for seed in self.announced.get(version, [])]
        # A version that is gone again was acknowledged, or the writer after it found it.
        found = lineage.manifest(version).meta.get("seed") if version >= floor else self.found.get(version)
        chosen = moved(self.versions[-1], found) if isinstance(found, int) else None
        if chosen is None or not any(same(chosen, candidate) for candidate in candidates):
            tally.fail("wrong_bits", f"version {version} is not what anybody announced")
            return False
        self.versions.append(chosen)
        return True

    def _compare(self, lineage: Any, version: int, tally: Tally) -> None:
        try:
            found = lineage.read(version)
        except DeltafmtError as error:
            tally.fail("lost", f"version {version}: {error!r}")
            return
        if not same(found, self.versions[version]):
            tally.fail("wrong_bits", f"version {version}")


def _work(place: Place, turn: Any) -> None:
    """Say that the work begins, and take turns until killed; a failure is written down."""
    torch.set_num_threads(1)
    try:
        state = turn(None)
        place.say_ready()
        while True:
            state = turn(state)
    except BaseException as error:
        (place.folder / "complaint").write_text(repr(error))
        raise


def complaint(folder: Path) -> str:
    """What a process has written down that ended by itself."""
    path = folder / "complaint"
    return path.read_text() if path.exists() else "it said nothing"


def _write(place: Place, seed: int) -> None:
    """Publish on top of the newest version, over and over."""
    dice = random.Random(seed)
    writer = place.writer(replace(OPTIONS, anchor_every=5))
    # What is announced must be on its way to the disk before the version is.
    log = os.open(place.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def turn(tensors: Tensors | None) -> Tensors:
        if tensors is None:
            held = writer.resume()
            lineage = place.open()
            seed = lineage.manifest(held).meta.get("seed")
            if seed is not None:
                os.write(log, f"found {held} {seed}\n".encode())
            return lineage.read(held)
        number = dice.randrange(1 << 30)
        tensors = moved(tensors, number)
        version = (writer.version or 0) + 1
        os.write(log, f"announce {version} {number}\n".encode())
        assert writer.publish(tensors, meta={"seed": number}) == version
        os.write(log, f"acknowledge {version} {number}\n".encode())
        return tensors

    _work(place, turn)


def _receive(place: Place, seed: int) -> None:
    """Follow the newest version, and go back now and then; every step is proven."""
    dice = random.Random(seed)
    live = {name: torch.zeros_like(tensor) for name, tensor in first_tensors(0).items()}
    receiver = deltafmt.Receiver(place.root, live, storage_options=place.storage_options)

    def turn(state: bool | None) -> bool:
        if state is not None:
            newest = place.open().latest()
            assert newest is not None
            version = newest if dice.random() < 0.8 else max(0, newest - dice.randrange(4))
            try:
                receiver.advance(version)
            except VersionGoneError:
                return True
            receiver.verify()
        return True

    _work(place, turn)


def _tidy(place: Place, seed: int) -> None:
    """Squash runs of deltas, add anchors, and remove what is not needed for the newest versions."""
    dice = random.Random(seed)
    lineage: Any = place.open()

    def turn(state: bool | None) -> bool:
        if state is None:
            return True
        newest = lineage.latest()
        oldest = lineage.history.floor()
        # Somebody else may be quicker, which is nobody's fault.
        with suppress(VersionGoneError, CommitConflictError):
            chance = dice.random()
            if chance < 0.3:
                lineage.gc(keep_last=_KEEP_LAST, grace_seconds=_GRACE_SECONDS, dry_run=False)
            elif chance < 0.7 and newest - oldest >= 2:
                base = dice.randrange(oldest, newest - 1)
                lineage.squash(base, dice.randrange(base + 2, newest + 1))
            else:
                lineage.add_anchor(dice.randrange(oldest, newest + 1))
        return True

    _work(place, turn)


_ROLE = {"writer": _write, "receiver": _receive, "janitor": _tidy}
