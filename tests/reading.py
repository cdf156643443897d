"""What tests of the reading side share: small lineages, exact comparison, and a store that can misbehave."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from deltafmt import Writer, WriterOptions
from deltafmt.read.receiver import Receiver
from deltafmt.store import Entry, Sink, Store
from deltafmt.store.base import Buffer
from deltafmt.tensors import bits

Tensors = dict[str, torch.Tensor]

_roots = itertools.count()


def new_root() -> str:
    """A root in this process's memory that nobody else uses."""
    return f"memory://reading-{next(_roots)}"


def copied(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def blank(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Tensors like these, full of bits that no test publishes."""
    result = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    for tensor in result.values():
        bits(tensor).fill_(0x55)
    return result


def same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    """Whether all expected tensors are there, bit for bit."""
    return all(torch.equal(bits(found[name]), bits(tensor)) for name, tensor in expected.items())


class Course:
    """A lineage in the making, with the tensors of each of its versions."""

    def __init__(self, tensors: Tensors, *, root: str | None = None, **options: Any) -> None:
        self.root = root or new_root()
        self.tensors = tensors
        self.writer = Writer(
            self.root, options=WriterOptions(**{"domain_elements": 64, "threads": 2, **options})
        )
        self.versions: list[Tensors] = []

    def anchor(self, **arguments: Any) -> int:
        version = self.writer.publish_anchor(self.tensors, **arguments)
        self.versions.append(copied(self.tensors))
        return version

    def publish(self) -> int:
        version = self.writer.publish(self.tensors)
        self.versions.append(copied(self.tensors))
        return version

    def step(self, *, seed: int, share: float = 0.1) -> int:
        """Move a share of all elements by a bit or two, and publish."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.tensors.values():
            if tensor.numel() and tensor.dtype != torch.bool:
                chosen = torch.rand(tensor.shape, generator=generator) < share
                bits(tensor)[chosen] += 1 + seed % 2
        return self.publish()


class WrappedStore(Store):
    """Another store, whose reads pass through `on_read` (key, start, data) -> data and are counted."""

    def __init__(self, inner: Store, on_read: Callable[[str, int, bytes], bytes] | None = None) -> None:
        self.inner, self.url = inner, inner.url
        self.on_read = on_read or (lambda key, start, data: data)
        self.reads: list[tuple[str, int, int]] = []

    def read_range(self, key: str, start: int, stop: int) -> bytes:
        data = self.on_read(key, start, bytes(self.inner.read_range(key, start, stop)))
        self.reads.append((key, start, stop))
        return data

    def read_all(self, key: str) -> bytes:
        return self.inner.read_all(key)

    def size(self, key: str) -> int:
        return self.inner.size(key)

    def put(self, key: str, data: Buffer) -> None:
        self.inner.put(key, data)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self.inner.put_if_absent(key, data)

    def open_sink(self, key: str) -> Sink:
        return self.inner.open_sink(key)

    def list(self, folder: str, *, after: str | None = None) -> Iterator[str]:
        return self.inner.list(folder, after=after)

    def entries(self, folder: str) -> Iterator[Entry]:
        return self.inner.entries(folder)

    def delete(self, keys: Iterable[str]) -> None:
        self.inner.delete(keys)

    @property
    def bytes_read(self) -> int:
        """Bytes of ranged reads so far."""
        return sum(stop - start for _, start, stop in self.reads)


def wrapped(receiver: Receiver, on_read: Callable[[str, int, bytes], bytes] | None = None) -> WrappedStore:
    """Put a wrapped store under a receiver."""
    store = WrappedStore(receiver._history.store, on_read)
    receiver._history.store = store
    return store
