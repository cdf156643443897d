"""Codings of BF16 changes: deltafmt's own, and plain re-implementations of what others use.

All of them find changes with the same kernel and compress with the same zstd, so that what differs is the
coding alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numba import njit

from deltafmt.dtypes import SIGN_MAGNITUDE
from deltafmt.format.chunk import ColumnHead, PackedChunk
from deltafmt.format.constants import SET
from deltafmt.kernels import apply as kernel
from deltafmt.kernels.diff import DiffScratch, diff, find
from deltafmt.kernels.digest import zero
from deltafmt.kernels.steps import step_between
from deltafmt.read.decode import DomainShape, decode_chunk
from deltafmt.schema import Schema, TensorSpec
from deltafmt.tiling import make_tiling
from deltafmt.write.cut import Cut
from deltafmt.write.detect import Detected
from deltafmt.write.encode import encode_set, encode_step

Bits = npt.NDArray[Any]
Positions = npt.NDArray[np.uint32]

_FAR = 65
"""Steps in which new bits may take less than the step; about the best border on recorded traces."""
_GO_ON = 0xFFFF
"""A two-byte gap that lists nothing, as long as the others can be."""


@dataclass(frozen=True, kw_only=True)
class Coding:
    """How one run of elements is encoded, and applied to live memory.

    `encode(piece, old, new)` detects and encodes; `apply(piece, stored, live)` decodes and writes.
    """

    name: str
    encode: Callable[[int, Bits, Bits], Any]
    apply: Callable[[int, Any, Bits], None]
    nbytes: Callable[[Any], int]


def cut_flat(elements: int, piece: int) -> Cut:
    """One flat tensor, cut into domains of about `piece` elements."""
    schema = Schema((TensorSpec("all", "bfloat16", (elements,)),))
    return Cut(schema, make_tiling(schema, domain_elements=piece))


def codings(cut: Cut) -> list[Coding]:
    """All codings, for one flat tensor that is coded domain by domain."""
    own = _Own(cut)
    return [
        Coding(name="step", encode=own.step, apply=own.apply, nbytes=_chunk_bytes),
        Coding(name="set", encode=own.set, apply=own.apply, nbytes=_chunk_bytes),
        Coding(name="step + set", encode=own.split, apply=own.apply_both, nbytes=_chunks_bytes),
        Coding(
            name="int32 + bf16",
            encode=partial(_indexed, zstd=False),
            apply=_apply_indexed,
            nbytes=_buffer_bytes,
        ),
        Coding(
            name="int32 + bf16, zstd-1",
            encode=partial(_indexed, zstd=True),
            apply=_apply_indexed,
            nbytes=_buffer_bytes,
        ),
        Coding(name="u16 gap + XOR, zstd-1", encode=_gapped, apply=_apply_gapped, nbytes=_buffer_bytes),
        Coding(name="whole XOR, zstd-1", encode=_whole, apply=_apply_whole, nbytes=_buffer_bytes),
    ]


def _chunk_bytes(stored: PackedChunk) -> int:
    return stored.nbytes


def _chunks_bytes(stored: tuple[PackedChunk, ...]) -> int:
    return sum(map(_chunk_bytes, stored))


def _buffer_bytes(stored: tuple[Any, ...]) -> int:
    """Bytes of the buffers; how many elements they hold is not counted."""
    return sum(len(part) for part in stored if isinstance(part, bytes))


class _Own:
    """The library's chunks, one domain per piece; no digests, which no other coding has."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        table = cut.identity
        self.table = replace(table, counted=np.zeros(len(table.counted), np.bool_))

    def step(self, piece: int, old: Bits, new: Bits) -> PackedChunk:
        positions, before, after = found(old, new)
        return encode_step(
            self.cut,
            Detected(domain=piece, positions=positions, old=before, new=after, result=zero(), base=None),
        )

    def set(self, piece: int, old: Bits, new: Bits) -> PackedChunk:
        positions, _, after = found(old, new)
        return encode_set(self.cut, piece, positions, after)

    def split(self, piece: int, old: Bits, new: Bits) -> tuple[PackedChunk, ...]:
        """Steps, and beside them the new bits of the elements that went far."""
        positions, before, after = found(old, new)
        signed = step_between(before, after, SIGN_MAGNITUDE).view(np.int16).astype(np.int32)
        far = np.abs(signed) >= _FAR
        chunks = []
        if far.any():
            chunks.append(encode_set(self.cut, piece, positions[far], after[far]))
        if not far.all():
            near = Detected(
                domain=piece,
                positions=positions[~far],
                old=before[~far],
                new=after[~far],
                result=zero(),
                base=None,
            )
            chunks.append(encode_step(self.cut, near))
        return tuple(chunks)

    def apply_both(self, piece: int, stored: tuple[PackedChunk, ...], live: Bits) -> None:
        for chunk in stored:
            self.apply(piece, chunk, live)

    def apply(self, piece: int, stored: PackedChunk, live: Bits) -> None:
        rows = self.cut.tiling.box_rows(piece)
        boxes = slice(rows.start, rows.stop)
        volume = self.cut.tiling.box_volume[boxes]
        shape = DomainShape(width=2, box_position=self.cut.tiling.box_position[boxes], box_volume=volume)
        data = memoryview(b"".join(stored.buffers))
        columns = tuple(ColumnHead(*row) for row in stored.columns)
        decoded = decode_chunk(stored.head, columns, data, shape, where="chunk")
        assert decoded.positions is not None
        # The table's addresses count from the model's first element, `live` begins at the piece's.
        first = int(self.table.target_base[self.table.segment_rows(piece).start])
        address = np.array([live.ctypes.data - 2 * first], np.int64)
        view = kernel.DomainView(self.table, piece, address, 2)
        if stored.head.operation == SET:
            kernel.apply_set(view, decoded.positions, decoded.values, None, zero())
        else:
            kernel.apply_step(view, decoded.positions, decoded.values, decoded.order, None, zero())


_LOCAL = threading.local()


def _scratch() -> DiffScratch:
    """The buffers of the thread that asks."""
    if not hasattr(_LOCAL, "scratch"):
        _LOCAL.scratch = DiffScratch()
    scratch: DiffScratch = _LOCAL.scratch
    return scratch


def found(old: Bits, new: Bits) -> tuple[Positions, Bits, Bits]:
    """Positions, old and new bits of what differs, in buffers that the thread uses again for the next piece."""
    into = _scratch().buffers(old.dtype, len(old))
    _, count = find(old, new, 0, 0, into, 0)
    return into[0][:count], into[1][:count], into[2][:count]


def changes(old: Bits, new: Bits) -> tuple[Positions, Bits, Bits]:
    """Positions, old and new bits of what differs."""
    parts = [(np.empty(0, np.uint32), old[:0], new[:0]), *diff(old, new, 0, _scratch())]
    positions, before, after = (np.concatenate(part) for part in zip(*parts, strict=True))
    return positions, before, after


def _compress(data: Bits) -> bytes:
    return bytes(pa.Codec("zstd", compression_level=1).compress(data.view(np.uint8), asbytes=True))


def _decompress(data: bytes, count: int, dtype: str) -> Bits:
    raw = pa.Codec("zstd").decompress(pa.py_buffer(data), count * np.dtype(dtype).itemsize)
    return np.frombuffer(raw, dtype)


def _indexed(_piece: int, old: Bits, new: Bits, *, zstd: bool) -> tuple[Any, ...]:
    positions, _, after = found(old, new)
    if not zstd:
        return len(positions), positions.tobytes(), after.tobytes()
    return len(positions), _compress(positions), _compress(after)


def _apply_indexed(_piece: int, stored: tuple[int, bytes, bytes], live: Bits) -> None:
    count, index, bits = stored
    if len(index) == 4 * count:
        scatter(live, np.frombuffer(index, "<i4"), np.frombuffer(bits, "<u2"))
    else:
        scatter(live, _decompress(index, count, "<i4"), _decompress(bits, count, "<u2"))


def _gapped(_piece: int, old: Bits, new: Bits) -> tuple[Any, ...]:
    positions, before, after = found(old, new)
    gaps = np.empty(len(positions) + len(old) // _GO_ON + 1, np.uint16)
    gaps = gaps[: _to_gaps(positions, gaps)]
    return len(gaps), len(positions), _compress(gaps), _compress(before ^ after)


def _apply_gapped(_piece: int, stored: tuple[int, int, bytes, bytes], live: Bits) -> None:
    entries, count, gaps, bits = stored
    _xor_at_gaps(live, _decompress(gaps, entries, "<u2"), _decompress(bits, count, "<u2"))


def _whole(_piece: int, old: Bits, new: Bits) -> tuple[Any, ...]:
    return len(old), _compress(old ^ new)


def _apply_whole(_piece: int, stored: tuple[int, bytes], live: Bits) -> None:
    np.bitwise_xor(live, _decompress(stored[1], stored[0], "<u2"), out=live)


@njit(nogil=True, cache=True)
def scatter(live: Any, index: Any, bits: Any) -> None:
    """The bare write of values at positions, which everything else is measured by."""
    for k in range(index.size):
        live[index[k]] = bits[k]


@njit(nogil=True, cache=True)
def _to_gaps(positions: Any, gaps: Any) -> int:
    count, previous = 0, np.int64(-1)
    for p in positions:
        gap = np.int64(p) - previous - 1
        previous = np.int64(p)
        while gap >= _GO_ON:
            gaps[count] = _GO_ON
            gap -= _GO_ON
            count += 1
        gaps[count] = gap
        count += 1
    return count


@njit(nogil=True, cache=True)
def _xor_at_gaps(live: Any, gaps: Any, bits: Any) -> None:
    p, k = np.int64(0), 0
    for gap in gaps:
        p += np.int64(gap)
        if gap != _GO_ON:
            live[p] ^= bits[k]
            p += 1
            k += 1
