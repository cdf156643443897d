"""Live tensors as bit patterns in the published dtype, piece by piece and without a copy of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from deltafmt.addresses import contiguous_strides
from deltafmt.errors import SchemaError
from deltafmt.geometry import Box
from deltafmt.tensors import dtype_name, has_memory, numpy_bits, torch_dtype
from deltafmt.write.cut import PIECE_ELEMENTS, Bits, Cut, Ints, Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where elements of a piece stand in a live tensor: runs of neighbours in memory.

    Run k has `length` elements from element `starts[k]` of the tensor's memory (0 is its first element) and
    from position `positions[k]` of the domain on.
    """

    tensor: torch.Tensor
    starts: Ints
    positions: Ints
    length: int

    @classmethod
    def of(
        cls, tensor: torch.Tensor, box: Box, strides: Sequence[int], offset: int, outer: Box, position: int
    ) -> Place:
        """A box that begins at `offset` of the tensor, and lies in an outer box that begins at `position`."""
        inner = box.shape[-1] if box.shape and strides[-1] == 1 else 1
        counts = (*box.shape[:-1], 1) if inner != 1 else box.shape
        starts, positions = np.array([offset], np.int64), np.array([position], np.int64)
        inside = contiguous_strides(outer.shape)
        positions = positions + sum(
            (a - b) * s for a, b, s in zip(box.start, outer.start, inside, strict=True)
        )
        for count, stride, step in zip(counts, strides, inside, strict=True):
            along = np.arange(count, dtype=np.int64)
            starts = (starts[:, None] + along * stride).reshape(-1)
            positions = (positions[:, None] + along * step).reshape(-1)
        return cls(tensor=tensor, starts=starts, positions=positions, length=inner)


class Source(Protocol):
    """The bits that are to be published."""

    def pieces(self, domain: int) -> Iterator[tuple[Piece, Bits]]:
        """The domain's pieces with their bits: views of live memory, or scratch to be used at once."""


class PlacedBits(Source, Protocol):
    """Bits that stand in tensors of the caller's."""

    def places(self, piece: Piece) -> Iterator[Place]:
        """Where the elements of a piece stand; together all of them, some perhaps twice."""


class GivenSource:
    """Domains whose elements are at hand, by domain, in order of position."""

    def __init__(self, cut: Cut, bits: Mapping[int, Bits]) -> None:
        self._cut, self._bits = cut, bits

    def pieces(self, domain: int) -> Iterator[tuple[Piece, Bits]]:
        """The domain's pieces with their bits: views of what was given."""
        bits = self._bits[domain]
        for piece in self._cut.pieces(domain):
            yield piece, bits[piece.position : piece.position + piece.volume]


class CopiedSource:
    """A detector's copy, as flat bits of each tensor of the schema."""

    def __init__(self, cut: Cut, flats: Sequence[Bits | None]) -> None:
        self._cut, self._flats = cut, flats

    def pieces(self, domain: int) -> Iterator[tuple[Piece, Bits]]:
        """The domain's pieces with their bits: views of the copy, or scratch to be used at once."""
        for piece in self._cut.pieces(domain):
            flat = self._flats[piece.tensor]
            assert flat is not None
            yield piece, piece.copied(flat, self._cut.schema.tensors[piece.tensor].shape)


class LiveSource:
    """The whole tensors of one publish call, by owners' names; they must not change until the call returns.

    Only tensors that the domains asked for have a part of need be there.
    """

    def __init__(self, cut: Cut, tensors: Mapping[str, torch.Tensor]) -> None:
        self._cut = cut
        self._views = [
            _View(tensors[spec.name], spec.dtype) if spec.alias_of is None and spec.name in tensors else None
            for spec in cut.schema
        ]

    def pieces(self, domain: int) -> Iterator[tuple[Piece, Bits]]:
        """The domain's pieces with their bits: views of live memory, or scratch to be used at once."""
        rows = self._cut.tensors_of(domain)
        plain = all((view := self._views[row]) is not None and view.flat is not None for row in rows)
        for piece in self._cut.pieces(domain, most=None if plain else PIECE_ELEMENTS):
            view = self._views[piece.tensor]
            assert view is not None
            yield piece, view.bits(piece)

    def places(self, piece: Piece) -> Iterator[Place]:
        """Where the elements of a piece stand."""
        view = self._views[piece.tensor]
        assert view is not None
        tensor = view.tensor
        if tensor.is_contiguous():
            positions = piece.position + np.arange(len(piece.starts), dtype=np.int64) * piece.length
            yield Place(tensor=tensor, starts=piece.starts, positions=positions, length=piece.length)
        else:
            strides = tensor.stride()
            offset = sum(a * s for a, s in zip(piece.box.start, strides, strict=True))
            yield Place.of(tensor, piece.box, strides, offset, piece.box, piece.position)


class _View:
    """One live tensor. `flat` is its memory as it is, where that is what is published."""

    def __init__(self, tensor: torch.Tensor, dtype: str) -> None:
        self.tensor = tensor
        self._dtype = torch_dtype(dtype)
        direct = tensor.is_contiguous() and tensor.device.type == "cpu" and dtype_name(tensor) == dtype
        self.flat: Bits | None = numpy_bits(tensor).reshape(-1) if direct else None

    def bits(self, piece: Piece) -> Bits:
        if self.flat is not None:
            return piece.take(self.flat, tuple(self.tensor.shape))
        part = self.tensor
        for d, (start, stop) in enumerate(zip(piece.box.start, piece.box.stop, strict=True)):
            part = part.narrow(d, start, stop - start)
        if not part.is_contiguous():
            # Torch casts a NaN to other bits where elements lie apart; how a tensor is cut must not show.
            part = part.contiguous()
        return numpy_bits(part.to("cpu", self._dtype)).reshape(-1)


def check_tensors(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `SchemaError` for a tensor whose elements cannot be read, before anything is written."""
    for name, tensor in tensors.items():
        if not has_memory(tensor):
            raise SchemaError(
                "only a dense tensor that has its elements in memory can be published",
                kind="dtype-mismatch",
                where=f"{name!r}, a {type(tensor).__name__} on {tensor.device}",
            )
        if tensor.is_conj() or tensor.is_neg():
            raise SchemaError(
                "a lazy conjugate or negative view; give tensor.resolve_conj().resolve_neg()",
                kind="dtype-mismatch",
                where=repr(name),
            )
