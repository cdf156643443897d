"""Elements followed as strided pieces: carriers on the meta device, which have strides and no elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from deltafmt.tracing.meet import Budget, UnsureError
from deltafmt.tracing.memory import Memory, Piece, View
from deltafmt.tracing.recorder import Held

Operations = Mapping[str, Callable[..., Any]]


class Pieces:
    """A carrier that keeps of each storage which pieces of canonical tensors stand in it.

    `operations` are functions of it and of an operation's arguments, by the operation's name.
    """

    def __init__(self, budget: Budget, operations: Operations) -> None:
        self.budget = budget
        self._operations = operations
        self._memories: dict[int, tuple[torch.Tensor, Memory]] = {}
        self._dtypes: dict[int, torch.dtype] = {}

    def memory(self, like: torch.Tensor) -> torch.Tensor:
        """A carrier for the whole storage of an ordinary tensor."""
        return self.empty((like.untyped_storage().nbytes() // like.element_size(),), like.dtype)

    def operation(self, func: Any) -> Callable[..., Any] | None:
        """What follows an operation of torch; None where it is not known."""
        found = self._operations.get(str(func))
        return None if found is None else partial(found, self)

    def source(self, shape: Sequence[int], dtype: torch.dtype, row: int, first: int) -> torch.Tensor:
        """A carrier of all elements of a canonical tensor, from number `first` on."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._dtypes[row] = dtype
        pieces = [Piece.whole(tensor.numel(), row, first)] if tensor.numel() else []
        return self._keep(tensor, Memory(self.budget, pieces))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new contiguous carrier that holds nothing known."""
        return self._keep(torch.empty(tuple(shape), dtype=dtype, device="meta"), Memory(self.budget))

    def like(self, tensor: torch.Tensor, dtype: torch.dtype, memory_format: Any = None) -> torch.Tensor:
        """A new carrier, with strides as torch gives them to a copy."""
        made = torch.empty_like(tensor, dtype=dtype, memory_format=memory_format or torch.preserve_format)
        return self._keep(made, Memory(self.budget))

    def of(self, tensor: torch.Tensor) -> Memory:
        """What stands in a carrier's storage."""
        return self._memories[tensor.untyped_storage()._cdata][1]

    def elements(self, tensor: torch.Tensor) -> list[Any]:
        """Which elements a carrier holds; raises `UnsureError` unless all of them are known."""
        found = list(self.of(tensor).read(view_of(tensor)))
        if sum(part.volume for _, part in found) != tensor.numel():
            raise UnsureError("elements that are not known are looked at")
        return [(piece.row, piece.first + part.first, part.start, part.runs) for piece, part in found]

    def write(self, to: torch.Tensor, source: Any) -> None:
        """Put a source, repeated to the shape of `to`, there; what is not `Held` is no canonical element."""
        if not to.numel():
            return
        if not isinstance(source, Held):
            self.of(to).write(view_of(to), None, view_of(to))
            return
        wide = source.tensor
        if wide.shape != to.shape:
            wide = wide.expand(to.shape)
        if not self._narrowed_back(source.dtype, to.dtype, wide):
            check_cast(source.dtype, to.dtype)
        self.of(to).write(view_of(to), self.of(wide), view_of(wide))

    def _narrowed_back(self, dtype: torch.dtype, to: torch.dtype, source: torch.Tensor) -> bool:
        """Whether elements become again what they were before a cast that lost nothing."""
        if (dtype, to) != (torch.float32, torch.bfloat16):
            return False
        found = self.of(source).read(view_of(source))
        return all(self._dtypes[piece.row] == to for piece, _ in found)

    def _keep(self, tensor: torch.Tensor, memory: Memory) -> torch.Tensor:
        self._memories[tensor.untyped_storage()._cdata] = tensor, memory
        return tensor


def view_of(tensor: torch.Tensor) -> View:
    """A tensor's window on its storage."""
    return View(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def check_cast(source: torch.dtype, to: torch.dtype) -> None:
    """Raise `UnsureError` for a copy that may lose bits."""
    if source != to and (source, to) != (torch.bfloat16, torch.float32):
        raise UnsureError(f"{source} becomes {to}")
