"""Tensors that only an optimizer should write to, and how one tells that somebody else has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from deltafmt.kernels.digest import Digest, digest_run, zero
from deltafmt.tensors import local_part, numpy_bits
from deltafmt.write.cut import Bits
from deltafmt.write.pack import in_order

R = TypeVar("R")

CHUNK = 1 << 18
"""Elements that hooks work on at a time: what one pass has read is in the cache for the next."""


def by_chunks(elements: int, threads: int, work: Callable[[slice], R]) -> Iterator[R]:
    """Results of `work` on all chunks of a tensor, in order."""
    return in_order(lambda first: work(slice(first, first + CHUNK)), range(0, elements, CHUNK), threads)


def chunk_of(tensor: torch.Tensor, chunk: slice) -> torch.Tensor:
    """Elements of a contiguous tensor, in this process's memory."""
    return tensor.detach().reshape(-1)[chunk].cpu()


def digest_of_chunk(bits: Bits, chunk: slice) -> Digest:
    """What a chunk adds to the digest of its tensor."""
    digest = zero()
    digest_run(bits, chunk.start, (0, 0), digest)
    return digest


def digest_of_bits(tensor: torch.Tensor, threads: int) -> Digest:
    """Digest of a contiguous tensor of any name."""

    def work(chunk: slice) -> Digest:
        return digest_of_chunk(numpy_bits(chunk_of(tensor, chunk)), chunk)

    return total_of(by_chunks(tensor.numel(), threads, work))


def total_of(digests: Iterable[Digest]) -> Digest:
    """The digest of all parts together."""
    total = zero()
    for digest in digests:
        total += digest
    return total


class Watched:
    """One tensor, or a distributed tensor's local part, with what it looked like last."""

    def __init__(self, tensor: torch.Tensor, threads: int) -> None:
        self._tensor, self._threads = tensor, threads
        self.accept()

    @property
    def local(self) -> torch.Tensor:
        """The memory, as it is now."""
        return local_part(self._tensor)

    def accept(self, digest: Digest | None = None) -> None:
        """What is there now is right; its digest, if it is known already."""
        local = self.local
        self._address, self._version = local.data_ptr(), local._version
        self.digest = digest_of_bits(local, self._threads) if digest is None else digest

    def written(self, *, thorough: bool, allowed: Digest | None = None) -> str | None:
        """How it was written to since it was accepted, which it then is again; None if it was not.

        torch counts its own writes to a tensor, but not those through `data`, numpy and others' kernels:
        `thorough` reads all of it. A tensor that has the digest `allowed` now is as it should be.
        """
        local = self.local
        moved, counted = local.data_ptr() != self._address, local._version != self._version
        if not (moved or counted or thorough):
            return None
        digest = digest_of_bits(local, self._threads)
        fine = (digest == self.digest).all() or (allowed is not None and (digest == allowed).all())
        self.accept(digest)
        if moved:
            return "it is in other memory than before"
        return None if fine else "it was written to by something else than the optimizer"
