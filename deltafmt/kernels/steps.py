"""Steps between bit patterns: differences in an order in which neighbouring values are one apart.

A step of width W is kept as an unsigned integer of that width, modulo 2^(8 W).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from deltafmt.errors import FormatError
from deltafmt.kernels.intrinsics import width_of
from deltafmt.kernels.positions import Bytes, Counts

Bits = npt.NDArray[Any]

_U64 = np.uint64
_ONE, _ZERO = np.uint64(1), np.uint64(0)
_ESCAPE = 255
_LEAST_ESCAPE = 257
_LARGER = np.uint64(0xAA)
"""The upper bit of each of the four codes in a byte."""

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
    sign = sign_bit(width_of(old))
    mask = (sign - _ONE) | sign
    for i in range(old.size):
        key = (to_key(_U64(old[i]), sign, mask, order) + _U64(step[i])) & mask
        new[i] = from_key(key, sign, mask, order)


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
    escape = coded.escape
    fits = len(escape) % dtype.itemsize == 0
    counts = int(coded.magnitudes.sum(dtype=np.int64)), int(coded.escapes.sum(dtype=np.int64))
    if not fits or counts != (len(coded.magnitude), len(escape) // dtype.itemsize):
        raise FormatError("block counts disagree with the columns", kind="block-counts", where=where)
    step = np.empty(listed, dtype)
    # A raw column may start anywhere in its buffer.
    words = np.frombuffer(escape.tobytes(), dtype)
    # One byte more, so that the loop may look at the next magnitude before it knows whether there is one.
    magnitude = np.concatenate((coded.magnitude, np.zeros(1, np.uint8)))
    status, block = _decode(coded.code, magnitude, words, elements, coded.magnitudes, coded.escapes, step)
    if status == 0 and listed % 4 and coded.code[-1] >> (2 * (listed % 4)):
        status, block = 4, len(elements) - 1
    if status:
        raise FormatError("steps cannot be decoded", kind=_REASONS[status], where=f"{where}, block {block}")
    return step


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


@njit(nogil=True, cache=True)
def _decode(
    code: Any, magnitude: Any, escape: Any, elements: Any, magnitudes: Any, escapes: Any, step: Any
) -> Any:
    sign = sign_bit(width_of(step))
    mask = (sign - _ONE) | sign
    i, m, e = _ZERO, _ZERO, _ZERO
    for block in range(elements.size):
        last_m, last_e = m + _U64(magnitudes[block]), e + _U64(escapes[block])
        end = i + _U64(elements[block])
        while i < end:
            byte_of_codes = _U64(code[i >> _U64(2)])
            if i & _U64(3) == _ZERO and i + _U64(4) <= end and byte_of_codes & _LARGER == _ZERO:
                # Most bytes of codes are four single steps, up or down.
                for j in range(4):
                    down = byte_of_codes >> _U64(2 * j) & _ONE
                    step[i + _U64(j)] = (_ONE ^ (_ZERO - down)) + down
                i += _U64(4)
                continue
            two = byte_of_codes >> (_U64(2) * (i & _U64(3)))
            larger = (two >> _ONE) & _ONE
            # The block's counts were summed up before, so that the last place is the padding's.
            byte = _U64(magnitude[min(m, last_m)])
            size = _ONE + larger * (byte + _ONE)
            if larger and (byte == _U64(_ESCAPE) or size + (_ONE ^ (two & _ONE)) > sign or m == last_m):
                if m == last_m:
                    return 1, block
                if byte != _U64(_ESCAPE):
                    # Only bytes: eight bits hold -128 to 127.
                    return 2, block
                if e == last_e:
                    return 1, block
                d = _U64(escape[e])
                size = (_ZERO - d) & mask if d & sign else d
                if size < _U64(_LEAST_ESCAPE):
                    return 2, block
                if (d & sign != _ZERO) != (two & _ONE != _ZERO):
                    return 3, block
                e += _ONE
            m += larger
            step[i] = (size ^ (_ZERO - (two & _ONE))) + (two & _ONE)
            i += _ONE
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
