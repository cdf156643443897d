"""Whole domains, and the choice of a whole domain where that is smaller."""

from __future__ import annotations

from typing import overload

import numpy as np

from deltafmt.format.chunk import ChunkHead, ChunkPacker, PackedChunk
from deltafmt.format.constants import DENSE, PLANE
from deltafmt.kernels.steps import plane_of
from deltafmt.write.cut import Cut
from deltafmt.write.source import Source

_DENSE_SHARE = 0.25
"""A chunk larger than this share of all bits is compared with a dense one."""


@overload
def encode_dense(cut: Cut, source: Source, domain: int) -> PackedChunk: ...
@overload
def encode_dense(cut: Cut, source: Source, domain: int, *, below: int) -> PackedChunk | None: ...


def encode_dense(cut: Cut, source: Source, domain: int, *, below: int | None = None) -> PackedChunk | None:
    """All elements of a domain, one byte plane in memory at a time; None unless that is below some bytes."""
    head = _head(cut, domain)
    packer, plane = ChunkPacker(), np.empty(head.listed, np.uint8)
    for j in range(head.width):
        for piece, bits in source.pieces(domain):
            plane_of(bits, j, plane[piece.position : piece.position + piece.volume])
        packer.add(PLANE + j, plane)
        if below is not None and packer.nbytes >= below:
            return None
    return packer.packed(head)


def _head(cut: Cut, domain: int) -> ChunkHead:
    return ChunkHead(
        domain=domain,
        operation=DENSE,
        order=cut.order(domain),
        width=cut.width(domain),
        shift=0,
        block=0,
        listed=int(cut.tiling.volume[domain]),
    )


def or_dense(cut: Cut, source: Source, chunk: PackedChunk) -> PackedChunk:
    """The chunk, or a dense one of its domain where that is smaller."""
    domain = chunk.head.domain
    if chunk.nbytes <= _DENSE_SHARE * int(cut.tiling.volume[domain]) * cut.width(domain):
        return chunk
    return encode_dense(cut, source, domain, below=chunk.nbytes) or chunk
