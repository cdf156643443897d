"""Torch tensors and numpy arrays as bit patterns: the only place that maps dtypes to torch."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltafmt.dtypes import dtype_of
from deltafmt.errors import SchemaError
from deltafmt.given import named_pairs

NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""Mapping, or iterable of pairs, from names to torch tensors or numpy arrays."""

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of an element type of format v1."""
    dtype = getattr(torch, dtype_of(name).name, None)
    if not isinstance(dtype, torch.dtype):
        raise SchemaError("this torch has no such dtype", kind="dtype-unknown", where=name)
    return dtype


def dtype_name(tensor: torch.Tensor) -> str:
    """Torch's name of a tensor's dtype, such as `bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")


def named(named_tensors: NamedTensors, *, may_copy: bool = False) -> dict[str, torch.Tensor]:
    """Name the given tensors in order; numpy arrays become torch tensors that share their memory.

    With `may_copy` an array that torch cannot share (of negative strides, of another byte order) is copied.
    Raises `SchemaError` for a name that stands twice and for an array that torch cannot share, `TypeError` for
    what is no mapping and no iterable of pairs.
    """
    if isinstance(named_tensors, Mapping) and _plain(named_tensors.values()):
        return dict(named_tensors)
    result: dict[str, torch.Tensor] = {}
    for name, tensor in named_pairs(named_tensors):
        if name in result:
            raise SchemaError("tensor name stands twice", kind="name-twice", where=repr(name))
        if not isinstance(tensor, torch.Tensor):
            tensor = _shared(name, _native(tensor) if may_copy else tensor)
        result[name] = tensor.detach() if tensor.requires_grad else tensor
    return result


def _plain(tensors: Collection[Any]) -> bool:
    return set(map(type, tensors)) <= {torch.Tensor} and not any(map(attrgetter("requires_grad"), tensors))


def _native(array: Any) -> Any:
    """An array in this machine's byte order and without negative strides: itself, or a copy."""
    if not isinstance(array, np.ndarray):
        return array
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array.copy() if any(stride < 0 for stride in array.strides) else array


def _shared(name: str, array: Any) -> torch.Tensor:
    try:
        with warnings.catch_warnings():
            # A read-only array is a fine source; whoever writes into it is stopped by the operating system.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
            return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise SchemaError(
            f"torch cannot share this array ({error})", kind="dtype-unknown", where=repr(name)
        ) from error


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, shape and strides as signed integers of the elements' width (shares memory).

    Raises `SchemaError` for a lazily conjugated or negated view, whose memory holds other bits than it shows.
    """
    if tensor.is_conj() or tensor.is_neg():
        raise SchemaError("a lazy conjugate or negative view has no bits of its own", kind="dtype-mismatch")
    return tensor.detach().view(_SIGNED[tensor.element_size()])


def numpy_bits(tensor: torch.Tensor) -> npt.NDArray[np.unsignedinteger]:
    """A CPU tensor's bit patterns as an unsigned numpy array of the same shape and strides (shares memory)."""
    integers: npt.NDArray[Any] = bits(tensor).numpy()
    return integers.view(_UNSIGNED[tensor.element_size()])


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a distributed tensor that this process holds, or the tensor itself; shares its memory."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def empty(dtype: str, shape: tuple[int, ...], device: torch.device | str = "cpu") -> torch.Tensor:
    """A new contiguous tensor whose elements are not initialised."""
    return torch.empty(shape, dtype=torch_dtype(dtype), device=device)


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements stand in memory of this process, or of a device, that can be read.

    They do not on the meta device, in a sparse or nested tensor, in one of a class that only wraps others
    (a distributed or a fake tensor), or where the storage was given back, as sharded modules do.
    """
    if tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    if not tensor.numel():
        return True
    last = tensor.storage_offset() + sum(
        (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()
