"""Writers that race for the same versions, in threads and in processes, all off at one moment."""

from __future__ import annotations

import multiprocessing
import secrets
from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import torch

import deltafmt
from deltafmt.errors import CommitConflictError
from deltafmt.store import open_store
from deltafmt.write.commit import commit, sealed

LANES = 50
"""Rounds that are under way side by side, so that a server's waits for a lock add up to little."""
RACERS = 4

Options = Mapping[str, Any]


class Gate(Protocol):
    """What all racers of a round wait at."""

    def wait(self, timeout: float | None = None) -> int: ...


_gates: dict[int, list[Gate]] = {}


class Processes:
    """Four processes, started once, each of which runs one racer at a time."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        gates = {racers: [spawn.Barrier(racers) for _ in range(LANES)] for racers in (2, RACERS)}
        self._pool = ProcessPoolExecutor(RACERS, mp_context=spawn, initializer=_take, initargs=(gates,))

    def race(self, run: Any, url: str, options: Options, racers: int, rounds: int) -> list[Any]:
        """What `run` returns for each racer."""
        jobs: list[Future[Any]] = [
            self._pool.submit(_run, run, url, options, racers, racer, rounds) for racer in range(racers)
        ]
        return [job.result() for job in jobs]

    def close(self) -> None:
        self._pool.shutdown()


def _take(gates: Any) -> None:
    _gates.update(gates)


def _run(run: Any, url: str, options: Options, racers: int, racer: int, rounds: int) -> Any:
    return run(url, options, racer, rounds, _gates[racers])


def commits(
    url: str, options: Options, racer: int, rounds: int, gates: list[Gate]
) -> dict[int, tuple[str, bytes]]:
    """Create versions 1 to `rounds`; returns how each try ended, and its attempt.

    The first manifest's content does for all: nothing but the attempt distinguishes the racers.
    """
    store, first = open_store(url, options), deltafmt.open(url, storage_options=options).manifest(0)
    tries: dict[int, tuple[str, bytes]] = {}

    def lane(number: int) -> None:
        for version in range(1 + number, rounds + 1, LANES):
            attempt = secrets.token_bytes(16)
            stored, data = sealed(replace(first, version=version, attempt=attempt))
            gates[number].wait(120)
            tries[version] = (commit(store, stored, data).value, attempt)

    with ThreadPoolExecutor(LANES) as pool:
        list(pool.map(lane, range(LANES)))
    return tries


def state(racer: int, version: int) -> torch.Tensor:
    """What a racer publishes as a version."""
    return torch.arange(500, dtype=torch.int32) * (racer + 1) + 1000 * version


def publishes(url: str, options: Options, racer: int, rounds: int, gates: list[Gate]) -> dict[int, bool]:
    """Publish versions 1 to `rounds` by a `Writer`; returns which ones were won. Losers resume."""
    writer = deltafmt.Writer(url, storage_options=options)
    won: dict[int, bool] = {}
    for version in range(1, rounds + 1):
        assert writer.resume() == version - 1
        gates[0].wait(120)
        try:
            won[version] = writer.publish({"w": state(racer, version)}, meta={"racer": racer}) == version
        except CommitConflictError:
            won[version] = False
        gates[0].wait(120)
    return won
