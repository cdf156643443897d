"""Detected changes as chunks: steps, or all elements where that takes fewer bytes."""

from __future__ import annotations

import math
import threading

import numpy as np
import numpy.typing as npt

from deltafmt.format.chunk import ChunkHead, PackedChunk, pack_chunk
from deltafmt.format.constants import (
    BLOCK,
    CODE,
    DEFAULT_BLOCK_LOG2,
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
from deltafmt.kernels.coder import Scratch, StepCoder, best_shift
from deltafmt.kernels.diff import DiffScratch
from deltafmt.kernels.positions import encode_positions, pack_counts
from deltafmt.kernels.steps import encode_steps, to_planes
from deltafmt.write.crowd import Crowd
from deltafmt.write.cut import Bits, Cut
from deltafmt.write.dense import encode_dense, or_dense
from deltafmt.write.detect import Baseline, Detected, buffers
from deltafmt.write.source import Source

_LISTED_PER_BLOCK = 256
"""Elements that a block should list: fewer, and its counts weigh more than they are worth."""
_LEAST_MEAN = 6
"""Mean entry below which a shift leaves too little for zstd to compress well, and to decode fast."""
_ESCAPE_SHARE = 0.25
"""A chunk of steps of which escapes are more than this share is compared with one of new bits."""
_STEP_COLUMNS = (GAP, LOW, BLOCK, CODE, MAGNITUDE, ESCAPE)
_LOCAL = threading.local()


def encode(
    cut: Cut, source: Source, baseline: Baseline, detected: Detected, scratch: DiffScratch
) -> PackedChunk | None:
    """The smallest chunk that brings the domain from its base to its new bits; None if nothing changed."""
    domain = detected.domain
    if detected.whole:
        return encode_dense(cut, source, domain)
    if not detected.changed:
        return None
    if detected.crowded:
        into = buffers(cut, domain, scratch)
        return Crowd(cut, source, baseline, domain, detected.counted, into).encode()
    listed = encode_step(cut, detected)
    if _escapes(listed) > _ESCAPE_SHARE * listed.nbytes:
        # Values that jump leave byte planes that compress better than whole steps.
        bits = encode_set(cut, domain, detected.positions, detected.new)
        listed = bits if bits.nbytes < listed.nbytes else listed
    return or_dense(cut, source, listed)


def encode_step(cut: Cut, detected: Detected) -> PackedChunk:
    """The changes as steps from the old bits."""
    positions, domain = detected.positions, detected.domain
    head, starts = _head(cut, domain, positions, STEP)
    coder = StepCoder(
        starts, head.shift, head.order, cut.dtype(domain), listed=len(positions), scratch=_scratch()
    )
    coder.add(positions, detected.old, detected.new)
    return pack_chunk(head, dict(zip(_STEP_COLUMNS, coder.columns(), strict=True)))


def encode_given_steps(cut: Cut, domain: int, positions: npt.NDArray[np.uint32], step: Bits) -> PackedChunk:
    """Steps at ascending positions, none of them zero, for whoever knows no bits."""
    head, starts = _head(cut, domain, positions, STEP)
    coded = encode_positions(positions, starts, head.shift)
    steps = encode_steps(step, coded.elements)
    counts = pack_counts(coded.entries, coded.elements, steps.magnitudes, steps.escapes)
    columns = (coded.gap, coded.low, counts, steps.code, steps.magnitude, steps.escape)
    return pack_chunk(head, dict(zip(_STEP_COLUMNS, columns, strict=True)))


def _scratch() -> Scratch:
    """The arrays of the thread that asks."""
    if not hasattr(_LOCAL, "scratch"):
        _LOCAL.scratch = Scratch()
    scratch: Scratch = _LOCAL.scratch
    return scratch


def _escapes(chunk: PackedChunk) -> int:
    """Stored bytes of the escape column."""
    return sum(stored for column, _, stored, *_ in chunk.columns if column == ESCAPE)


def encode_set(cut: Cut, domain: int, positions: npt.NDArray[np.uint32], new: Bits) -> PackedChunk:
    """New bits at ascending positions, for whoever does not know the old ones."""
    head, starts = _head(cut, domain, positions, SET)
    coded = encode_positions(positions, starts, head.shift)
    none = np.zeros_like(coded.entries)
    counts = pack_counts(coded.entries, coded.elements, none, none)
    planes = {PLANE + j: plane for j, plane in enumerate(to_planes(new))}
    return pack_chunk(head, {GAP: coded.gap, LOW: coded.low, BLOCK: counts, **planes})


def _head(
    cut: Cut, domain: int, positions: npt.NDArray[np.uint32], operation: int
) -> tuple[ChunkHead, npt.NDArray[np.int64]]:
    """The head of a chunk that lists these positions, and where its blocks start."""
    block = _block_log2(len(positions), int(cut.tiling.volume[domain]))
    starts = cut.block_starts(domain, block)
    head = ChunkHead(
        domain=domain,
        operation=operation,
        order=cut.order(domain),
        width=cut.width(domain),
        shift=choose_shift(positions, starts),
        block=block,
        listed=len(positions),
    )
    return head, starts


def choose_shift(positions: npt.NDArray[np.uint32], starts: npt.NDArray[np.int64]) -> int:
    """The shift under which positions, to judge by a sample of them, take the fewest bits."""
    mean = int(starts[-1]) / len(positions)
    largest = min(MAX_SHIFT, max(0, int(math.log2(mean / _LEAST_MEAN))))
    return int(best_shift(positions, largest)) if largest else 0


def _block_log2(listed: int, volume: int) -> int:
    """Blocks of the usual size, larger where so little changed that they would be nearly empty."""
    per_block = listed / volume * (1 << DEFAULT_BLOCK_LOG2)
    grow = max(0, math.ceil(math.log2(_LISTED_PER_BLOCK / per_block)))
    return min(MAX_BLOCK_LOG2, DEFAULT_BLOCK_LOG2 + grow)
