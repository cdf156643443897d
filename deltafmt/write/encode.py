"""Detected changes as chunks: steps, or all elements where that takes fewer bytes."""

from __future__ import annotations

import math

import numpy as np

from deltafmt.format.chunk import ChunkHead, PackedChunk, pack_chunk
from deltafmt.format.constants import (
    BLOCK,
    CODE,
    DEFAULT_BLOCK_LOG2,
    DENSE,
    ESCAPE,
    GAP,
    LOW,
    MAGNITUDE,
    MAX_BLOCK_LOG2,
    PLANE,
    STEP,
)
from deltafmt.kernels.positions import block_starts, choose_shift, encode_positions, pack_counts
from deltafmt.kernels.steps import encode_steps, step_between, to_planes
from deltafmt.write.cut import Bits, Cut, Piece
from deltafmt.write.detect import Detected
from deltafmt.write.source import LiveSource

_LISTED_PER_BLOCK = 256
"""Elements that a block should list: fewer, and its counts weigh more than they are worth."""
_DENSE_SHARE = 0.25
"""A chunk of steps larger than this share of all bits is compared with a dense one."""


def encode(cut: Cut, source: LiveSource, detected: Detected) -> PackedChunk | None:
    """The smallest chunk that brings the domain from its base to its new bits; None if nothing changed."""
    if detected.dense is not None:
        return encode_dense(cut, detected.domain, detected.dense)
    if not detected.changed:
        return None
    steps = encode_step(cut, detected)
    volume = int(cut.tiling.volume[detected.domain])
    if steps.nbytes <= _DENSE_SHARE * volume * cut.width(detected.domain):
        return steps
    dense = encode_dense(cut, detected.domain, gather(cut, source, detected.domain))
    return dense if dense.nbytes < steps.nbytes else steps


def encode_step(cut: Cut, detected: Detected) -> PackedChunk:
    """The changes as steps from the old bits."""
    domain, positions, tiling = detected.domain, detected.positions, cut.tiling
    rows = tiling.box_rows(domain)
    boxes = slice(rows.start, rows.stop)
    order = cut.order(domain)
    block = _block_log2(len(positions), int(tiling.volume[domain]))
    starts = block_starts(tiling.box_position[boxes], tiling.box_volume[boxes], block)
    shift = choose_shift(positions, starts)
    coded = encode_positions(positions, starts, shift)
    steps = encode_steps(step_between(detected.old, detected.new, order), coded.elements)
    head = ChunkHead(
        domain=domain,
        operation=STEP,
        order=order,
        width=cut.width(domain),
        shift=shift,
        block=block,
        listed=len(positions),
    )
    columns = {
        GAP: coded.gap,
        LOW: coded.low,
        BLOCK: pack_counts(coded.entries, coded.elements, steps.magnitudes, steps.escapes),
        CODE: steps.code,
        MAGNITUDE: steps.magnitude,
        ESCAPE: steps.escape,
    }
    return pack_chunk(head, columns)


def encode_dense(cut: Cut, domain: int, bits: Bits) -> PackedChunk:
    """All elements of a domain."""
    head = ChunkHead(
        domain=domain,
        operation=DENSE,
        order=cut.order(domain),
        width=cut.width(domain),
        shift=0,
        block=0,
        listed=len(bits),
    )
    planes = to_planes(bits)
    return pack_chunk(head, {PLANE + j: plane for j, plane in enumerate(planes)})


def gather(cut: Cut, source: LiveSource, domain: int) -> Bits:
    """All live bits of a domain."""
    bits = np.empty(int(cut.tiling.volume[domain]), cut.dtype(domain))
    piece: Piece
    for piece, part in source.pieces(domain):
        bits[piece.position : piece.position + piece.volume] = part
    return bits


def _block_log2(listed: int, volume: int) -> int:
    """Blocks of the usual size, larger where so little changed that they would be nearly empty."""
    per_block = listed / volume * (1 << DEFAULT_BLOCK_LOG2)
    grow = max(0, math.ceil(math.log2(_LISTED_PER_BLOCK / per_block)))
    return min(MAX_BLOCK_LOG2, DEFAULT_BLOCK_LOG2 + grow)
