"""A small lineage whose every version is known, and the questions that each fault is followed by."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import torch

import deltafmt
from deltafmt.store import MemoryStore, Store, register_protocol
from deltafmt.tensors import numpy_bits
from deltafmt.testing.faulty import FaultyStore
from deltafmt.testing.strategies import same

Tensors = dict[str, torch.Tensor]

_doors: dict[str, Store] = {}
_numbers = itertools.count()
register_protocol("faults", lambda name, _: _doors[name])


def first_tensors(seed: int) -> Tensors:
    """A model of several dtypes, with a tie and a scalar."""
    generator = torch.Generator().manual_seed(seed)
    embed = torch.randn(40, 16, generator=generator).bfloat16()
    return {
        "embed": embed,
        "head": embed,
        "up": torch.randn(300, generator=generator),
        "ids": torch.arange(50),
        "scale": torch.tensor(1.5, dtype=torch.float16),
    }


def moved(tensors: Tensors, seed: int) -> Tensors:
    """The tensors after a step: about a tenth of the elements differ, most by one."""
    rng = np.random.default_rng(seed)
    copies: dict[int, torch.Tensor] = {}
    for tensor in tensors.values():
        if tensor.data_ptr() in copies:
            continue
        copy = copies[tensor.data_ptr()] = tensor.clone()
        flat = numpy_bits(copy).reshape(-1)
        chosen = rng.random(flat.size) < 0.1
        flat[chosen] += flat.dtype.type(1)
    return {name: copies[tensor.data_ptr()] for name, tensor in tensors.items()}


@dataclass
class Tally:
    """What a part of the campaign counts; all but the first three must stay zero."""

    rounds: int = 0
    faults: int = 0
    kills: int = 0
    acknowledged: int = 0
    lost: int = 0
    wrong_bits: int = 0
    unrepaired: int = 0
    untyped: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.lost or self.wrong_bits or self.unrepaired or self.untyped)

    def fail(self, what: str, note: str) -> None:
        """Count a failure under one of the names above; the first ones are described."""
        setattr(self, what, getattr(self, what) + 1)
        if len(self.notes) < 20:
            self.notes.append(f"{what}: {note}")


class World:
    """A lineage in memory: an anchor and deltas, whose contents are kept beside it.

    No collection may go beyond version `kept_from`.
    """

    def __init__(self, seed: int, versions: int = 4) -> None:
        self.seed = seed
        self.inner = MemoryStore(f"faults-{next(_numbers)}")
        self.versions: list[Tensors] = [first_tensors(seed)]
        with deltafmt.Writer(door(self.inner)[0], options=OPTIONS) as writer:
            writer.publish_anchor(self.versions[0])
            for number in range(1, versions):
                self.versions.append(moved(self.versions[-1], seed + number))
                writer.publish(self.versions[-1])
        self.acknowledged = versions - 1
        self.kept_from = 0
        self.writer: deltafmt.Writer | None = None

    def copy(self) -> World:
        """The same lineage, on objects of its own."""
        twin: World = object.__new__(World)
        twin.seed, twin.versions = self.seed, list(self.versions)
        twin.acknowledged, twin.writer, twin.kept_from = self.acknowledged, None, self.kept_from
        twin.inner = MemoryStore(f"faults-{next(_numbers)}")
        for key, data in self.inner.objects.items():
            twin.inner.put(key, data)
        return twin

    def audit(self, tally: Tally, note: str) -> None:
        """Read every version that should be there through a store without faults."""
        lineage = deltafmt.open(door(self.inner)[0])
        floor = lineage.history.floor()
        if floor > self.kept_from:
            tally.fail("lost", f"{note}: the floor is {floor}, and {self.kept_from} was to be kept")
        for number, wanted in enumerate(self.versions):
            if number < floor:
                continue
            try:
                found = lineage.read(number)
            except Exception as error:  # noqa: BLE001 (whatever it is, the version is lost)
                tally.fail("lost", f"{note}: version {number}: {error!r}")
                continue
            if not same(found, wanted):
                tally.fail("wrong_bits", f"{note}: version {number}")
        for number in range(len(self.versions), (lineage.latest() or 0) + 1):
            tally.fail("wrong_bits", f"{note}: version {number} is there, and nobody published it")

    def forget_unpublished(self) -> None:
        """Drop the contents of versions that were not acknowledged and turn out not to be there."""
        newest = deltafmt.open(door(self.inner)[0]).latest()
        del self.versions[max(self.acknowledged, -1 if newest is None else newest) + 1 :]


OPTIONS = deltafmt.WriterOptions(domain_elements=4096, threads=1)


def door(inner: Store) -> tuple[str, FaultyStore]:
    """A URL of one's own on the same objects, and the store behind it, which can be made to fail."""
    name = str(next(_numbers))
    store = FaultyStore(inner)
    _doors[name] = store
    return f"faults://{name}", store


def close(url: str) -> None:
    """Forget a URL."""
    _doors.pop(url.partition("://")[2], None)
