"""Starts ranks as processes and collects what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KILLED = "killed"


def run_ranks(
    folder: Path,
    world: int,
    scenario: str,
    *,
    group: bool,
    die: dict[int, list[Any]] | None = None,
    seconds: float = 60.0,
    **task: Any,
) -> list[Any]:
    """What each rank's calls returned or raised; `KILLED` for one that killed itself (`die`: rank -> where)."""
    return outcomes(start_ranks(folder, world, scenario, group=group, die=die, seconds=seconds, **task))


def start_ranks(
    folder: Path,
    world: int,
    scenario: str,
    *,
    group: bool,
    die: dict[int, list[Any]] | None = None,
    seconds: float = 60.0,
    worker: str = "tests.faults.worker",
    **task: Any,
) -> list[subprocess.Popen[str]]:
    """The ranks' processes, at work."""
    folder.mkdir(parents=True, exist_ok=True)
    processes: list[tuple[dict[str, Any], subprocess.Popen[str]]] = []
    for rank in range(world):
        given = {
            "root": str(folder / "root"),
            "rank": rank,
            "world": world,
            "scenario": scenario,
            "group": str(folder / f"group-{len(list(folder.iterdir()))}") if group else None,
            "die": (die or {}).get(rank),
            "seconds": seconds,
            "log": str(folder / "log"),
            **task,
        }
        if group and rank:
            given["group"] = processes[0][0]["group"]
        command = [sys.executable, "-m", worker, json.dumps(given)]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        processes.append((given, process))
    return [process for _, process in processes]


def outcomes(processes: list[subprocess.Popen[str]]) -> list[Any]:
    """What each of them has to say, when they have ended."""
    results: list[Any] = []
    for process in processes:
        out, err = process.communicate(timeout=200)
        if process.returncode == -9:
            results.append(KILLED)
        else:
            assert process.returncode == 0, err
            results.append(json.loads(out.splitlines()[-1]))
    return results


def durable_calls(folder: Path) -> list[tuple[str, str]]:
    """(verb, key) of the calls of all ranks that made something durable, in order."""
    lines = (folder / "log").read_text().splitlines()
    return [tuple(line.split(" ", 1)) for line in lines]  # type: ignore[misc]
