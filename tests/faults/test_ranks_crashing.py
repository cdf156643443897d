"""One of three ranks dies at every single call to storage, in turn; the others learn it, and the next start goes on."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

import deltafmt
from deltafmt.errors import DeltafmtError
from deltafmt.store import MemoryStore, register_protocol
from deltafmt.testing.faulty import Crash, FaultyStore, crashing
from tests.ranks import anchor, assert_holds, changed, model, publish, staged_parts, writers

STATES = [changed(model(), seed) for seed in range(3)]
TIMEOUT_SECONDS = 1.0
SIDE_BY_SIDE = 8


def outcomes(ranks: list[deltafmt.Writer]) -> list[Any]:
    """What publishing version 1 returns or raises on each rank, a crash included."""

    def one(rank: int) -> Any:
        try:
            return ranks[rank].publish(staged_parts(STATES[1])[rank])
        except (Crash, DeltafmtError) as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, range(len(ranks))))


def crash_at(rank: int, call: int) -> bool:
    """Whether the rank made so many calls; it died before that one then, and nothing was lost by it."""
    name, stores = secrets.token_hex(8), list[FaultyStore]()

    def opened(path: str, _: object) -> FaultyStore:
        stores.append(FaultyStore(MemoryStore.named(path)))
        return stores[-1]

    register_protocol(f"crashing-{name}", opened)
    root = f"memory://{name}"
    options = {"rank_timeout_seconds": 20.0, "anchor_every": 1}
    assert anchor(writers(root, 3, options=options), staged_parts(STATES[0])) == [0] * 3
    options["rank_timeout_seconds"] = TIMEOUT_SECONDS
    ranks = writers(f"crashing-{name}://{name}", 3, options=options)
    stores[rank].inject(crashing(), first=call)
    found = outcomes(ranks)
    lineage = deltafmt.open(root)
    newest = lineage.latest()
    assert newest in (0, 1)
    assert [outcome for outcome in found if outcome == 1] == [] or newest == 1
    assert all(writer.version in (None, newest) for writer in ranks), "nobody is ahead"
    names = lineage.schema().names
    assert_holds(root, newest, {name: STATES[newest][name] for name in names})
    again = writers(root, 3, options={"rank_timeout_seconds": 20.0})
    assert publish(again, staged_parts(STATES[2])) == [newest + 1] * 3
    assert_holds(root, newest + 1, {name: STATES[2][name] for name in names})
    lineage.gc(keep_last=2, grace_seconds=0.0, dry_run=False)
    report = lineage.verify()
    assert report.ok, report.problems
    return stores[rank].dead


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_dies_at_any_call(rank: int) -> None:
    # They wait most of the time, and can do so side by side.
    calls = 0
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        while all(pool.map(partial(crash_at, rank), range(calls + 1, calls + SIDE_BY_SIDE + 1))):
            calls += SIDE_BY_SIDE
    assert calls >= SIDE_BY_SIDE
