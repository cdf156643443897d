"""Steps between bit patterns: differences in an order in which neighbouring values are one apart.

A step of width W is kept as an unsigned integer of that width, modulo 2^(8 W).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from deltafmt.errors import FormatError
from deltafmt.kernels.intrinsics import load, stepped, trailing_zeros, width_of
from deltafmt.kernels.positions import Bytes, Counts, total

Bits = npt.NDArray[Any]

_U64 = np.uint64
_ONE, _ZERO = np.uint64(1), np.uint64(0)
_ESCAPE = 255
_LEAST_ESCAPE = 257
_LARGER = np.uint64(0xAAAAAAAAAAAAAAAA)
"""The upper bit of each of the codes in a word."""
_GROUP = np.uint64(32)
"""Codes in a word."""

_REASONS = {
    1: "block-counts",
    2: "escape-short",
    3: "escape-sign",
    4: "padding-nonzero",
}


@njit(nogil=True, cache=True, inline="always")
def sign_bit(width: int) -> Any:
    """The highest bit of an element."""
    return _ONE << _U64(8 * width - 1)


@njit(nogil=True, cache=True, inline="always")
def to_key(bits: Any, sign: Any, mask: Any, order: int) -> Any:
    """Rank of a bit pattern: itself, or for floating kinds its place among all values."""
    if order == 0:
        return bits
    return (bits ^ mask) if bits & sign else (bits | sign)


@njit(nogil=True, cache=True, inline="always")
def from_key(key: Any, sign: Any, mask: Any, order: int) -> Any:
    """The bit pattern of a rank."""
    if order == 0:
        return key
    return (key ^ sign) if key & sign else (key ^ mask)


@njit(nogil=True, cache=True)
def between(old: Any, new: Any, order: int, step: Any) -> None:
    """Put the steps that lead from `old` to `new` into `step`."""
    sign = sign_bit(width_of(old))
    mask = (sign - _ONE) | sign
    for i in range(old.size):
        a, b = to_key(_U64(old[i]), sign, mask, order), to_key(_U64(new[i]), sign, mask, order)
        step[i] = (b - a) & mask


@njit(nogil=True, cache=True)
def _add(old: Any, step: Any, order: int, new: Any) -> None:
    if order == 0:
        for i in range(old.size):
            new[i] = old[i] + step[i]
    else:
        for i in range(old.size):
            new[i] = stepped(old[i], step[i])


def step_between(old: Bits, new: Bits, order: int) -> Bits:
    """Steps that lead from `old` to `new`."""
    step = np.empty_like(old)
    between(old, new, order, step)
    return step


def add_step(old: Bits, step: Bits, order: int) -> Bits:
    """The bit patterns that steps lead to."""
    new = np.empty_like(old)
    _add(old, step, order, new)
    return new


def negate(step: Bits) -> Bits:
    """The steps back."""
    return np.negative(step)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedSteps:
    """Two-bit codes, magnitudes, escapes, and how many of the latter two each block has."""

    code: Bytes
    magnitude: Bytes
    escape: Bytes
    magnitudes: Counts
    escapes: Counts


def encode_steps(step: Bits, elements: Counts) -> CodedSteps:
    """Code steps, none of them zero; `elements` counts those of each block."""
    magnitudes, escapes = np.zeros(len(elements), np.uint32), np.zeros(len(elements), np.uint32)
    # Room for the next one is needed even where none follows: writes come before the decision to keep.
    code = np.zeros((2 * len(step) + 7) // 8, np.uint8)
    magnitude = np.empty(len(step) + 1, np.uint8)
    escape = np.empty(_count_escapes(step), step.dtype)
    used = _encode(step, elements, code, magnitude, escape, magnitudes, escapes)
    return CodedSteps(
        code=code,
        magnitude=magnitude[:used],
        escape=escape.view(np.uint8),
        magnitudes=magnitudes,
        escapes=escapes,
    )


def decode_steps(
    coded: CodedSteps, elements: Counts, *, listed: int, dtype: np.dtype[Any], where: object
) -> Bits:
    """Steps of a chunk; `FormatError` where anything does not fit. `elements` must sum to `listed`."""
    # Groups are read and written whole, also where a block ends inside one.
    step = np.empty(listed + int(_GROUP), dtype)
    code = np.concatenate((coded.code, np.zeros(8, np.uint8)))
    whole = len(coded.escape) % dtype.itemsize == 0
    # A raw column may start anywhere in its buffer.
    words = np.frombuffer(coded.escape.tobytes(), dtype) if whole else step[:0]
    counts = elements, coded.magnitudes, coded.escapes
    status, block = 1, -1
    if whole:
        status, block = _decode(code, coded.magnitude, words, *counts, _signs(dtype), step)
    if status == 0 and listed % 4 and coded.code[-1] >> (2 * (listed % 4)):
        status, block = 4, len(elements) - 1
    if status:
        place = where if block < 0 else f"{where}, block {block}"
        raise FormatError("steps cannot be decoded", kind=_REASONS[status], where=place)
    return step[:listed]


@njit(nogil=True, cache=True)
def _count_escapes(step: Any) -> Any:
    sign = sign_bit(width_of(step))
    mask = (sign - _ONE) | sign
    count: Any = 0
    for i in range(step.size):
        d = _U64(step[i])
        size = (_ZERO - d) & mask if d & sign else d
        count += size >= _U64(_LEAST_ESCAPE)
    return count


@njit(nogil=True, cache=True)
def _encode(
    step: Any, elements: Any, code: Any, magnitude: Any, escape: Any, magnitudes: Any, escapes: Any
) -> Any:
    sign = sign_bit(width_of(step))
    mask = (sign - _ONE) | sign
    i, m, e = _ZERO, _ZERO, _ZERO
    for block in range(elements.size):
        first_m, first_e = m, e
        for _ in range(elements[block]):
            d = _U64(step[i])
            negative = _U64(d & sign != _ZERO)
            size = (_ZERO - d) & mask if negative else d
            larger = _U64(size != _ONE)
            code[i >> _U64(2)] |= (negative | larger << _ONE) << (_U64(2) * (i & _U64(3)))
            if size >= _U64(_LEAST_ESCAPE):
                escape[e] = step[i]
                e += _ONE
                size = _U64(_ESCAPE + 2)
            magnitude[m] = size - _U64(2)
            m += larger
            i += _ONE
        magnitudes[block] = m - first_m
        escapes[block] = e - first_e
    return m


@cache
def _signs(dtype: np.dtype[Any]) -> Bits:
    """The four single steps, up or down, that a byte of codes stands for; shape (256, 4)."""
    down = np.arange(256)[:, None] >> np.array([0, 2, 4, 6]) & 1
    signs: Bits = (1 - 2 * down).astype(f"i{dtype.itemsize}").view(dtype)
    return signs


@njit(nogil=True, cache=True)
def _decode(
    code: Any,
    magnitude: Any,
    escape: Any,
    elements: Any,
    magnitudes: Any,
    escapes: Any,
    signs: Any,
    step: Any,
) -> Any:
    """Groups of codes to steps: all as single ones first, then the larger ones among them anew."""
    sign = sign_bit(width_of(step))
    mask = (sign - _ONE) | sign
    word = np.empty(1, np.uint64)
    if total(magnitudes) != magnitude.size or total(escapes) != escape.size:
        return 1, -1
    i, m, e = _ZERO, _ZERO, _ZERO
    for block in range(elements.size):
        last_m, last_e = m + _U64(magnitudes[block]), e + _U64(escapes[block])
        end = i + _U64(elements[block])
        while i < end:
            # A block may begin inside a byte of codes; its later groups do not.
            inside = i & _U64(3)
            count = min(_GROUP - inside, end - i)
            codes = load(np.int64(code.ctypes.data) + np.int64(i >> _U64(2)), word) >> (_U64(2) * inside)
            for byte in range(_U64(8)):
                row = (codes >> (_U64(8) * byte)) & _U64(255)
                for j in range(_U64(4)):
                    step[i + _U64(4) * byte + j] = signs[row, j]
            larger = codes & _LARGER & (~_ZERO >> (_U64(2) * (_GROUP - count)))
            while larger != _ZERO:
                at = trailing_zeros(larger)
                larger &= larger - _ONE
                down = (codes >> (at - _ONE)) & _ONE
                if m == last_m:
                    return 1, block
                size = _U64(magnitude[m]) + _U64(2)
                if size == _U64(_ESCAPE + 2):
                    if e == last_e:
                        return 1, block
                    d = _U64(escape[e])
                    size = (_ZERO - d) & mask if d & sign else d
                    if size < _U64(_LEAST_ESCAPE):
                        return 2, block
                    if (d & sign != _ZERO) != (down != _ZERO):
                        return 3, block
                    e += _ONE
                elif size + (_ONE ^ down) > sign:
                    # Only bytes: eight bits hold -128 to 127.
                    return 2, block
                step[i + (at >> _ONE)] = (size ^ (_ZERO - down)) + down
                m += _ONE
            i += count
        if m != last_m or e != last_e:
            return 1, block
    return 0, 0


def to_planes(bits: Bits) -> Bytes:
    """Byte planes, shape (width, elements): row j has byte j of every element."""
    planes = np.empty((bits.itemsize, bits.size), np.uint8)
    _split(bits, planes)
    return planes


def plane_of(bits: Bits, j: int, plane: Bytes) -> None:
    """Byte j of every element, into `plane`."""
    _plane(bits, j, plane)


def from_planes(planes: list[Bytes], dtype: np.dtype[Any]) -> Bits:
    """The elements of byte planes."""
    bits = np.zeros(len(planes[0]), dtype)
    for j, plane in enumerate(planes):
        _join(plane, j, bits)
    return bits


@njit(nogil=True, cache=True)
def _split(bits: Any, planes: Any) -> None:
    for j in range(width_of(bits)):
        _plane(bits, j, planes[j])


@njit(nogil=True, cache=True)
def _plane(bits: Any, j: int, plane: Any) -> None:
    shift = _U64(8 * j)
    for i in range(bits.size):
        plane[i] = _U64(bits[i]) >> shift & _U64(255)


@njit(nogil=True, cache=True)
def _join(plane: Any, j: int, bits: Any) -> None:
    shift = _U64(8 * j)
    for i in range(bits.size):
        bits[i] |= _U64(plane[i]) << shift
