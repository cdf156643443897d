"""Tensors that only an optimizer should write to, and how one tells that somebody else has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from deltafmt.kernels.cast import mark_overwritten, narrow
from deltafmt.kernels.fingerprint import fingerprint
from deltafmt.kernels.marks import Words, mark_differing
from deltafmt.tensors import local_part, numpy_bits
from deltafmt.write.cut import Bits
from deltafmt.write.pack import in_order

R = TypeVar("R")

_NARROWING = (torch.float32, torch.bfloat16)

CHUNK = 1 << 20
"""Elements that hooks work on at a time: what one pass has read is in the cache for the next."""


def by_chunks(elements: int, threads: int, work: Callable[[slice], R]) -> Iterator[R]:
    """Results of `work` on all chunks of a tensor, in order."""
    return in_order(lambda first: work(slice(first, first + CHUNK)), range(0, elements, CHUNK), threads)


def chunk_of(tensor: torch.Tensor, chunk: slice) -> torch.Tensor:
    """Elements of a contiguous tensor, in this process's memory."""
    return tensor.detach().reshape(-1)[chunk].cpu()


def print_of_chunk(bits: Bits, chunk: slice) -> int:
    """What a chunk adds to the fingerprint of its tensor."""
    return fingerprint(bits, chunk.start)


def cast_chunk(part: torch.Tensor, into: torch.Tensor, chunk: slice) -> int:
    """Cast a chunk into memory of its own; returns what the cast adds to the fingerprint of its tensor."""
    if (part.dtype, into.dtype) == _NARROWING:
        return narrow(part.numpy(), numpy_bits(into), chunk.start)
    return print_of_chunk(numpy_bits(into.copy_(part)), chunk)


def mark_chunk(old: torch.Tensor, new: torch.Tensor, words: Words, chunk: slice) -> tuple[int, int]:
    """Mark where the cast of `new` differs from `old`; returns what old bits and cast add to fingerprints."""
    if (new.dtype, old.dtype) == _NARROWING:
        return mark_overwritten(numpy_bits(old), new.numpy(), words, chunk.start)
    bits, cast = numpy_bits(old), numpy_bits(new.to(old.dtype))
    mark_differing(bits, cast, words)
    return print_of_chunk(bits, chunk), print_of_chunk(cast, chunk)


def print_of(tensor: torch.Tensor, threads: int, dtype: torch.dtype) -> int:
    """Fingerprint of a contiguous tensor's bits in a dtype."""

    def work(chunk: slice) -> int:
        part = chunk_of(tensor, chunk)
        if part.dtype is dtype:
            return print_of_chunk(numpy_bits(part), chunk)
        return cast_chunk(part, torch.empty(part.shape, dtype=dtype), chunk)

    return sum_of(by_chunks(tensor.numel(), threads, work))


def sum_of(prints: Iterable[int]) -> int:
    """The fingerprint of all parts together."""
    return sum(prints) & (2**64 - 1)


class Watched:
    """One tensor, or a distributed tensor's local part, with what it looked like last: in the dtype given."""

    def __init__(self, tensor: torch.Tensor, threads: int, dtype: torch.dtype | None = None) -> None:
        self._tensor, self._threads, self._dtype = tensor, threads, dtype or tensor.dtype
        self.accept()

    @property
    def local(self) -> torch.Tensor:
        """The memory, as it is now."""
        return local_part(self._tensor)

    def accept(self, found: int | None = None) -> None:
        """What is there now is right; its fingerprint, if that is known already."""
        local = self.local
        self._address, self._version = local.data_ptr(), local._version
        self.print = print_of(local, self._threads, self._dtype) if found is None else found

    def written(self, *, thorough: bool, allowed: int | None = None, found: int | None = None) -> str | None:
        """How it was written to since it was accepted, which it then is again; None if it was not.

        torch counts its own writes to a tensor, but not those through `data`, numpy and others' kernels:
        `thorough` reads all of it, unless its fingerprint was `found` just now. A tensor that has the
        fingerprint `allowed` is as it should be.
        """
        local = self.local
        moved, counted = local.data_ptr() != self._address, local._version != self._version
        if not (moved or counted or thorough):
            return None
        found = print_of(local, self._threads, self._dtype) if found is None else found
        fine = found in (self.print, allowed)
        self.accept(found)
        if moved:
            return "it is in other memory than before"
        return None if fine else "it was written to by something else than the optimizer"
