"""What a trace has found, made into a layout."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from deltafmt.errors import LayoutError
from deltafmt.geometry import Box
from deltafmt.layout import Layout, Placement, TargetInfo
from deltafmt.schema import TensorSpec
from deltafmt.tracing.nests import Nest, placements_of
from deltafmt.tracing.parts import NOTHING, Numbers, regular_parts

Ints = npt.NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class Found:
    """Collects placements and what is left alone; `spared` targets may be left alone altogether."""

    spared: Collection[str]
    placements: list[Placement] = field(default_factory=list)
    untouched: list[tuple[str, Box]] = field(default_factory=list)
    casts: dict[str, str] = field(default_factory=dict)

    def layout(self) -> Layout:
        return Layout(self.placements, untouched=self.untouched, casts=self.casts)

    def place(self, nest: Nest, at: int, place: int, spec: TensorSpec, target: str, info: TargetInfo) -> None:
        """Loops from element `at` of a tensor and element `place` of a target on."""
        self._check_dtype(spec, target, info)
        self.placements += placements_of(nest, at, place, spec, target)

    def leave(self, target: str, boxes: Iterable[Box]) -> None:
        """Boxes of a target that no tensor of the schema fills."""
        self.untouched += [(target, box) for box in boxes]

    def leave_all(self, target: str, shape: tuple[int, ...]) -> None:
        """Nothing fills a target; raises `LayoutError` unless it is spared."""
        if target not in self.spared:
            raise LayoutError(
                "the loader writes no element as it is to this local tensor (if that is meant, name it in `untouched`; "
                "if it puts a new tensor in its place, trace into that)",
                kind="target-unfilled",
                where=repr(target),
            )
        self.leave(target, [Box.full(shape)])

    def _check_dtype(self, spec: TensorSpec, target: str, info: TargetInfo) -> None:
        if spec.dtype == info.dtype and target not in self.casts:
            return
        cast = (spec.dtype, info.dtype) == ("bfloat16", "float32")
        if cast and self.casts.setdefault(target, spec.dtype) == spec.dtype:
            return
        raise LayoutError(
            "the loader casts elements, and only bfloat16 to float32 loses nothing",
            kind="dtype-mismatch",
            where=repr(target),
            expected=spec.dtype,
            found=info.dtype,
        )


def by_numbers(
    numbers: Iterable[tuple[str, Ints]],
    known: Numbers,
    tensors: Mapping[str, torch.Tensor],
    spared: Collection[str],
) -> Layout:
    """The layout of targets for whose elements the canonical ones' numbers are known."""
    found = Found(spared=spared)
    for name, here in numbers:
        if not here.size:
            continue
        if (here == NOTHING).all():
            found.leave_all(name, here.shape)
            continue
        info = TargetInfo.of(tensors[name])
        for part in regular_parts(here, known, repr(name)):
            if part.first == NOTHING:
                found.leave(name, [part.box])
                continue
            row = known.row_of(part.first, part.first)
            assert row is not None
            offset = sum(a * s for a, s in zip(part.start, info.strides, strict=True))
            nest = [
                (n, step, s) for n, step, s in zip(part.shape, part.steps, info.strides, strict=True) if n > 1
            ]
            at = part.first - known.first_of(row)
            found.place(nest, at, offset, known.schema.tensors[row], name, info)
    return found.layout()
