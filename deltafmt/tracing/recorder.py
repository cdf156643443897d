"""Tensors without elements of their own, whose every use is seen: what a loader does to them is written down.

A `Stand` looks to the loader like an ordinary tensor of its shape, dtype and device. Behind it stands another
tensor, the carrier's, on which views are made in its place; every other operation goes to the `Carrier`, or is
not known and raises `UnsureError`. Operations on ordinary tensors are seen too, on the thread that traces, so
that local tensors keep their bits: what would be written into them is told to the carrier instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deltafmt.tracing.meet import UnsureError
from deltafmt.tracing.running import tensors_in

_aten = torch.ops.aten


class Held:
    """A carrier's tensor with the dtype and device that the loader sees."""

    __slots__ = ("device", "dtype", "tensor")

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor, self.dtype, self.device = tensor, dtype, device

    def with_tensor(self, tensor: torch.Tensor, device: Any = None) -> Held:
        """The same for another tensor of a carrier, whose dtype is shown if it has no numbers."""
        dtype = tensor.dtype if tensor.is_meta else self.dtype
        return Held(tensor, dtype, self.device if device is None else torch.device(device))


class Carrier(Protocol):
    """A way to follow elements."""

    def memory(self, like: torch.Tensor) -> torch.Tensor:
        """A flat carrier for the whole storage of an ordinary tensor, which holds nothing known."""

    def operation(self, func: Any) -> Callable[..., Any] | None:
        """What follows an operation of torch; None where it is not known.

        It gets the operation's arguments, with `Held` in place of tensors that are followed, and returns
        `Held`, or None for an operation that returns its first argument.
        """


class Recorder:
    """Follows what is done to tensors, by a carrier.

    After the loader's return, `doubt` says why the result may be wrong, even where the loader has swallowed
    the error that it got.
    """

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier
        self.doubt: str | None = None
        self._lock = threading.RLock()
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def watch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Follow what stands in an ordinary tensor's storage; the storage's carrier."""
        key = _storage(tensor)
        if key not in self._known:
            # The tensor is kept, so that its storage's address stays its own.
            self._known[key] = tensor, self.carrier.memory(tensor)
        return self._known[key][1]

    def held(self, tensor: torch.Tensor) -> Held | None:
        """What is known of a tensor; None where it holds nothing that came from a canonical one."""
        if isinstance(tensor, Stand):
            return tensor.held
        known = self._known.get(_storage(tensor)) if _plain(tensor) else None
        if known is None:
            return None
        if known[0].element_size() != tensor.element_size():
            raise UnsureError("memory is looked at in another width")
        flat = known[1]
        if flat.is_meta and flat.dtype != tensor.dtype:
            flat = flat.view(tensor.dtype)
        window = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return Held(window, tensor.dtype, tensor.device)

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Do one operation of the loader."""
        try:
            with self._lock:
                if not torch.is_inference_mode_enabled():
                    return self._run(func, args, kwargs)
                # Views of ordinary tensors must be ordinary in this mode too, which is left without gradients.
                with torch.inference_mode(mode=False), torch.no_grad():
                    return self._run(func, args, kwargs)
        except Exception as error:
            self.doubt = self.doubt or f"{func}: {error}"
            raise

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        tensors = list(tensors_in((*args, *kwargs.values())))
        stands = any(isinstance(tensor, Stand) for tensor in tensors)
        if not stands and (_is_view(func) or not any(map(self._is_known, tensors))):
            return func(*args, **kwargs)
        if _is_view(func):
            return self._view(func, args, kwargs)
        operation = self.carrier.operation(func)
        if operation is None:
            raise UnsureError("not known as a move")
        if func._schema.is_mutable and not self._is_known(args[0]):
            self.watch(args[0])
        given = {key: self._shown(value) for key, value in kwargs.items()}
        made = operation(*map(self._shown, args), **given)
        return args[0] if made is None else self._stand(made)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, Stand) or (_plain(tensor) and _storage(tensor) in self._known)

    def _shown(self, arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return [self._shown(each) for each in arg]
        held = self.held(arg) if isinstance(arg, torch.Tensor) else None
        return arg if held is None else held

    def _stand(self, made: Any) -> Any:
        if isinstance(made, list):
            return [Stand(each, self) for each in made]
        return Stand(made, self) if isinstance(made, Held) else made

    def _view(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        base = args[0].held
        if func is _aten.view.dtype:
            dtype = args[1]
            if dtype.itemsize != base.dtype.itemsize or dtype.is_complex:
                raise UnsureError("elements are looked at in another width")
            tensor = base.tensor.view(dtype) if base.tensor.is_meta else base.tensor
            return Stand(Held(tensor, dtype, base.device), self)
        made = func(base.tensor, *args[1:], **kwargs)
        parts = [made] if isinstance(made, torch.Tensor) else list(made)
        if any(part.dtype != base.tensor.dtype or part.is_conj() or part.is_neg() for part in parts):
            raise UnsureError("elements are looked at as others")
        stands = [Stand(Held(part, base.dtype, base.device), self) for part in parts]
        return stands[0] if isinstance(made, torch.Tensor) else stands


class Stand(torch.Tensor):
    """A tensor that stands for one of a recorder's."""

    held: Held
    recorder: Recorder
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Held, recorder: Recorder) -> Self:
        tensor = held.tensor
        stand: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            tensor.shape,
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=held.dtype,
            device=held.device,
        )
        # Code that reads memory by address gets an error in place of a null pointer.
        torch._C._set_throw_on_mutable_data_ptr(stand)
        stand.held, stand.recorder = held, recorder
        return stand

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        recorder = next(
            each.recorder for each in tensors_in((*args, *(kwargs or {}).values())) if isinstance(each, Stand)
        )
        return recorder.run(func, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._doubtful("pickled")

    def __deepcopy__(self, memo: Any) -> Stand:
        made: Stand = self.clone()  # type: ignore[assignment]
        return made

    def share_memory_(self) -> Any:
        raise self._doubtful("put into shared memory")

    def untyped_storage(self) -> Any:
        raise self._doubtful("asked for its storage")

    def _doubtful(self, what: str) -> UnsureError:
        self.recorder.doubt = f"a tensor is {what}"
        return UnsureError(self.recorder.doubt)


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows a recorder all operations of this thread."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: the compiler would wrap each call, and be imported for it."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self.recorder.run(func, args, kwargs or {})


def _plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@cache
def _is_view(func: Any) -> bool:
    """Whether an operation returns views of its first argument, and writes nothing."""
    schema = func._schema
    if schema.is_mutable or func in _SAME:
        return func in _SAME
    first = schema.returns[0].alias_info if schema.returns else None
    return first is not None and not first.is_write


_SAME = (_aten._unsafe_view.default,)
"""Views of a tensor that nobody else has; their schemas do not say so."""
