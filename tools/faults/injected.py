"""Faults at the k-th call to the storage, for all k, over each operation.

A dry run tells which calls an operation makes. It is then run anew for each call and each fault that may
befall it, once with a fault that passes and once with one that stays. Whatever the operation does then, an
acknowledged version must be readable bit for bit, a receiver must hold the bits of the version it names, and
the operation must succeed when it is repeated without faults.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

import deltafmt
from deltafmt.errors import DeltafmtError, StoreError
from deltafmt.format import keys
from deltafmt.testing.faulty import (
    Call,
    Crash,
    Effect,
    FaultyStore,
    crashing,
    crashing_after,
    delayed,
    duplicated,
    failing,
    flipped,
    long,
    lost_reply,
    replayed,
    shifted,
    short,
    unreachable,
)
from deltafmt.testing.strategies import same
from tools.faults.world import OPTIONS, Tally, Tensors, World, close, door, moved

_READS = ("read_range", "read_all")
_FOREVER = 1_000_000
_KEPT_FROM = 2
"""Oldest version that a collection leaves."""


def _disk_full() -> Effect:
    return failing(OSError(errno.ENOSPC, "no space left on device"))


def _lost() -> Effect:
    return lost_reply(StoreError("the reply is lost", kind="store-unreachable"))


_ANYWHERE: dict[str, Callable[[], Effect]] = {
    "unreachable": unreachable,
    "refused": lambda: failing(StoreError("refused", kind="store-failed")),
    "bug": lambda: failing(RuntimeError("of the back end")),
    "delayed": lambda: delayed(0.0005),
    "dies before": crashing,
    "dies after": crashing_after,
}
_ON_READS: dict[str, Callable[[], Effect]] = {
    "short": short,
    "long": long,
    "shifted": shifted,
    "flipped": flipped,
    "replayed": lambda: replayed(bytes(range(256))),
}
_ON_WRITES: dict[str, Callable[[], Effect]] = {
    "disk full": _disk_full,
    "reply lost": _lost,
    "duplicated": duplicated,
}
_WRITES = ("put", "put_if_absent", "write", "close", "delete")


def _nothing(_world: World) -> None:
    pass


@dataclass(frozen=True)
class Operation:
    """Something that is done to a world through a URL, after `prepare` has made the world fit for it.

    Done again after a failure it must succeed, and then `check` holds.
    """

    name: str
    run: Callable[[World, str], None]
    prepare: Callable[[World], None] = _nothing
    check: Callable[[World], None] = _nothing


def faults_of(verb: str) -> dict[str, Callable[[], Effect]]:
    """What may befall a call."""
    return _ANYWHERE | (_ON_READS if verb in _READS else {}) | (_ON_WRITES if verb in _WRITES else {})


def campaign(tally: Tally, *, seed: int, only: set[str] | None = None, every: int = 1) -> Iterator[Tally]:
    """Run all operations through all faults, or `every` so many; yields after each."""
    turn = itertools.count(seed)
    for operation in operations():
        if only and operation.name not in only:
            continue
        world = World(seed)
        operation.prepare(world)
        url, store = door(world.inner)
        twin = world.copy()
        store.inner = twin.inner
        operation.run(twin, url)
        calls = [call.verb for call in store.log]
        close(url)
        for number, verb in enumerate(calls, 1):
            for name, make in faults_of(verb).items():
                for times in (1,) if "dies" in name else (1, _FOREVER):
                    if next(turn) % every:
                        continue
                    note = f"{operation.name}, {verb} (call {number}), {name}, x{times}"
                    _one(
                        world.copy(),
                        operation,
                        _at(number, make() if name not in _ON_READS else _on_reads(make()), times),
                        tally,
                        note,
                    )
                    yield tally


def _at(number: int, effect: Effect, times: int) -> Callable[[FaultyStore], None]:
    """Arms a store."""
    return lambda store: store.inject(effect, first=number, times=times)


def _on_reads(effect: Effect) -> Effect:
    """The effect, or a lost connection where threads have changed the order of calls and it does not fit."""
    other = unreachable()

    def fitting(call: Call, action: Callable[[], object]) -> object:
        return (effect if call.verb in _READS else other)(call, action)

    return fitting


def _one(
    world: World, operation: Operation, arm: Callable[[FaultyStore], None], tally: Tally, note: str
) -> None:
    url, store = door(world.inner)
    arm(store)
    tally.rounds += 1
    died = False
    try:
        operation.run(world, url)
    except Crash:
        died = True
    except Wrong as error:
        tally.fail(error.what, f"{note}: {error}")
    except (DeltafmtError, OSError, RuntimeError):
        pass
    except BaseException as error:  # noqa: BLE001 (an error of another kind is what is looked for)
        tally.fail("untyped", f"{note}: {error!r}")
    tally.faults += len(store.log) > 0
    tally.acknowledged += world.acknowledged + 1
    store.heal()
    if died:
        world.writer = None
    world.forget_unpublished()
    world.audit(tally, note)
    try:
        operation.run(world, door(world.inner)[0] if died else url)
        operation.check(world)
    except Wrong as error:
        tally.fail(error.what, f"{note}, repeated: {error}")
    except Exception as error:  # noqa: BLE001 (it should have worked)
        tally.fail("unrepaired", f"{note}, repeated: {error!r}")
    world.audit(tally, f"{note}, repeated")
    close(url)


class Wrong(Exception):  # noqa: N818 (a finding, not an error of the tool)
    """The world is not as it was said to be; `what` is the tally's name for it."""

    def __init__(self, what: str, text: str) -> None:
        super().__init__(text)
        self.what = what


def operations() -> list[Operation]:
    """All operations that touch storage."""
    return [
        Operation("publish", _publish),
        Operation("advance", _advance),
        Operation("add_anchor", _add_anchor),
        Operation("squash", _squash),
        Operation("gc", _gc, prepare=_leave_garbage, check=_is_clean),
    ]


def _publish(world: World, url: str) -> None:
    """Two more versions, by the same writer as before if it is still alive."""
    if world.writer is None:
        world.writer = deltafmt.Writer(url, options=OPTIONS)
    for _ in range(2):
        number = len(world.versions)
        tensors = moved(world.versions[-1], world.seed + 1000 + number)
        # It is there if this returns, and may be there if it raises.
        world.versions.append(tensors)
        found = world.writer.publish(tensors)
        if found != number:
            raise Wrong("lost", f"version {number} is called {found}")
        world.acknowledged = found


def _advance(world: World, url: str) -> None:
    """A receiver that holds version 1 goes to the newest, and one that holds nothing, too."""
    for start in (1, None):
        live: Tensors = {name: torch.zeros_like(tensor) for name, tensor in world.versions[0].items()}
        if start is not None:
            for name, tensor in world.versions[start].items():
                live[name].copy_(tensor)
        _advance_one(world, url, live, start)


def _advance_one(world: World, url: str, live: Tensors, start: int | None) -> None:
    receiver = deltafmt.Receiver(url, live)
    try:
        if start is not None:
            receiver.adopt(start)
        receiver.advance()
    except BaseException:
        held = receiver.version
        if held is not None and not same(live, world.versions[held]):
            raise Wrong("wrong_bits", f"it says version {held}, and holds other bits") from None
        raise
    if receiver.version != len(world.versions) - 1 or not same(live, world.versions[-1]):
        raise Wrong("wrong_bits", f"it says version {receiver.version}, and holds other bits")


def _add_anchor(_world: World, url: str) -> None:
    deltafmt.open(url).add_anchor(2)


def _squash(_world: World, url: str) -> None:
    deltafmt.open(url).squash(0, 3)


def _leave_garbage(world: World) -> None:
    """An anchor that lets old versions go, ways to them, a lease that has ended, and what dead writers leave."""
    lineage = deltafmt.open(door(world.inner)[0])
    lineage.add_anchor(_KEPT_FROM)
    lineage.squash(0, 3)
    dead = b"dead writer 1234"
    for key in (
        keys.shard_key(version=3, base=None, attempt=dead, writer=0, further=False),
        keys.shard_key(version=3, base=1, attempt=dead, writer=0, further=True),
        keys.probe_key(dead),
        keys.tiling_key(b"t" * 32),
    ):
        world.inner.put(key, b"left")
    world.kept_from = _KEPT_FROM


def _gc(world: World, url: str) -> None:
    """Of four versions the last two stay."""
    deltafmt.open(url).gc(keep_last=len(world.versions) - _KEPT_FROM, grace_seconds=0, dry_run=False)


def _is_clean(world: World) -> None:
    """Nothing is left of the others."""
    lineage = deltafmt.open(door(world.inner)[0])
    left = lineage.gc(keep_last=len(world.versions) - _KEPT_FROM, grace_seconds=0).removals
    if left or lineage.history.floor() != _KEPT_FROM:
        what = f", such as {left[0].key}" if left else ""
        raise Wrong("unrepaired", f"floor {lineage.history.floor()}, {len(left)} objects are left{what}")
