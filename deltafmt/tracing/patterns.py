"""Numbers carried by weights: bit patterns that survive every move, and none of which is an ordinary zero.

A pattern is a finite, positive, normal value, so that loaders and lossless casts treat it as any other. It
carries a few bits of an element's number, 14 where the element has two bytes or more, else 6.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltafmt.dtypes import DTYPES
from deltafmt.errors import LayoutError
from deltafmt.tensors import numpy_bits, torch_dtype

Ints = npt.NDArray[np.int64]
Bits = npt.NDArray[Any]

INVALID = -1
_FIRST = {
    "bfloat16": 0x0080,
    "float16": 0x0400,
    "float8_e4m3fn": 0x08,
    "float8_e4m3fnuz": 0x08,
    "float8_e5m2": 0x04,
    "float8_e5m2fnuz": 0x04,
}
"""Bits of the least normal value; 1 for whatever counts plainly."""
_NAN = {"bfloat16": 0x7FC0, "float16": 0x7E00, "float32": 0x7FC00000}


def digit_bits(dtype: str) -> int:
    """Bits of a number that one element carries."""
    return 6 if DTYPES[dtype].width == 1 else 14


def check_traceable(dtype: str, where: str) -> None:
    """Raise `LayoutError` for elements that cannot carry numbers."""
    if dtype in ("bool", "complex64"):
        raise LayoutError(
            "elements of this dtype cannot be traced; give their placements yourself",
            kind="dtype-mismatch",
            where=where,
            found=dtype,
        )


def numbered(dtype: str, shape: tuple[int, ...], first: int, turn: int) -> torch.Tensor:
    """A tensor whose elements, numbered from `first` on in row-major order, carry the `turn`-th digit."""
    tensor = torch.empty(shape, dtype=torch_dtype(dtype))
    width = digit_bits(dtype)
    flat = numpy_bits(tensor).reshape(-1)
    digits = (np.arange(first, first + flat.size, dtype=np.int64) >> (turn * width)) & ((1 << width) - 1)
    if dtype == "float32":
        flat[:] = (digits + _FIRST["bfloat16"]) << 16
    elif dtype == "float64":
        flat[:] = (
            ((digits + _FIRST["bfloat16"]) << 16)
            .astype(np.uint32)
            .view(np.float32)
            .astype(np.float64)
            .view(np.uint64)
        )
    else:
        flat[:] = digits + _FIRST.get(dtype, 1)
    return tensor


def digits_in(tensor: torch.Tensor, dtype: str) -> Ints:
    """The digit that each element carries, in the tensor's shape; `INVALID` for other values."""
    bits = numpy_bits(tensor.cpu()).astype(np.int64)
    width = digit_bits(dtype)
    if dtype == "float64":
        value = tensor.cpu().numpy()
        with np.errstate(over="ignore"):
            single = value.astype(np.float32)
        exact = single.astype(np.float64) == value
        bits = np.where(exact, single.view(np.uint32).astype(np.int64), INVALID)
    if dtype in ("float32", "float64"):
        whole = (bits & 0xFFFF) == 0
        bits = np.where(whole, bits >> 16, INVALID) - _FIRST["bfloat16"]
    else:
        bits = bits - _FIRST.get(dtype, 1)
    found: Ints = np.where((bits >= 0) & (bits < 1 << width), bits, INVALID)
    return found


def noise(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bits of every kind that a dtype has: of either sign, subnormal, infinite, and one NaN."""
    tensor = torch.empty(shape, dtype=torch_dtype(dtype))
    flat = numpy_bits(tensor).reshape(-1)
    rng = np.random.default_rng(seed)
    flat[:] = np.frombuffer(rng.bytes(flat.nbytes), flat.dtype)
    if tensor.is_floating_point():
        nan = numpy_bits(torch.isnan(tensor.reshape(-1)))
        # How the many patterns of NaN are cast is nobody's promise; one of them is kept by all.
        quiet = _NAN.get(dtype)
        flat[nan.astype(bool)] = flat.dtype.type(0 if quiet is None else quiet)
    return tensor
