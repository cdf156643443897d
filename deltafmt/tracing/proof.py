"""A layout held against the loader itself, on random bits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch

from deltafmt.layout import Layout, Placement
from deltafmt.schema import Schema, TensorSpec
from deltafmt.tensors import bits
from deltafmt.tracing.parts import impure
from deltafmt.tracing.patterns import noise
from deltafmt.tracing.running import Load, run

_RUN_BYTES = 1 << 22


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
        source = _Noise(schema, names, inverted)
        run(load, source.all(), barred=barred)
        for name in sorted(placed, key=schema.index):
            whole = source.of(name)
            for placement in placed[name]:
                _compare(placement, whole, tensors[placement.target], placement.target in layout.casts)
        here = [bits(tensors[name])[box.slices()].clone() for name, box in idle]
        for (name, _), was, now in zip(idle, before, here, strict=False):
            if not torch.equal(was, now):
                raise impure(repr(name), "elements that come from no tensor are others at each call")
        before = here


class _Noise:
    """Random bits for named tensors of a schema, made anew when they are asked for, some neighbours at once."""

    def __init__(self, schema: Schema, names: Sequence[str], inverted: bool) -> None:
        self._schema, self._names, self._inverted = schema, names, inverted
        self._runs: list[list[TensorSpec]] = []
        self._place: dict[str, tuple[int, int]] = {}
        self._held: tuple[int, torch.Tensor] = -1, torch.empty(0)
        room = begin = 0
        for spec in dict.fromkeys(schema.resolve(name) for name in names):
            if not self._runs or room < spec.nbytes or self._runs[-1][0].dtype != spec.dtype:
                self._runs.append([])
                room, begin = _RUN_BYTES, 0
            self._runs[-1].append(spec)
            self._place[spec.name] = len(self._runs) - 1, begin
            begin += spec.volume
            room -= spec.nbytes

    def of(self, name: str) -> torch.Tensor:
        """A tensor's bits, not to be changed."""
        spec = self._schema.resolve(name)
        number, begin = self._place[spec.name]
        if self._held[0] != number:
            run = self._runs[number]
            counts = [each.volume for each in run]
            self._held = number, noise(run[0].dtype, counts, number, inverted=self._inverted)
        return self._held[1][begin : begin + spec.volume].view(spec.shape)

    def all(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, as the loader's own."""
        for name in self._names:
            # Whoever watches torch has no business here.
            with torch._C._DisableTorchDispatch():
                own = self.of(name).clone()
            yield name, own


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
