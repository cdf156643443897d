"""A receiver in a process of its own, and the trainer's handle on it."""

from __future__ import annotations

import logging
import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

PATIENCE_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a follower is to hold: one of `ranks` tensor-parallel parts, or with one rank the whole model."""

    name: str
    url: str
    size: str
    rank: int
    ranks: int
    storage_options: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How a follower got to a version: seconds before the pause, and seconds of it."""

    version: int
    fetch_seconds: float
    pause_seconds: float
    cold: bool


class FollowerError(Exception):
    """A follower's process failed; the text is its own error."""


class Follower:
    """The trainer's handle: one request at a time, answered in order."""

    def __init__(self, job: Job) -> None:
        self.job = job
        # A fresh interpreter, as an engine's worker would be; threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(job, theirs), daemon=True, name=job.name)
        self._process.start()
        theirs.close()

    def ask(self, *request: Any) -> None:
        self._pipe.send(request)

    def answered(self) -> bool:
        return self._pipe.poll()

    def answer(self) -> Any:
        """The answer to the oldest request; `FollowerError` if the process failed or stays silent."""
        try:
            if not self._pipe.poll(PATIENCE_SECONDS):
                raise FollowerError(f"{self.job.name} gave no answer in {PATIENCE_SECONDS:.0f} s")
            outcome, value = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise FollowerError(f"{self.job.name} ended without an answer") from error
        if outcome != "ok":
            raise FollowerError(f"{self.job.name}: {value}")
        return value

    def close(self) -> None:
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _serve(job: Job, pipe: Connection) -> None:
    """The process: answer requests until the pipe closes."""
    # The trainer's process has said so already.
    logging.getLogger("deltafmt.kernels").setLevel(logging.ERROR)
    try:
        engine = _Engine(job)
        pipe.send(("ok", "ready"))
        while True:
            verb, *arguments = pipe.recv()
            pipe.send(("ok", getattr(engine, verb)(*arguments)))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return
    except Exception as error:  # noqa: BLE001 (the process ends; its parent raises)
        pipe.send(("failed", f"{type(error).__name__}: {error}"))


class _Engine:
    """Stands for an inference engine's rank: live tensors, and a receiver that writes into them."""

    def __init__(self, job: Job) -> None:
        import torch

        import deltafmt
        from deltafmt.cli.demo.engine import blank, layout
        from deltafmt.cli.demo.model import SHAPES, Policy

        torch.set_num_threads(1)
        shape = SHAPES[job.size]
        with torch.device("meta"):
            full = Policy(shape).state_dict()
        self.live = blank(full, shape, job.rank, job.ranks)
        self.receiver = deltafmt.Receiver(
            job.url,
            self.live,
            layout=layout(full, shape, job.rank, job.ranks) if job.ranks > 1 else None,
            storage_options=job.storage_options,
        )

    def advance(self, version: int) -> Step:
        cold = self.receiver.version is None
        began = time.perf_counter()
        if not cold:
            self.receiver.prefetch(version)
        fetched = time.perf_counter()
        self.receiver.advance(version)
        done = time.perf_counter()
        return Step(version=version, fetch_seconds=fetched - began, pause_seconds=done - fetched, cold=cold)

    def proof(self) -> dict[str, bytes]:
        """Scan the live tensors against the version's digests, then hand out their bytes."""
        from deltafmt.tensors import numpy_bits

        self.receiver.verify()
        return {name: numpy_bits(tensor).tobytes() for name, tensor in self.live.items()}
