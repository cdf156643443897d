"""An S3 server that is killed and restarted under a writer and a receiver."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

import deltafmt
from deltafmt.errors import CommitUnknownError, DeltafmtError, StoreError
from deltafmt.testing.strategies import same
from tools.faults.world import Tally, Tensors, first_tensors, moved

if TYPE_CHECKING:
    from deltafmt.testing.servers import Server


def campaign(tally: Tally, *, seed: int, kills: int) -> Iterator[Tally]:
    """Kill SeaweedFS while versions are published; yields after each restart and audit."""
    try:
        from deltafmt.testing.servers import SeaweedServer
    except ImportError:
        tally.notes.append("the test extra is not installed: this part did not run")
        return
    dice = random.Random(seed)
    with SeaweedServer() as server:
        url, options = server.url(), server.storage_options
        versions = [first_tensors(seed)]
        writer = deltafmt.Writer(url, storage_options=options)
        writer.publish_anchor(versions[0])
        live = {name: torch.zeros_like(tensor) for name, tensor in versions[0].items()}
        receiver = deltafmt.Receiver(url, live, storage_options=options)
        for _ in range(kills):
            outage = threading.Thread(
                target=_outage, args=(server, dice.uniform(0.0, 0.5), dice.uniform(0.0, 2.0))
            )
            outage.start()
            while outage.is_alive():
                _publish(writer, versions, seed, tally)
            outage.join()
            tally.kills += 1
            _publish(writer, versions, seed, tally)
            _audit(url, options, versions, tally)
            receiver.advance()
            if not same(live, versions[-1]):
                tally.fail("wrong_bits", f"the receiver says version {receiver.version}")
            tally.rounds += 1
            yield tally
        writer.close()


def _outage(server: Server, after: float, seconds: float) -> None:
    time.sleep(after)
    server.kill()
    time.sleep(seconds)
    server.start()


def _publish(writer: deltafmt.Writer, versions: list[Tensors], seed: int, tally: Tally) -> None:
    """One more version; if that fails, the same tensors once more, when the server is back."""
    tensors = moved(versions[-1], seed + len(versions))
    before = len(versions)
    while True:
        try:
            found = writer.publish(tensors)
        except (StoreError, CommitUnknownError):
            tally.faults += 1
            continue
        break
    # Where the first try had come through after all, the second repeats it.
    versions.extend([tensors] * (found - before + 1))
    if found not in (before, before + 1):
        tally.fail("lost", f"version {before} is called {found}")
    tally.acknowledged = len(versions)


def _audit(url: str, options: dict[str, object], versions: list[Tensors], tally: Tally) -> None:
    lineage = deltafmt.open(url, storage_options=options)
    for version, wanted in enumerate(versions):
        try:
            found = lineage.read(version)
        except DeltafmtError as error:
            tally.fail("lost", f"version {version}: {error!r}")
            continue
        if not same(found, wanted):
            tally.fail("wrong_bits", f"version {version}")
