"""Stored chunks to changes: positions with steps or new bits, or all elements of a domain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltafmt.errors import FormatError
from deltafmt.format.chunk import ChunkHead, ColumnHead, unpack_chunk
from deltafmt.format.constants import BLOCK, CODE, DENSE, ESCAPE, GAP, LOW, MAGNITUDE, PLANE, SET
from deltafmt.kernels.positions import (
    Positions,
    block_starts,
    count_blocks,
    decode_positions,
    unpack_counts,
)
from deltafmt.kernels.steps import CodedSteps, decode_steps, from_planes
from deltafmt.tiling import Tiling

_EMPTY = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainShape:
    """What decoding needs to know of a domain: element width, and start and volume of each box."""

    width: int
    box_position: npt.NDArray[np.int64]
    box_volume: npt.NDArray[np.int64]

    @property
    def volume(self) -> int:
        return int(self.box_volume.sum())

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(f"<u{self.width}")


def domain_shape(tiling: Tiling, domain: int) -> DomainShape:
    """Of one domain of a tiling."""
    rows = slice(int(tiling.domain_box[domain]), int(tiling.domain_box[domain + 1]))
    return DomainShape(
        width=int(tiling.widths[domain]),
        box_position=tiling.box_position[rows],
        box_volume=tiling.box_volume[rows],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """One chunk's content.

    `positions` ascend strictly and are None for `dense`; `values` are steps for `step`, else new bits.
    """

    operation: int
    order: int
    positions: Positions | None
    values: npt.NDArray[Any]


def decode_chunk(
    head: ChunkHead, columns: tuple[ColumnHead, ...], data: memoryview, shape: DomainShape, *, where: object
) -> Decoded:
    """Decode a chunk, strictly: `FormatError` for whatever does not fit the domain."""
    if head.operation == DENSE:
        raw = unpack_chunk(head, columns, data, volume=shape.volume, blocks=0, where=where)
        values = from_planes([raw[PLANE + j] for j in range(shape.width)], shape.dtype)
        return Decoded(operation=DENSE, order=head.order, positions=None, values=values)
    blocks = count_blocks(shape.box_volume, head.block)
    raw = unpack_chunk(head, columns, data, volume=shape.volume, blocks=blocks, where=where)
    entries, elements, magnitudes, escapes = unpack_counts(raw[BLOCK])
    positions = decode_positions(
        raw[GAP],
        raw.get(LOW, _EMPTY),
        entries,
        elements,
        starts=block_starts(shape.box_position, shape.box_volume, head.block),
        shift=head.shift,
        listed=head.listed,
        where=where,
    )
    if head.operation == SET:
        if magnitudes.any() or escapes.any():
            raise FormatError("a set chunk counts magnitudes", kind="block-counts", where=where)
        values = from_planes([raw[PLANE + j] for j in range(shape.width)], shape.dtype)
    else:
        coded = CodedSteps(
            code=raw[CODE],
            magnitude=raw.get(MAGNITUDE, _EMPTY),
            escape=raw.get(ESCAPE, _EMPTY),
            magnitudes=magnitudes,
            escapes=escapes,
        )
        values = decode_steps(coded, elements, listed=head.listed, dtype=shape.dtype, where=where)
    return Decoded(operation=head.operation, order=head.order, positions=positions, values=values)
