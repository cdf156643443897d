"""A schema with its tiling, seen box by box in canonical order: what detection and encoding walk over."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from deltafmt.addresses import contiguous_strides
from deltafmt.format.objects import digest_of_schema, digest_of_tiling
from deltafmt.geometry import Box
from deltafmt.kernels.positions import block_starts
from deltafmt.layout import Layout, TargetInfo
from deltafmt.schema import Schema
from deltafmt.segments import SegmentTable, make_segments, tensor_salt
from deltafmt.tiling import Tiling

Bits = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

PIECE_ELEMENTS = 1 << 19
"""Elements that are gathered or cast at a time, so that scratch memory stays in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a domain that lies in one box: `[position, position + volume)` of the domain.

    It is made of runs of canonical order, each `length` elements long; `starts` are their canonical flat
    indices. One run (the usual case) is a slice of the flat tensor. `local` is its first element in a copy
    that holds only a rank's own part of the tensor; None where the copy holds all of it.
    """

    tensor: int
    position: int
    box: Box
    starts: Ints
    length: int
    local: int | None = None

    @property
    def volume(self) -> int:
        return len(self.starts) * self.length

    @property
    def is_run(self) -> bool:
        return len(self.starts) == 1

    def flat(self, positions: npt.NDArray[np.uint32]) -> Ints:
        """Canonical flat indices of positions of the domain that lie in the piece."""
        inside = positions.astype(np.int64) - self.position
        if self.is_run:
            inside += self.starts[0]
            return inside
        row, column = np.divmod(inside, self.length)
        return self.starts[row] + column

    def take(self, flat: Bits, shape: tuple[int, ...]) -> Bits:
        """The piece's elements, in order, out of a tensor's flat array: a view of it where that can be."""
        if self.is_run:
            first = int(self.starts[0])
            return flat[first : first + self.length]
        return np.ascontiguousarray(flat.reshape(shape)[_slices(self.box)]).reshape(-1)

    def copied(self, flat: Bits, shape: tuple[int, ...]) -> Bits:
        """The piece's elements, in order, out of a copy of the tensor; a view for a run or a rank's own part."""
        if self.local is None:
            return self.take(flat, shape)
        return flat[self.local : self.local + self.volume]

    def place(self, positions: npt.NDArray[np.uint32]) -> Ints:
        """Where positions of the domain that lie in the piece stand in a copy of the tensor."""
        if self.local is None:
            return self.flat(positions)
        return positions.astype(np.int64) + (self.local - self.position)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank owns of a cut, and where it stands in the rank's copy: tensor by tensor, one flat array
    each, box behind box.

    `domains` ascend; `box_place` is the first element of each owned box in its tensor's copy (-1: not
    owned), `sizes` the elements that the copy has of each tensor.
    """

    domains: Ints
    box_place: Ints
    sizes: Ints

    @classmethod
    def of(cls, tiling: Tiling, tensors: int, domains: Ints) -> Part:
        """The part of the given domains of a tiling, of a schema of so many tensors."""
        own = np.isin(tiling.domains_of_boxes(), domains)
        rows = np.flatnonzero(own)
        rows = rows[np.argsort(tiling.box_tensor[rows], kind="stable")]
        tensor, volume = tiling.box_tensor[rows], tiling.box_volume[rows]
        before = np.cumsum(volume) - volume
        sizes = np.zeros(tensors, np.int64)
        np.add.at(sizes, tensor, volume)
        place = np.full(len(own), -1, np.int64)
        place[rows] = before - (np.cumsum(sizes) - sizes)[tensor]
        return cls(domains=np.sort(domains), box_place=place, sizes=sizes)


@dataclass(frozen=True)
class Cut:
    """A schema and a tiling, with the digests that name them; with `part`, one rank's share of them."""

    schema: Schema
    tiling: Tiling
    part: Part | None = None
    schema_digest: bytes = field(init=False)
    tiling_digest: bytes = field(init=False)
    _pieces: dict[tuple[int, int | None], tuple[Piece, ...]] = field(init=False, default_factory=dict)
    _starts: dict[tuple[int, int], Ints] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "schema_digest", digest_of_schema(self.schema))
        object.__setattr__(self, "tiling_digest", digest_of_tiling(self.tiling, self.schema))

    def __len__(self) -> int:
        return len(self.tiling)

    @property
    def domains(self) -> list[int]:
        """The domains that are detected and stored here, ascending."""
        return list(range(len(self))) if self.part is None else self.part.domains.tolist()

    def copy_shape(self, row: int) -> tuple[int, ...]:
        """Shape of the copy of a tensor."""
        return self.schema.tensors[row].shape if self.part is None else (int(self.part.sizes[row]),)

    def width(self, domain: int) -> int:
        return int(self.tiling.widths[domain])

    def dtype(self, domain: int) -> np.dtype[Any]:
        """Unsigned type of the domain's elements."""
        return np.dtype(f"<u{self.width(domain)}")

    def order(self, domain: int) -> int:
        """Order id in which steps of the domain are counted: that of its first tensor."""
        first = int(self.tiling.box_tensor[self.tiling.domain_box[domain]])
        return self.schema.tensors[first].element.order_id

    def block_starts(self, domain: int, block_log2: int) -> Ints:
        """First position of every block of a domain, and behind them its volume. Kept, as pieces are."""
        key = (domain, block_log2)
        if key not in self._starts:
            rows = self.tiling.box_rows(domain)
            boxes = slice(rows.start, rows.stop)
            self._starts[key] = block_starts(
                self.tiling.box_position[boxes], self.tiling.box_volume[boxes], block_log2
            )
        return self._starts[key]

    def tensors_of(self, domain: int) -> list[int]:
        """Rows of the tensors that have a part in the domain."""
        return list(dict.fromkeys(piece.tensor for piece in self.pieces(domain)))

    def pieces(self, domain: int, *, most: int | None = None) -> tuple[Piece, ...]:
        """The domain in order of position; pieces that are no single run have at most `PIECE_ELEMENTS`.

        With `most`, no piece is larger than that. Kept, since every version walks over the same ones.
        """
        key = (domain, most)
        if key not in self._pieces:
            self._pieces[key] = tuple(self._cut_pieces(domain, most))
        return self._pieces[key]

    def _cut_pieces(self, domain: int, most: int | None) -> Iterator[Piece]:
        for row in self.tiling.box_rows(domain):
            tensor, box = self.tiling.box(row, self.schema)
            position = int(self.tiling.box_position[row])
            shape = self.schema.tensors[tensor].shape
            place = -1 if self.part is None else int(self.part.box_place[row])
            limit = PIECE_ELEMENTS if most is None and not _is_run(box, shape) else most
            for part in _parts(box, limit):
                starts, length = _runs(part, shape)
                yield Piece(
                    tensor=tensor,
                    position=position,
                    box=part,
                    starts=starts,
                    length=length,
                    local=place if place >= 0 else None,
                )
                position += part.volume
                place += part.volume if place >= 0 else 0

    @cached_property
    def salts(self) -> list[tuple[int, int]]:
        """Digest salt of each tensor of the schema."""
        return [tensor_salt(spec.name) for spec in self.schema]

    @cached_property
    def identity(self) -> SegmentTable:
        """Segments of flat tensors that hold the whole schema, as a baseline does; targets in schema order."""
        targets = {
            self.schema.tensors[row].name: TargetInfo(
                self.schema.tensors[row].dtype,
                self.schema.tensors[row].shape,
                contiguous_strides(self.schema.tensors[row].shape),
            )
            for row in self.schema.owners
        }
        return make_segments(self.schema, self.tiling, Layout.identity(self.schema, targets), targets)


def _is_run(box: Box, shape: tuple[int, ...]) -> bool:
    return len(_runs(box, shape)[0]) == 1


def _runs(box: Box, shape: tuple[int, ...]) -> tuple[Ints, int]:
    """(canonical index of each run, run length) of a box of a tensor."""
    strides = contiguous_strides(shape)
    inner = len(shape)
    length = 1
    # The last dimensions that the box spans whole, and one more, make up a run.
    while inner and (inner == len(shape) or box.shape[inner] == shape[inner]):
        inner -= 1
        length *= box.shape[inner]
    starts = np.array([sum(a * s for a, s in zip(box.start, strides, strict=True))], np.int64)
    for d in range(inner):
        starts = (starts[:, None] + np.arange(box.shape[d], dtype=np.int64) * strides[d]).reshape(-1)
    return starts, length


def _parts(box: Box, limit: int | None) -> Iterator[Box]:
    """The box cut along its first dimensions, in row-major order, into parts of at most `limit` elements."""
    if limit is None or box.volume <= limit:
        yield box
        return
    d = next(k for k, extent in enumerate(box.shape) if extent > 1)
    extent = box.shape[d]
    rows = max(1, limit // (box.volume // extent))
    for low, high in itertools.pairwise([*range(0, extent, rows), extent]):
        start = (*box.start[:d], box.start[d] + low, *box.start[d + 1 :])
        stop = (*box.stop[:d], box.start[d] + high, *box.stop[d + 1 :])
        yield from _parts(Box(start, stop), limit)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(itertools.starmap(slice, zip(box.start, box.stop, strict=True)))
