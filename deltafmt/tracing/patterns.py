"""Numbers carried by weights: bit patterns that survive every move, and none of which is an ordinary zero.

A pattern is a finite, positive, normal value, so that loaders and lossless casts treat it as any other. It
carries a few bits of an element's number, 14 where the element has two bytes or more, else 6; a bool carries one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltafmt.dtypes import DTYPES
from deltafmt.tensors import bits, numpy_bits, torch_dtype
from deltafmt.tracing.parts import Numbers

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


_GENERATOR = torch.Generator()
_BOOL_TURNS = 2
"""Before the bits of its number a bool is once false and once true, which no constant is."""


def turns(dtypes: Iterable[str], known: Numbers) -> int:
    """How often a loader must be run, for elements of these dtypes to carry all bits of their numbers."""
    needed = [known.bool_bits + _BOOL_TURNS if d == "bool" else -(-known.bits // _width(d)) for d in dtypes]
    return max(needed, default=1)


def numbered(dtype: str, shape: tuple[int, ...], first: int, turn: int) -> torch.Tensor:
    """A tensor whose elements, numbered from `first` on in row-major order, carry the `turn`-th digit."""
    if dtype == "complex64":
        part = numbered("float32", shape, first, turn)
        return torch.complex(part, part)
    tensor = torch.empty(shape, dtype=torch_dtype(dtype))
    flat = numpy_bits(tensor).reshape(-1)
    numbers = np.arange(first, first + flat.size, dtype=np.int64)
    if dtype == "bool":
        flat[:] = turn if turn < _BOOL_TURNS else (numbers >> (turn - _BOOL_TURNS)) & 1
        return tensor
    width = _width(dtype)
    digits = (numbers >> min(turn * width, 63)) & ((1 << width) - 1)
    if dtype == "float32":
        flat[:] = (digits + _FIRST["bfloat16"]) << 16
    elif dtype == "float64":
        single = ((digits + _FIRST["bfloat16"]) << 16).astype(np.uint32).view(np.float32)
        flat[:] = single.astype(np.float64).view(np.uint64)
    else:
        flat[:] = digits + _FIRST.get(dtype, 1)
    return tensor


def read_digit(numbers: Ints, tensor: torch.Tensor, dtype: str, turn: int) -> bool:
    """Add what a tensor's elements carry at this turn to their numbers; `INVALID` marks what carries none.

    Begins anew at turn 0. False where an element carried something at one turn, and not at another.
    """
    if dtype == "bool":
        bit = numpy_bits(tensor.cpu())
        if turn < _BOOL_TURNS:
            numbers[...] = np.where((bit == turn) & ((turn == 0) | (numbers != INVALID)), 0, INVALID)
        else:
            numbers |= bit.astype(np.int64) << (turn - _BOOL_TURNS)
        return True
    width = _width(dtype)
    digit = _digits(tensor.cpu(), dtype)
    nothing = digit == INVALID
    if turn == 0:
        numbers[...] = digit
        return True
    if ((numbers == INVALID) != nothing).any():
        return False
    if turn * width < 63:
        numbers |= np.where(nothing, 0, digit) << (turn * width)
    return True


def _width(dtype: str) -> int:
    """Bits of a number that one element carries."""
    return 6 if DTYPES[dtype].width == 1 else 14


def _digits(tensor: torch.Tensor, dtype: str) -> Ints:
    """The digit that each element carries, in the tensor's shape; `INVALID` for other values."""
    if dtype == "complex64":
        one, other = (_digits(part, "float32") for part in (tensor.real, tensor.imag))
        return np.where(one == other, one, INVALID)
    bits = numpy_bits(tensor).astype(np.int64)
    width = _width(dtype)
    if dtype == "float64":
        value = tensor.numpy()
        with np.errstate(over="ignore", invalid="ignore"):
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


def noise(dtype: str, counts: Sequence[int], seed: int, *, inverted: bool = False) -> torch.Tensor:
    """Random bits for tensors of so many elements, one behind another.

    Of every kind that a dtype has: of either sign, subnormal, infinite, -0, and one NaN, of which each tensor
    has some. Inverted, no element has the bits that it has otherwise.
    """
    if dtype == "complex64":
        made = noise("float32", [2 * count for count in counts], seed, inverted=inverted)
        return made.view(torch.complex64)
    size = sum(counts) * DTYPES[dtype].width
    words = torch.empty(-(-size // 8), dtype=torch.int64)
    words.random_(-(1 << 63), None, generator=_GENERATOR.manual_seed(seed))
    tensor = words.view(torch.int8)[:size].view(torch_dtype(dtype))
    here = bits(tensor)
    if dtype == "bool":
        here.bitwise_and_(1).bitwise_xor_(int(inverted))
        return tensor
    if tensor.is_floating_point():
        begins = itertools.accumulate(counts, initial=0)
        places = [
            begin + seed % (count - min(count, _SPECIALS) + 1) + k
            for begin, count in zip(begins, counts, strict=False)
            for k in range(min(count, _SPECIALS))
        ]
        here[places] = _special(dtype)[[k for count in counts for k in range(min(count, _SPECIALS))]]
    if inverted:
        here.bitwise_not_()
    if tensor.is_floating_point():
        # How the many patterns of NaN are cast is nobody's promise; one of them is kept by all.
        here.masked_fill_(torch.isnan(tensor), _NAN.get(dtype, 0))
    return tensor


@cache
def _special(dtype: str) -> torch.Tensor:
    """Bits of values that arithmetic does not leave as they are, which chance may have left out."""
    values = torch.tensor([float("inf"), -0.0, float("nan"), float("-inf"), 1e-40])
    return bits(values.to(torch_dtype(dtype)))


_SPECIALS = 5
