"""What tests of retention share: lineages with a past, copies of their storage, and clocks that can be set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deltafmt.lineage import Lineage
from deltafmt.read.history import History
from deltafmt.store import MemoryStore, Store, register_protocol
from deltafmt.testing.faulty import Call, Effect, FaultyStore
from deltafmt.write.gc import GcPlan
from tests.reading import Course, Tensors, new_root, same

DAY = 86_400.0


def past(versions: int, **options: Any) -> Course:
    """A lineage of so many versions: an anchor, then deltas, and further anchors as the options say."""
    tensors: Tensors = {"w": torch.zeros(6, 50, dtype=torch.bfloat16), "b": torch.zeros(7)}
    course = Course(tensors, root=new_root(), **options)
    course.anchor()
    for seed in range(1, versions):
        course.step(seed=seed)
    return course


def store_of(course: Course) -> MemoryStore:
    return MemoryStore.named(course.root.removeprefix("memory://"))


def cloned(store: MemoryStore) -> MemoryStore:
    """Another store with the same objects, dated alike."""
    copy = MemoryStore()
    copy.objects.update(store.objects)
    copy._written.update(store._written)
    copy.clock = store.clock
    return copy


def opened(store: Store) -> Lineage:
    return Lineage(History(store))


def url_of(store: Store) -> str:
    """A URL by which this process opens the store."""
    protocol = f"retention{id(store)}"
    register_protocol(protocol, lambda rest, options: store)
    return f"{protocol}://"


def collected(store: Store, keep_last: int = 2, grace_seconds: float = DAY) -> GcPlan:
    return opened(store).gc(keep_last=keep_last, grace_seconds=grace_seconds, dry_run=False)


def assert_listed_are_readable(store: Store, versions: list[Tensors]) -> list[int]:
    """Every version that the log shows is there, bit for bit; returns their numbers."""
    lineage = opened(store)
    listed = [info.version for info in lineage.log()]
    assert listed == list(range(listed[0], len(versions)))
    for version in listed:
        assert same(lineage.read(version), versions[version]), version
    return listed


def at_call(number: int, action: Callable[[], object]) -> Callable[[FaultyStore], None]:
    """Makes something happen just before the store's call of this number."""

    def inject(store: FaultyStore) -> None:
        def effect(_call: Call, proceed: Callable[[], object]) -> object:
            action()
            return proceed()

        wrapped: Effect = effect
        store.inject(wrapped, first=number)

    return inject
