"""What a piece of code sends between ranks, and the largest tensor that it makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Traffic(TorchDispatchMode):
    """Counts, while it is entered, the operators of torch.distributed by name, and the bytes of their tensors.

    `largest` is the largest storage that any operator has made, in bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.sent, self.longest, self.largest = 0, 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        space = name.split("::")[0]
        if "c10d" in space:
            self.calls[name] += 1
            size = sum(tensor.nbytes for tensor in tensors((args, kwargs)))
            self.sent += size
            self.longest = max(self.longest, size)
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            for tensor in tensors(result):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


def tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in tree_iter(values):
        if isinstance(value, torch.Tensor):
            yield value
