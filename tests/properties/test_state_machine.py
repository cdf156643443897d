"""Random lives of a lineage against a plain list of the versions that must be there.

Writers publish, at once or in the background, tensors or their casts, cut for a receiver or not; they crash
between any two of their store calls, meet failing storage and are opened anew. Jobs of several ranks take over. Receivers with random layouts
follow, go back, are interrupted and lied to; collectors remove old versions, and die at it. Whatever happens, a version is there whole or not at all, and a
receiver holds the bits of a version or says that it does not.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import deltafmt
from deltafmt.errors import DeltafmtError, LayoutError, NotFoundError, StoreError, VersionGoneError
from deltafmt.format import keys
from deltafmt.layout import Layout
from deltafmt.read.options import ReadOptions
from deltafmt.store import MemoryStore, Store, register_protocol
from deltafmt.tensors import torch_dtype
from deltafmt.testing.faulty import (
    Crash,
    Effect,
    FaultyStore,
    crashing,
    crashing_after,
    failing,
    flipped,
    long,
    lost_reply,
    shifted,
    short,
    unreachable,
)
from deltafmt.testing.strategies import (
    Tensors,
    copied,
    densities,
    dtypes,
    layouts,
    placed,
    random_tensor,
    same,
    seeds,
    shapes,
    tensors,
    update,
)

WRITES = ("put", "put_if_absent", "open_sink", "write", "close")
READS = ("read_range", "read_all", "size", "list")


def no_space() -> Effect:
    return failing(StoreError("no space", kind="store-failed"))


CRASHES: dict[str, Callable[[], Effect]] = {"before": crashing, "after": crashing_after}
WRITE_FAULTS: dict[str, Callable[[], Effect]] = {
    "unreachable": unreachable,
    "no space": no_space,
    "lost reply": lambda: lost_reply(StoreError("reply lost", kind="store-unreachable")),
}
READ_FAULTS: dict[str, Callable[[], Effect]] = {
    "unreachable": unreachable,
    "refused": lambda: failing(StoreError("refused", kind="store-failed")),
    "short": short,
    "long": long,
    "shifted": shifted,
    "flipped": flipped,
}

_doors: dict[str, Store] = {}
_numbers = itertools.count()
register_protocol("machine", lambda name, _: _doors[name])


def door(inner: Store) -> tuple[str, FaultyStore]:
    """A store of one's own on the same objects, and its URL."""
    name = str(next(_numbers))
    store = FaultyStore(inner)
    _doors[name] = store
    return f"machine://{name}", store


class Follower:
    """A receiver made for one version, what it must hold of any, and its door to the storage."""

    def __init__(self, inner: Store, model: Tensors, layout: Layout, live: Tensors, undo: int | None) -> None:
        self.layout, self.live, self.blank = layout, live, picture(live)
        self.needs = {place.source: model[place.source] for place in layout.placements}
        url, self.door = door(inner)
        options = ReadOptions(threads=2) if undo is None else ReadOptions(threads=2, undo_bytes=undo)
        self.receiver = deltafmt.Receiver(url, live, layout=layout, options=options)

    def expected(self, model: Tensors) -> Tensors:
        return placed(self.layout, self.blank, model)

    def fits(self, model: Tensors) -> bool:
        """Whether a version has all that is placed here, in the shapes that the layout was made for."""
        return all(
            name in model and (model[name].shape, model[name].dtype) == (made_for.shape, made_for.dtype)
            for name, made_for in self.needs.items()
        )


def parts_of(model: Tensors, ranks: int) -> list[Tensors]:
    """Whole tensors by rank; those that are tied stay together."""
    owners = {key: number for number, key in enumerate({t.data_ptr(): None for t in model.values()})}
    return [
        {name: t for name, t in model.items() if owners[t.data_ptr()] % ranks == rank}
        for rank in range(ranks)
    ]


def together(calls: list[Callable[[], int]]) -> list[int | BaseException]:
    """What each call returns or raises, a crash too; all run at once."""

    def outcome(call: Callable[[], int]) -> int | BaseException:
        try:
            return call()
        except BaseException as error:  # noqa: BLE001 (the caller looks at it)
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def picture(live: Tensors) -> Tensors:
    """A copy that keeps strides."""
    return placed(Layout([]), live, {})


class Life(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.inner = MemoryStore(f"life-{next(_numbers)}")
        self.reader_url, _ = door(self.inner)
        self.versions: list[Tensors] = []
        self.ways: list[str] = []
        self.floor = 0
        self.followers: list[Follower] = []

    @initialize(
        model=tensors(),
        elements=st.sampled_from((8, 64, 1 << 22)),
        anchor_every=st.sampled_from((None, None, 2, 3)),
        squash=st.sampled_from((None, 4)),
        cast=st.sampled_from((None, None, "bfloat16", "float16")),
        data=st.data(),
    )
    def begin(
        self,
        model: Tensors,
        elements: int,
        anchor_every: int | None,
        squash: int | None,
        cast: str | None,
        data: st.DataObject,
    ) -> None:
        self.live, self.cast = model, cast
        hints = [layout for layout, _ in data.draw(st.lists(layouts(self.published()), max_size=2))]
        self.options = deltafmt.WriterOptions(
            domain_elements=elements, anchor_every=anchor_every, squash=squash, tile_for=hints, threads=2
        )
        self.writer_url, self.writer_door = door(self.inner)
        self.open_writer()
        self.publish_with(lambda: self.writer.publish_anchor(self.live), way="anchor")

    def open_writer(self) -> None:
        self.writer_door.heal()
        self.writer = deltafmt.Writer(self.writer_url, options=self.options, publish_dtype=self.cast)

    def published(self) -> Tensors:
        """A picture of what a version of the live tensors is to hold."""
        if self.cast is None:
            return copied(self.live)
        cast = torch_dtype(self.cast)
        return {
            name: tensor.to(cast) if tensor.dtype == torch.float32 else tensor.clone()
            for name, tensor in self.live.items()
        }

    def reachable(self, wanted: int, held: int | None = None) -> bool:
        """Whether ways lead to a version from nothing or from what is held."""
        further: dict[int, list[int | None]] = {}
        for version, base in filter(None, map(keys.way_of, self.inner.objects)):
            further.setdefault(version, []).append(base)
        todo, seen = [wanted], set()
        while todo:
            version = todo.pop()
            if version < self.floor:
                continue
            bases = further.get(version, [])
            if version == held or self.ways[version] == "anchor" or None in bases:
                return True
            if version not in seen:
                seen.add(version)
                todo += [base for base in bases if base is not None]
                todo += [version - 1] * (self.ways[version] == "delta")
        return False

    def publish_with(self, publish: Callable[[], int], *, way: str = "delta", fault: bool = False) -> None:
        """Publish; whether the version exists is asked of the storage, not of the writer."""
        before, version = self.published(), len(self.versions)
        published, crashed = False, False
        # Without its copy a writer reads the newest version, whose bytes may be elsewhere.
        blind = way == "delta" and not self.reachable(version - 1)
        try:
            published = publish() == version
        except Crash:
            crashed = True
        except NotFoundError:
            assert fault or blind
            fault = True
        except DeltafmtError:
            assert fault
        landed = keys.version_key(version) in self.inner.objects
        if landed:
            self.versions.append(before)
            self.ways.append(way)
        assert landed or not published
        assert published or fault
        self.writer_door.heal()
        if crashed:
            self.open_writer()

    @rule(seed=seeds, density=densities)
    def train(self, seed: int, density: float) -> None:
        update(self.live, seed, density)

    @rule(seed=seeds, density=densities)
    def publish(self, seed: int, density: float) -> None:
        update(self.live, seed, density)
        self.publish_with(lambda: self.writer.publish(self.live))

    @rule(stored=st.sampled_from((True, True, False)))
    def publish_anchor(self, stored: bool) -> None:
        way = "anchor" if stored else "empty anchor"
        self.publish_with(lambda: self.writer.publish_anchor(self.live, store_data=stored), way=way)

    @rule(seed=seeds, density=densities)
    def publish_in_the_background(self, seed: int, density: float) -> None:
        def publish() -> int:
            pending = self.writer.publish_async(self.live)
            update(self.live, seed, density)
            return pending.result()

        self.publish_with(publish)

    @rule(dtype=dtypes, shape=shapes, seed=seeds, tied=st.booleans())
    def add_a_tensor(self, dtype: str, shape: tuple[int, ...], seed: int, tied: bool) -> None:
        name = f"n{len(self.live)}"
        if name not in self.live:
            first = next(iter(self.live.values()), None)
            self.live[name] = first if tied and first is not None else random_tensor(dtype, shape, seed)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 10), shape=shapes, seed=seeds)
    def reshape_a_tensor(self, which: int, shape: tuple[int, ...], seed: int) -> None:
        name = list(self.live)[which % len(self.live)]
        dtype = str(self.live[name].dtype).removeprefix("torch.")
        self.live[name] = random_tensor(dtype, shape, seed)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 10))
    def drop_a_tensor(self, which: int) -> None:
        del self.live[list(self.live)[which % len(self.live)]]

    @rule(
        seed=seeds,
        call=st.integers(1, 30),
        when=st.sampled_from(sorted(CRASHES)),
        anchor=st.booleans(),
    )
    def crash_while_publishing(self, seed: int, call: int, when: str, anchor: bool) -> None:
        update(self.live, seed, 0.05)
        self.writer_door.inject(CRASHES[when](), first=call)
        publish, way = (self.writer.publish_anchor, "anchor") if anchor else (self.writer.publish, "delta")
        self.publish_with(lambda: publish(self.live), way=way, fault=True)

    @rule(
        seed=seeds,
        verb=st.sampled_from(WRITES),
        call=st.integers(1, 3),
        times=st.sampled_from((1, 1, 100)),
        fault=st.sampled_from(sorted(WRITE_FAULTS)),
        blind=st.booleans(),
    )
    def fail_while_publishing(
        self, seed: int, verb: str, call: int, times: int, fault: str, blind: bool
    ) -> None:
        update(self.live, seed, 0.05)
        self.writer_door.inject(WRITE_FAULTS[fault](), verb=verb, first=call, times=times)
        if blind:
            # Storage stays away, so that the outcome cannot be read back either.
            self.writer_door.inject(unreachable(), verb="read_all", times=100)
        self.publish_with(lambda: self.writer.publish(self.live), fault=True)

    @rule(
        ranks=st.integers(2, 3),
        seed=seeds,
        anchor=st.booleans(),
        crash=st.none() | st.tuples(st.sampled_from(sorted(CRASHES)), st.integers(0, 2), st.integers(1, 25)),
        stale=st.booleans(),
    )
    def publish_by_ranks(
        self, ranks: int, seed: int, anchor: bool, crash: tuple[str, int, int] | None, stale: bool
    ) -> None:
        """Another job goes on, by several ranks, one of which may die; the writer is opened anew or left behind."""
        update(self.live, seed, 0.05)
        doors = [door(self.inner) for _ in range(ranks)]
        options = replace(self.options, rank_timeout_seconds=1.0, job=f"job {next(_numbers)}")
        if crash is not None:
            when, rank, call = crash
            doors[rank % ranks][1].inject(CRASHES[when](), first=call)

        def work(rank: int) -> int:
            writer = deltafmt.Writer(
                doors[rank][0], rank=rank, world_size=ranks, options=options, publish_dtype=self.cast
            )
            part = parts_of(self.live, ranks)[rank]
            return writer.publish_anchor(part) if anchor else writer.publish(part)

        def publish() -> int:
            outcomes = together([partial(work, rank) for rank in range(ranks)])
            failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
            if failed:
                # One that is told that storage lacks something is told what is behind it all.
                raise next((error for error in failed if isinstance(error, NotFoundError)), failed[0])
            version = outcomes[0]
            assert isinstance(version, int)
            assert len(set(outcomes)) == 1
            return version

        before = len(self.versions)
        self.publish_with(publish, way="anchor" if anchor else "delta", fault=crash is not None)
        if not stale or len(self.versions) == before:
            self.open_writer()
            return
        # A writer that has published knows that somebody else has gone on; one that has not begins there.
        behind = True
        self.publish_with(lambda: self.writer.publish(self.live), fault=behind)
        assert not behind or len(self.versions) == before + 1
        self.open_writer()

    @rule()
    def open_another_writer(self) -> None:
        self.open_writer()

    @rule(which=st.integers(0, 100))
    def add_an_anchor(self, which: int) -> None:
        version = which % len(self.versions)
        try:
            deltafmt.open(self.reader_url).add_anchor(version)
        except NotFoundError:
            assert not self.reachable(version)

    @rule(
        keep=st.integers(1, 4),
        crash=st.none() | st.tuples(st.sampled_from(sorted(CRASHES)), st.integers(1, 60)),
    )
    def collect(self, keep: int, crash: tuple[str, int] | None) -> None:
        url, store = door(self.inner)
        if crash is not None:
            store.inject(CRASHES[crash[0]](), first=crash[1])
        with contextlib.suppress(Crash):
            deltafmt.open(url).gc(keep_last=keep, grace_seconds=0, dry_run=False)
        floor = deltafmt.open(self.reader_url).history.floor()
        assert self.floor <= floor < len(self.versions)
        assert floor == self.floor or floor <= len(self.versions) - keep
        self.floor = floor

    @precondition(lambda self: len(self.versions) > 1)
    @rule(version=st.integers(0, 100), back=st.integers(1, 100), call=st.none() | st.integers(1, 40))
    def squash(self, version: int, back: int, call: int | None) -> None:
        """With `call`, the process dies at that call to the storage."""
        version = 1 + version % (len(self.versions) - 1)
        base = max(0, version - back)
        url, faulty = door(self.inner)
        if call is not None:
            faulty.inject(crashing(), first=call, times=1000)
        try:
            deltafmt.open(url).squash(base, version)
        except Crash:
            assert call is not None
        except NotFoundError:
            # An anchor whose bytes are elsewhere lies between.
            assert base < self.floor or "empty anchor" in self.ways[base + 1 : version + 1]

    @precondition(lambda self: len(self.followers) < 3 and self.versions[-1])
    @rule(data=st.data(), undo=st.sampled_from((None, 0)))
    def open_a_receiver(self, data: st.DataObject, undo: int | None) -> None:
        layout, live = data.draw(layouts(self.versions[-1]))
        self.followers.append(Follower(self.inner, self.versions[-1], layout, live, undo))

    @precondition(lambda self: self.followers)
    @rule(
        which=st.integers(0, 10),
        to=st.none() | st.integers(0, 100),
        way=st.sampled_from(("advance", "stream", "prefetch", "parts", "there and back")),
        fault=st.none() | st.sampled_from(sorted(READ_FAULTS)),
        verb=st.sampled_from(READS),
        call=st.integers(1, 6),
        times=st.sampled_from((1, 100)),
    )
    def follow(
        self, which: int, to: int | None, way: str, fault: str | None, verb: str, call: int, times: int
    ) -> None:
        follower = self.followers[which % len(self.followers)]
        wanted = len(self.versions) - 1 if to is None else to % len(self.versions)
        held = follower.receiver.version
        before = picture(follower.live)
        if fault is not None:
            lies = fault not in ("unreachable", "refused")
            follower.door.inject(
                READ_FAULTS[fault](), verb="read_range" if lies else verb, first=call, times=times
            )
        fits = follower.fits(self.versions[wanted])
        # From nothing for sure; from what is held unless a tie has formed since.
        leads = self.reachable(wanted, held)
        try:
            move(follower.receiver, None if to is None else wanted, way)
        except DeltafmtError as error:
            unfit = isinstance(error, LayoutError) and not fits
            lost = isinstance(error, NotFoundError) and not self.reachable(wanted)
            assert fault is not None or unfit or lost
            assert follower.receiver.version in (held, None)
            if held is not None and follower.receiver.version == held:
                assert same(follower.live, before), "a failure that left a trace"
            elif isinstance(error, LayoutError):
                assert same(follower.live, before), "refused after something was written"
        else:
            assert leads or fault is not None
            if way == "there and back":
                assert follower.receiver.version in (held, None)
            else:
                # A list that could not be read whole may hide the newest version.
                assert follower.receiver.version == wanted or (fault is not None and to is None)
        follower.door.heal()
        self.check(follower)

    @precondition(lambda self: self.followers)
    @rule(which=st.integers(0, 10), action=st.sampled_from(("verify", "invalidate", "adopt", "close")))
    def use(self, which: int, action: str) -> None:
        follower = self.followers[which % len(self.followers)]
        receiver = follower.receiver
        if action == "close":
            receiver.close()
            self.followers.remove(follower)
        elif action == "invalidate":
            receiver.invalidate()
            assert receiver.version is None
        elif receiver.version is not None:
            if action == "verify":
                receiver.verify()
            else:
                with contextlib.suppress(VersionGoneError):
                    receiver.adopt(receiver.version)
            self.check(follower)

    def check(self, follower: Follower) -> None:
        version = follower.receiver.version
        if version is not None:
            assert same(follower.live, follower.expected(self.versions[version])), version

    @invariant()
    def every_version_is_listed(self) -> None:
        if self.versions:
            assert deltafmt.open(self.reader_url).latest() == len(self.versions) - 1

    def teardown(self) -> None:
        if not self.versions:
            return
        for follower in self.followers:
            self.check(follower)
        lineage = deltafmt.open(self.reader_url)
        for version, model in enumerate(self.versions):
            if self.reachable(version):
                assert same(lineage.read(version), model), version
            else:
                with pytest.raises(NotFoundError):
                    lineage.read(version)
        report = lineage.verify()
        assert report.ok, report.problems


def move(receiver: deltafmt.Receiver, to: int | None, way: str) -> Any:
    if way == "prefetch":
        receiver.prefetch(to)
        return receiver.advance()
    if way in ("parts", "there and back"):
        prepared = receiver.prepare(to)
        prepared.apply()
        return prepared.keep() if way == "parts" else prepared.rollback()
    return receiver.advance(to, streaming=way == "stream")


# A life is many calls; the profile's number of examples is meant for single ones.
Life.TestCase.settings = settings(max_examples=settings().max_examples // 5, stateful_step_count=15)
TestLife = Life.TestCase
