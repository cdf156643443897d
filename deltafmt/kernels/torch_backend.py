"""The kernels of `apply` for tensors on any device that torch knows.

Only the elements concerned cross to the CPU and back; what is computed there is the same code, so that
both back ends agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltafmt.kernels import apply as cpu
from deltafmt.kernels.digest import Digest, multipliers
from deltafmt.kernels.positions import Positions
from deltafmt.kernels.steps import add_step
from deltafmt.segments import SegmentTable

Bits = npt.NDArray[Any]

_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


class TorchView:
    """One domain's rows of a segment table, with its targets as flat integer tensors.

    `flats[t]` shows the memory of target t from its first element on, as signed integers of its width.
    """

    __slots__ = ("flats", "view")

    def __init__(
        self, table: SegmentTable, domain: int, flats: Sequence[torch.Tensor | None], width: int
    ) -> None:
        # Addresses count from zero, so that dividing by the element's bytes gives indices into the tensor.
        self.view = cpu.DomainView(table, domain, np.zeros(len(flats), np.int64), width)
        rows = table.segment_rows(domain)
        self.flats = [flats[target] for target in table.target[rows.start : rows.stop].tolist()]

    def restricted(self, chosen: npt.NDArray[np.bool_]) -> TorchView:
        """As `DomainView.restricted`."""
        kept = [flat for flat, keep in zip(self.flats, chosen.tolist(), strict=True) if keep]
        return self._with(self.view.restricted(chosen), kept)

    def _with(self, view: cpu.DomainView, flats: list[torch.Tensor | None]) -> TorchView:
        result = object.__new__(TorchView)
        result.view, result.flats = view, flats
        return result

    def segments(self) -> Iterator[tuple[int, int, int, torch.Tensor]]:
        """(row, first position and volume of its box, memory) of each segment."""
        position, volume, first = self.view.arguments[:3]
        for box in range(len(position)):
            for row in range(int(first[box]), int(first[box + 1])):
                flat = self.flats[row]
                assert flat is not None
                yield row, int(position[box]), int(volume[box]), flat


def apply_set(view: TorchView, positions: Positions, bits: Bits, old: Bits | None, digest: Digest) -> None:
    """As `apply.apply_set`."""
    _apply(view, positions, lambda _, entry: bits[entry], bits.dtype, old, digest)


def apply_step(
    view: TorchView, positions: Positions, step: Bits, order: int, old: Bits | None, digest: Digest
) -> None:
    """As `apply.apply_step`."""
    _apply(
        view, positions, lambda before, entry: add_step(before, step[entry], order), step.dtype, old, digest
    )


def apply_dense(view: TorchView, bits: Bits) -> None:
    """As `apply.apply_dense`."""
    for row, position, volume, flat in view.segments():
        here = bits[position : position + volume].reshape(view.view.arguments[3][row])[_held(view, row)]
        _live(view, row, flat).copy_(_to_torch(_widened(here, flat)))


def gather_dense(view: TorchView, bits: Bits) -> None:
    """As `apply.gather_dense`."""
    for row, position, volume, flat in view.segments():
        here = bits[position : position + volume].reshape(view.view.arguments[3][row])
        here[_held(view, row)] = _read(view, row, flat, bits.dtype)


def scan(view: TorchView, like: Bits) -> cpu.Sums:
    """As `apply.scan`."""
    sums = np.zeros((len(view.flats), 2), np.uint64)
    for row, _, _, flat in view.segments():
        if not view.view.arguments[10][row]:
            continue
        values = np.ascontiguousarray(_read(view, row, flat, like.dtype))
        strides = np.cumprod([1, *values.shape[:0:-1]])[::-1] * like.itemsize
        one = view.view.restricted(np.arange(len(view.flats)) == row)
        arguments = list(one.arguments)
        arguments[6] = strides[None, :].astype(np.int64)
        arguments[8] = np.array([values.ctypes.data], np.int64)
        arguments[11] = np.zeros(1, np.uint8)
        one.arguments = tuple(arguments)
        sums[row] = cpu.scan(one, like)[0]
    return sums


def cast_exact(view: TorchView, like: Bits) -> bool:
    """As `apply.cast_exact`."""
    return not any(
        bool((_live(view, row, flat) & 0xFFFF).any())
        for row, _, _, flat in view.segments()
        if view.view.arguments[11][row] == 1
    )


def synchronize(tensor: torch.Tensor) -> None:
    """Wait until what was written to the tensor's device is there for everybody."""
    module = getattr(torch, tensor.device.type, None)
    if module is not None and hasattr(module, "synchronize"):
        module.synchronize(tensor.device)


def _apply(
    view: TorchView,
    positions: Positions,
    changed: Callable[[Bits, Any], Bits],
    dtype: np.dtype[Any],
    old: Bits | None,
    digest: Digest,
) -> None:
    dims, low, high, t_stride, s_stride, t_base, s_base, counted, _, salt = view.view.arguments[3:]
    for row, origin, volume, flat in view.segments():
        first, stop = np.searchsorted(positions, [origin, origin + volume])
        if (dims[row][:-1] == 1).all():
            # `_place` leaves it to its caller to choose the entries of a single run.
            inside = [origin + int(low[row][-1]), origin + int(high[row][-1])]
            first, stop = np.searchsorted(positions, inside)
        size = int(stop - first)
        entry, address, index = (np.empty(size, np.int64) for _ in range(3))
        count = cpu._place(
            positions, int(first), int(stop), origin, dims[row], low[row], high[row],
            t_stride[row], s_stride[row], int(t_base[row]), int(s_base[row]), entry, address, index,
        )  # fmt: skip
        if not count:
            continue
        entry, index = entry[:count], index[:count]
        place = torch.from_numpy(address[:count] // flat.element_size()).to(flat.device)
        before = _narrowed(flat[place], dtype)
        after = changed(before, entry)
        flat[place] = _to_torch(_widened(after, flat)).to(flat.device)
        if old is not None:
            old[entry] = before
        if counted[row]:
            wide = before.astype(np.uint64), after.astype(np.uint64)
            cpu._update(count, index, *wide, dtype.itemsize, salt[row], multipliers(), digest)


def _held(view: TorchView, row: int) -> tuple[slice, ...]:
    """The sub-box of a segment, as an index into its box."""
    low, high = view.view.arguments[4][row], view.view.arguments[5][row]
    return tuple(slice(a, b) for a, b in zip(low.tolist(), high.tolist(), strict=True))


def _live(view: TorchView, row: int, flat: torch.Tensor) -> torch.Tensor:
    """The live elements of a segment, in the shape of its sub-box."""
    low, high, strides = (view.view.arguments[k][row] for k in (4, 5, 6))
    size = flat.element_size()
    base = int(view.view.arguments[8][row]) // size
    return flat.as_strided((high - low).tolist(), (strides // size).tolist(), flat.storage_offset() + base)


def _read(view: TorchView, row: int, flat: torch.Tensor, dtype: np.dtype[Any]) -> Bits:
    return _narrowed(_live(view, row, flat), dtype)


def _narrowed(live: torch.Tensor, dtype: np.dtype[Any]) -> Bits:
    """Live integers as bits of the source's width, on the CPU."""
    bits: Bits = live.cpu().numpy()
    if bits.itemsize == dtype.itemsize:
        return bits.view(dtype)
    return (bits.view(np.uint32) >> np.uint32(16)).astype(dtype)


def _widened(bits: Bits, flat: torch.Tensor) -> Bits:
    """Bits of the source's width as live ones: those of a cast stand in the upper half."""
    if flat.element_size() == bits.itemsize:
        return bits
    return bits.astype(np.uint32) << np.uint32(16)


def _to_torch(bits: Bits) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits).view(_SIGNED[bits.itemsize]))
