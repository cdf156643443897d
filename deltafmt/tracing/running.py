"""Running somebody's loader on real tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deltafmt.tracing.meet import UnsureError

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""What writes named tensors into local ones."""


def run(
    load: Load, sources: Iterable[tuple[str, torch.Tensor]], *, barred: Iterable[torch.Tensor] = ()
) -> None:
    """Call a loader; what it leaves uninitialised in new tensors is zero.

    Nothing is written to `barred` tensors by this thread: `UnsureError` where the loader tries to.
    """
    guard = _Guard(barred)
    with torch.no_grad(), guard:
        load(sources)
    guard.check()


class _Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills new memory, which otherwise has the bits of tensors that are gone, as if they had been moved.

    Stops operations that write to barred tensors.
    """

    def __init__(self, barred: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._barred = {tensor.untyped_storage()._cdata for tensor in barred}
        self._tried = False

    def check(self) -> None:
        """Raise `UnsureError` if a barred tensor would have been written to."""
        if self._tried:
            raise UnsureError("the loader writes to tensors that it was given nothing for")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: the compiler would wrap each call, and be imported for it."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._barred and func._schema.is_mutable:
            written = [args[0] if args else None, (kwargs or {}).get("out")]
            for tensor in tensors_in(written):
                if tensor.untyped_storage()._cdata in self._barred:
                    self._tried = True
                    self.check()
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func.overloadpacket in _UNINITIALISED else made


def tensors_in(args: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among an operation's arguments, which are such, or lists of them."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from (each for each in arg if isinstance(each, torch.Tensor))


_aten = torch.ops.aten
_UNINITIALISED = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}
