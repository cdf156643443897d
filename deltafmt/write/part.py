"""One rank's part of a version: where it stands in local tensors, and in the rank's copy of the base."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch

from deltafmt.addresses import contiguous_strides
from deltafmt.errors import IncompleteError
from deltafmt.geometry import Box
from deltafmt.kernels.digest import Digest, zero
from deltafmt.layout import Layout, Placement
from deltafmt.tensors import numpy_bits, torch_dtype
from deltafmt.write.cut import PIECE_ELEMENTS, Bits, Cut, Piece
from deltafmt.write.detect import add_piece
from deltafmt.write.pack import in_order
from deltafmt.write.source import LiveSource, Place, PlacedBits


class PlacedSource:
    """Local tensors of one publish call, seen through the rank's layout."""

    def __init__(self, cut: Cut, tensors: Mapping[str, torch.Tensor], layout: Layout) -> None:
        self._cut = cut
        self._tensors = tensors
        self._places: dict[int, list[Placement]] = defaultdict(list)
        for placement in layout.placements:
            spec = cut.schema.resolve(placement.source)
            self._places[cut.schema.index(spec.name)].append(placement)

    def pieces(self, domain: int) -> Iterator[tuple[Piece, Bits]]:
        """The domain's pieces with their bits: views of live memory, or scratch to be used at once."""
        for piece in self._cut.pieces(domain, most=PIECE_ELEMENTS):
            yield piece, self._bits(piece)

    def _bits(self, piece: Piece) -> Bits:
        dtype = torch_dtype(self._cut.schema.tensors[piece.tensor].dtype)
        parts = list(self._parts(piece))
        if len(parts) == 1 and parts[0][0] == piece.box:
            return _cast(parts[0][1], dtype).reshape(-1)
        # The ranks' borders cut, but neighbouring placements of one rank may lie in one box, and a rank may
        # have an element twice.
        whole = numpy_bits(torch.empty(piece.box.shape, dtype=dtype))
        found = [(_within(box, piece.box).slices(), _cast(part, dtype)) for box, part in parts]
        for place, bits in found:
            whole[place] = bits
        if any((whole[place] != bits).any() for place, bits in found):
            raise IncompleteError(
                "a rank holds one part of a tensor twice, with different bits",
                kind="replicas-differ",
                where=f"{self._cut.schema.names[piece.tensor]!r} {piece.box.start} to {piece.box.stop}",
            )
        return whole.reshape(-1)

    def places(self, piece: Piece) -> Iterator[Place]:
        """Where the elements of a piece stand."""
        for box, p, offset in self._held(piece):
            yield Place.of(self._tensors[p.target], box, p.strides, offset, piece.box, piece.position)

    def _parts(self, piece: Piece) -> Iterator[tuple[Box, torch.Tensor]]:
        for box, p, offset in self._held(piece):
            tensor = self._tensors[p.target]
            yield box, tensor.as_strided(box.shape, p.strides, tensor.storage_offset() + offset)

    def _held(self, piece: Piece) -> Iterator[tuple[Box, Placement, int]]:
        """Parts of a piece, with the placement that has them and where they begin in its target."""
        for p in self._places[piece.tensor]:
            box = p.source_box.intersect(piece.box)
            if box is None:
                continue
            inside = zip(box.start, p.source_box.start, p.strides, strict=True)
            yield box, p, p.offset + sum((a - b) * s for a, b, s in inside)


def _cast(part: torch.Tensor, dtype: torch.dtype) -> Bits:
    # Torch casts a NaN to other bits where elements lie apart; how a rank holds a tensor must not show.
    return numpy_bits(part.contiguous().to("cpu", dtype))


def _within(box: Box, outer: Box) -> Box:
    start = tuple(a - b for a, b in zip(box.start, outer.start, strict=True))
    return Box(start, tuple(a + n for a, n in zip(start, box.shape, strict=True)))


def part_source(cut: Cut, tensors: Mapping[str, torch.Tensor], layout: Layout | None) -> PlacedBits:
    """Local tensors as a source: through a layout, or as whole tensors by any of their names."""
    if layout is not None:
        return PlacedSource(cut, tensors, layout)
    return LiveSource(cut, {cut.schema.resolve(name).name: tensor for name, tensor in tensors.items()})


def live_digests(cut: Cut, source: PlacedBits, domains: Iterable[int], threads: int) -> dict[int, Digest]:
    """Digests of domains of the live tensors."""

    def work(domain: int) -> tuple[int, Digest]:
        total = zero()
        for piece, bits in source.pieces(domain):
            add_piece(cut, piece, bits, total)
        return domain, total

    return dict(in_order(work, domains, threads))


def copy_layout(cut: Cut, names: Iterable[str]) -> Layout:
    """Where the elements of the named tensors stand in the copy of a rank's own part."""
    assert cut.part is not None
    wanted = {cut.schema.index(name) for name in names}
    placements = []
    for row in np.flatnonzero(cut.part.box_place >= 0).tolist():
        tensor, box = cut.tiling.box(row, cut.schema)
        if tensor in wanted:
            name, place = cut.schema.tensors[tensor].name, int(cut.part.box_place[row])
            placements.append(Placement(name, box, name, place, contiguous_strides(box.shape)))
    return Layout(placements)
