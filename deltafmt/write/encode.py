"""Detected changes as chunks: steps, or all elements where that takes fewer bytes."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from deltafmt.format.chunk import ChunkHead, PackedChunk, pack_chunk
from deltafmt.format.codec import compress
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
    MAX_SHIFT,
    PLANE,
    SET,
    STEP,
)
from deltafmt.kernels.positions import CodedPositions, block_starts, encode_positions, pack_counts
from deltafmt.kernels.steps import encode_steps, step_between, to_planes
from deltafmt.write.cut import Bits, Cut, Piece
from deltafmt.write.detect import Detected
from deltafmt.write.source import LiveSource

_LISTED_PER_BLOCK = 256
"""Elements that a block should list: fewer, and its counts weigh more than they are worth."""
_PLAIN_GAP = 180
"""Mean distance of listed elements below which single bytes need no shift."""
_SAMPLE = 8192
"""Elements on which shifts are tried out."""
_ESCAPE_SHARE = 0.25
"""A chunk of steps of which escapes are more than this share is compared with one of new bits."""
_DENSE_SHARE = 0.25
"""A chunk of steps larger than this share of all bits is compared with a dense one."""


def encode(cut: Cut, source: LiveSource, detected: Detected) -> PackedChunk | None:
    """The smallest chunk that brings the domain from its base to its new bits; None if nothing changed."""
    if detected.dense is not None:
        return encode_dense(cut, detected.domain, detected.dense)
    if not detected.changed:
        return None
    steps = encode_step(cut, detected)
    if _escapes(steps) > _ESCAPE_SHARE * steps.nbytes:
        # Values that jump leave byte planes that compress better than whole steps.
        bits = encode_set(cut, detected.domain, detected.positions, detected.new)
        steps = bits if bits.nbytes < steps.nbytes else steps
    volume = int(cut.tiling.volume[detected.domain])
    if steps.nbytes <= _DENSE_SHARE * volume * cut.width(detected.domain):
        return steps
    dense = encode_dense(cut, detected.domain, gather(cut, source, detected.domain))
    return dense if dense.nbytes < steps.nbytes else steps


def encode_step(cut: Cut, detected: Detected) -> PackedChunk:
    """The changes as steps from the old bits."""
    domain, order = detected.domain, cut.order(detected.domain)
    head, coded = _positions(cut, domain, detected.positions, STEP)
    steps = encode_steps(step_between(detected.old, detected.new, order), coded.elements)
    counts = pack_counts(coded.entries, coded.elements, steps.magnitudes, steps.escapes)
    columns = {CODE: steps.code, MAGNITUDE: steps.magnitude, ESCAPE: steps.escape}
    return pack_chunk(head, {GAP: coded.gap, LOW: coded.low, BLOCK: counts, **columns})


def _escapes(chunk: PackedChunk) -> int:
    """Stored bytes of the escape column."""
    return sum(stored for column, _, stored, *_ in chunk.columns if column == ESCAPE)


def encode_set(cut: Cut, domain: int, positions: npt.NDArray[np.uint32], new: Bits) -> PackedChunk:
    """New bits at ascending positions, for whoever does not know the old ones."""
    head, coded = _positions(cut, domain, positions, SET)
    none = np.zeros_like(coded.entries)
    counts = pack_counts(coded.entries, coded.elements, none, none)
    planes = {PLANE + j: plane for j, plane in enumerate(to_planes(new))}
    return pack_chunk(head, {GAP: coded.gap, LOW: coded.low, BLOCK: counts, **planes})


def _positions(
    cut: Cut, domain: int, positions: npt.NDArray[np.uint32], operation: int
) -> tuple[ChunkHead, CodedPositions]:
    rows = cut.tiling.box_rows(domain)
    boxes = slice(rows.start, rows.stop)
    block = _block_log2(len(positions), int(cut.tiling.volume[domain]))
    starts = block_starts(cut.tiling.box_position[boxes], cut.tiling.box_volume[boxes], block)
    shift = choose_shift(positions, starts)
    head = ChunkHead(
        domain=domain,
        operation=operation,
        order=cut.order(domain),
        width=cut.width(domain),
        shift=shift,
        block=block,
        listed=len(positions),
    )
    return head, encode_positions(positions, starts, shift)


def choose_shift(positions: npt.NDArray[np.uint32], starts: npt.NDArray[np.int64]) -> int:
    """The shift under which a sample of the positions takes the fewest bytes, compressed as they will be.

    No shift where that costs nothing: plain gaps decode faster.
    """
    mean = int(starts[-1]) / len(positions)
    if mean < _PLAIN_GAP:
        return 0
    sample = positions[:_SAMPLE]
    part = starts[: int(np.searchsorted(starts, sample[-1], "right")) + 1]
    least = min(MAX_SHIFT, max(0, int(math.log2(mean / 128))))
    return min(
        range(least, min(MAX_SHIFT, least + 2) + 1), key=lambda shift: _sample_bytes(sample, part, shift)
    )


def _sample_bytes(sample: npt.NDArray[np.uint32], starts: npt.NDArray[np.int64], shift: int) -> int:
    coded = encode_positions(sample, starts, shift)
    return len(compress(coded.gap)[1]) + len(coded.low)


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
