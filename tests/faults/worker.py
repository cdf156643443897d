"""One rank as a process of its own: `python -m tests.faults.worker JSON`.

Runs a scenario and prints what each of its calls returned or raised. `die` is [verb, key, "before" or "after",
count]: at that call to the store the process kills itself, as hard as can be; with "stop" it stops there until
somebody lets it go on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import deltafmt
from deltafmt.schema import Schema
from deltafmt.store import LocalStore, Store, register_protocol
from deltafmt.testing.faulty import Call, FaultyStore
from tests.ranks import Tensors, changed, model, staged_parts, tensor_parallel

Outcomes = list[Any]


def main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    register_protocol("worker", lambda path, _: store_of(path, task.get("die"), Path(task["log"])))
    if task["group"] is not None:
        dist.init_process_group(
            "gloo", init_method=f"file://{task['group']}", rank=task["rank"], world_size=task["world"]
        )
    outcomes: Outcomes = []
    SCENARIOS[task["scenario"]](task, outcomes)
    print(json.dumps(outcomes), flush=True)
    # A rank that has lost its group would wait for it when the interpreter ends.
    os._exit(0)


def store_of(path: str, die: list[Any] | None, log: Path) -> Store:
    """A folder; calls that make something durable are written down, in order."""
    store = FaultyStore(LocalStore(path))

    def note(call: Call, action: Callable[[], object]) -> object:
        result = action()
        with log.open("a") as file:
            file.write(f"{call.verb} {call.key}\n")
        return result

    for verb in ("put", "put_if_absent", "close"):
        store.inject(note, verb=verb, times=1 << 30)
    if die is not None:
        verb, key, when, count = die
        store.inject(partial(dying, when), verb=verb, key=key, first=count)
    return store


def dying(when: str, _call: Call, action: Callable[[], object]) -> object:
    if when == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        return action()
    if when == "after":
        action()
    os.kill(os.getpid(), signal.SIGKILL)
    return None


def noted(outcomes: Outcomes, call: Callable[[], Any]) -> Any:
    """Carry out a call and note how it ended."""
    try:
        result = call()
    except deltafmt.DeltafmtError as error:
        outcomes.append([type(error).__name__, error.kind, str(error)])
        return None
    outcomes.append(result)
    return result


def writer_of(task: Mapping[str, Any], **settings: Any) -> deltafmt.Writer:
    secret = task.get("secret") or (task.get("secret_of_rank_0") if task["rank"] == 0 else None)
    options = deltafmt.WriterOptions(
        threads=1,
        rank_timeout_seconds=task["seconds"],
        job=task.get("job"),
        anchor_every=task.get("anchor_every"),
        sign_with=None if secret is None else deltafmt.HmacKey(bytes.fromhex(secret)),
    )
    root = f"worker://{task['root']}"
    return deltafmt.Writer(root, rank=task["rank"], world_size=task["world"], options=options, **settings)


def life(task: Mapping[str, Any], outcomes: Outcomes) -> None:
    """Tensor-parallel ranks: versions, failures of all kinds and versions again, a lost race, a resume."""
    rank, world = int(task["rank"]), int(task["world"])
    states = [changed(model(), seed) for seed in range(6)]
    layouts, parts = tensor_parallel(states[0], world)
    writer = writer_of(task, schema=Schema.of(states[0]), layout=layouts[rank])

    def part(number: int) -> Tensors:
        return tensor_parallel(states[number], world)[1][rank]

    noted(outcomes, lambda: writer.publish_anchor(parts[rank]))
    noted(outcomes, lambda: writer.publish(part(1), step=1))
    broken = {**part(2), "down": torch.zeros(2, 2)} if rank == 1 else part(2)
    noted(outcomes, lambda: writer.publish(broken))
    differs = part(2)
    if rank == world - 1:
        differs["norm"].view(torch.int32)[3] ^= 1
    noted(outcomes, lambda: writer.publish(differs))
    noted(outcomes, lambda: writer.publish(part(2), step=2))
    dist.barrier()
    if rank == 0:
        deltafmt.Writer(task["root"]).publish(states[3])
    dist.barrier()
    noted(outcomes, lambda: writer.publish(part(4)))
    outcomes.append(writer.version)
    noted(outcomes, writer.resume)
    noted(outcomes, lambda: writer.publish_async(part(4)).result())
    noted(
        outcomes,
        lambda: writer_of(task, schema=Schema.of(states[0]), layout=layouts[rank]).resume(4, part(4)),
    )
    noted(outcomes, lambda: writer.publish(part(5), step=5))


def steps(task: Mapping[str, Any], outcomes: Outcomes) -> None:
    """Ranks with whole tensors publish an anchor and a delta, or go on where a lineage is."""
    writer = writer_of(task)
    if task["first"] == 0:
        noted(outcomes, lambda: writer.publish_anchor(staged_parts(changed(model(), 0))[task["rank"]]))
    for number in range(max(1, task["first"]), task["last"] + 1):
        part = staged_parts(changed(model(), number))[task["rank"]]
        noted(outcomes, partial(writer.publish, part))
    outcomes.append(writer.version)


def again(task: Mapping[str, Any], outcomes: Outcomes) -> None:
    """Ranks publish one state, and the same once more: what failed for one reason is made good by the second."""
    writer = writer_of(task)
    part = staged_parts(changed(model(), 1))[task["rank"]]
    for _ in range(2):
        noted(outcomes, partial(writer.publish, part))
    outcomes.append(writer.version)


def stale(task: Mapping[str, Any], outcomes: Outcomes) -> None:
    """Rank 1 has resumed before somebody else published version 1, the others after that."""
    writer = writer_of(task)
    rank, folder = task["rank"], Path(task["log"]).parent
    if rank == 1:
        noted(outcomes, writer.resume)
        (folder / "resumed").touch()
    else:
        awaited(folder / "published")
        noted(outcomes, writer.resume)
    awaited(folder / "published")
    part = staged_parts(changed(model(), 2))[rank]
    noted(outcomes, partial(writer.publish, part))
    noted(outcomes, writer.resume)
    noted(outcomes, partial(writer.publish, part))


def awaited(path: Path, seconds: float = 60.0) -> None:
    """Wait until a file is there."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.01)


SCENARIOS: dict[str, Callable[[Mapping[str, Any], Outcomes], None]] = {
    "life": life,
    "steps": steps,
    "again": again,
    "stale": stale,
}

if __name__ == "__main__":
    main()
