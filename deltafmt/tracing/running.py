"""Running somebody's loader on real tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""What writes named tensors into local ones."""


def run(load: Load, sources: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Call a loader; what it leaves uninitialised in new tensors is zero."""
    with torch.no_grad(), _Filling():  # type: ignore[no-untyped-call]
        load(sources)


class _Filling(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills new memory, which otherwise has the bits of tensors that are gone, as if they had been moved."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: the compiler would wrap each call, and be imported for it."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func.overloadpacket in _UNINITIALISED else made


_aten = torch.ops.aten
_UNINITIALISED = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}
