"""Domains of which so much changed that the changes are not held, but found anew for each column."""

from __future__ import annotations

from collections.abc import Iterator

from deltafmt.format.chunk import ChunkHead, ChunkPacker, PackedChunk
from deltafmt.format.constants import (
    BLOCK,
    CODE,
    DEFAULT_BLOCK_LOG2,
    ESCAPE,
    GAP,
    LOW,
    MAGNITUDE,
    PLANE,
    SET,
    STEP,
)
from deltafmt.kernels.coder import PositionCoder, Scratch, StepCoder
from deltafmt.kernels.steps import plane_of
from deltafmt.write.cut import Cut
from deltafmt.write.dense import encode_dense, or_dense
from deltafmt.write.detect import Baseline, Found, changes
from deltafmt.write.source import Source

_JUMPS = 4
"""Where more than one change in so many is an escape, steps take more bytes than new bits."""

_NEARLY_ALL = 7 / 8
"""From this share on, new bits with their positions take more than all bits."""


class Crowd:
    """The `listed` changes of one domain, part by part; `into` is where a part is held."""

    def __init__(
        self, cut: Cut, source: Source, baseline: Baseline, domain: int, listed: int, into: Found
    ) -> None:
        self._cut, self._source, self._baseline = cut, source, baseline
        self._domain, self._listed, self._into = domain, listed, into
        self._volume = int(cut.tiling.volume[domain])
        self._starts = cut.block_starts(domain, DEFAULT_BLOCK_LOG2)
        # Several times what a thread should keep for good.
        self._scratch = Scratch()

    def encode(self) -> PackedChunk:
        """The smallest chunk; where most changes are too far for steps, it is chosen by their number."""
        step = self._step()
        if step is not None:
            return or_dense(self._cut, self._source, step)
        if self._listed >= _NEARLY_ALL * self._volume:
            return encode_dense(self._cut, self._source, self._domain)
        return self._set()

    def _parts(self) -> Iterator[Found]:
        position, old, new = self._into
        for _, start, stop in changes(self._cut, self._source, self._baseline, self._domain, self._into):
            yield position[start:stop], old[start:stop], new[start:stop]

    def _step(self) -> PackedChunk | None:
        order, dtype = self._cut.order(self._domain), self._cut.dtype(self._domain)
        coder = StepCoder(self._starts, 0, order, dtype, listed=self._listed, scratch=self._scratch)
        for part in self._parts():
            coder.add(*part)
            if _JUMPS * coder.escapes > coder.listed:
                return None
        packer = ChunkPacker()
        for column, raw in zip((GAP, LOW, BLOCK, CODE, MAGNITUDE, ESCAPE), coder.columns(), strict=True):
            packer.add(column, raw)
        return packer.packed(self._head(STEP))

    def _set(self) -> PackedChunk:
        coder = PositionCoder(self._starts, 0, listed=self._listed, scratch=self._scratch)
        for positions, _, _ in self._parts():
            coder.add(positions)
        packer = ChunkPacker()
        for column, raw in zip((GAP, LOW, BLOCK), coder.columns(), strict=True):
            packer.add(column, raw)
        # The gaps are stored: their place serves the planes.
        plane = self._scratch.take("gap", self._listed)
        for j in range(self._cut.width(self._domain)):
            at = 0
            for positions, _, new in self._parts():
                plane_of(new, j, plane[at : at + len(positions)])
                at += len(positions)
            packer.add(PLANE + j, plane[: self._listed])
        return packer.packed(self._head(SET))

    def _head(self, operation: int) -> ChunkHead:
        return ChunkHead(
            domain=self._domain,
            operation=operation,
            order=self._cut.order(self._domain),
            width=self._cut.width(self._domain),
            shift=0,
            block=DEFAULT_BLOCK_LOG2,
            listed=self._listed,
        )
