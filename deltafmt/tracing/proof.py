"""A layout held against the loader itself, on random bits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch

from deltafmt.layout import Layout, Placement
from deltafmt.schema import Schema
from deltafmt.tensors import bits
from deltafmt.tracing.parts import impure
from deltafmt.tracing.patterns import noise
from deltafmt.tracing.running import Load, run


def prove(
    load: Load,
    schema: Schema,
    names: Sequence[str],
    layout: Layout,
    tensors: Mapping[str, torch.Tensor],
    spared: Collection[str],
    *,
    barred: Iterable[torch.Tensor] = (),
    once: bool = False,
) -> None:
    """Raise `LayoutError` (`trace-impure`) unless the loader does to random bits what the layout says.

    It is given the named tensors of the schema, twice, the second time with every one of their bits turned
    over, so that what is left alone is seen to come from no tensor; `once` where nothing is. Writes into the
    targets.
    """
    placed: dict[str, list[Placement]] = {}
    for placement in layout.placements:
        placed.setdefault(placement.source, []).append(placement)
    idle = [(name, box) for name, box in layout.untouched if name not in spared]
    before: list[torch.Tensor] = []
    for inverted in (False, True) if idle or not once else (False,):
        source = _Noise(schema, inverted)
        run(load, source.all(names), barred=barred)
        for name, placements in placed.items():
            whole = source.of(name)
            for placement in placements:
                _compare(placement, whole, tensors[placement.target], placement.target in layout.casts)
        here = [bits(tensors[name])[box.slices()].clone() for name, box in idle]
        for (name, _), was, now in zip(idle, before, here, strict=False):
            if not torch.equal(was, now):
                raise impure(repr(name), "elements that come from no tensor are others at each call")
        before = here


class _Noise:
    """Random bits for each tensor of a schema, made anew at each call."""

    def __init__(self, schema: Schema, inverted: bool) -> None:
        self.schema, self.inverted = schema, inverted

    def of(self, name: str) -> torch.Tensor:
        owner = self.schema.resolve(name)
        return noise(owner.dtype, owner.shape, self.schema.index(owner.name), inverted=self.inverted)

    def all(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            yield name, self.of(name)


def _compare(p: Placement, whole: torch.Tensor, target: torch.Tensor, cast: bool) -> None:
    expected = whole[p.source_box.slices()]
    here = target.as_strided(expected.shape, p.strides, target.storage_offset() + p.offset)
    wanted = expected.to(torch.float32) if cast else expected
    if not _same(here.cpu(), wanted):
        raise impure(repr(p.target), f"elements of {p.source!r} do not arrive as they are")


def _same(here: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether all bits are the same; one NaN is as good as another, since casts there and back may change it."""
    if torch.equal(bits(here), bits(wanted)):
        return True
    if not wanted.is_floating_point() or not torch.equal(torch.isnan(here), torch.isnan(wanted)):
        return False
    nan = torch.isnan(wanted)
    return torch.equal(bits(here).masked_fill(nan, 0), bits(wanted).masked_fill(nan, 0))
