"""A layout from a loader: by three means, the next one wherever the one before is not sure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deltafmt.layout import Layout
from deltafmt.schema import Schema
from deltafmt.tensors import NamedTensors, named
from deltafmt.tracing import grouping
from deltafmt.tracing.bits import layout_by_bits
from deltafmt.tracing.counted import layout_by_numbers
from deltafmt.tracing.grouping import bytes_of, groups_by_layout
from deltafmt.tracing.kept import bound, fingerprints, kept
from deltafmt.tracing.parts import Numbers, impure
from deltafmt.tracing.proof import prove
from deltafmt.tracing.recorded import layout_by_records
from deltafmt.tracing.running import Load

_log = logging.getLogger("deltafmt.tracing")


def trace_layout(
    load: Load, schema: Schema, targets: NamedTensors, *, untouched: Iterable[str] = ()
) -> Layout:
    """The layout by which `load` moves tensors of a schema into local tensors.

    `load` gets (name, tensor) for every name of the schema, aliases included, and writes into `targets`. It
    is called a few times. First on tensors without elements, whose views and copies are written down; where
    it does something else to them, on integers that stand for elements; where it cannot work on those, on
    tensors whose bit patterns carry their elements' numbers, some bits at a time. What is found is tried on
    random bits. So it may rename, split, fuse, transpose, slice, pad, repeat and permute, and cast bfloat16
    to float32, whatever it is written in. Elements that it leaves alone, or fills with a constant, are
    `untouched` in the layout; names in `untouched` are targets of which it may write nothing at all.

    All targets hold their old bits again afterwards; a copy of them is kept in host memory meanwhile. Where
    stored and local tensors together are larger than 1 GiB, the trial is made on some of them at a time, and
    those are copied, if the loader can be given some. The second means takes 8 bytes for each stored and
    local element beside, the third for each local one.

    Raises `LayoutError`: `trace-impure` for a loader that does anything but move elements, `target-unfilled`
    for a target that it does not write to, `layout-too-fine` for one that it scatters.
    """
    given = targets if hasattr(targets, "state_dict") or isinstance(targets, Mapping) else list(targets)
    tensors = named(given)
    originals = given.values() if isinstance(given, Mapping) else [tensor for _, tensor in given]
    trace = _Trace(load, schema, tensors, frozenset(untouched))
    with bound(originals):
        if bytes_of(schema, tensors) <= grouping.AT_ONCE or not all(map(torch.is_tensor, originals)):
            return trace.whole([trace.by_records, trace.by_numbers])
        layout, proved = trace.in_groups()
        if layout is None:
            return trace.whole([trace.by_numbers])
        return layout if proved else trace.whole([lambda: layout, trace.by_numbers])


@dataclass(frozen=True, slots=True)
class _Trace:
    load: Load
    schema: Schema
    tensors: dict[str, torch.Tensor]
    spared: frozenset[str]

    def whole(self, quick: Iterable[Callable[[], Layout]]) -> Layout:
        """By the first means that does it, the last of which are bits, on all tensors at once."""
        with kept(self.tensors):
            for means in quick:
                try:
                    return self._proved(means())
                except Exception as error:  # noqa: BLE001 - the loader's own, and told by the last means
                    _log.debug("%s: %s", means.__name__, error)
            return self._proved(self.by_bits())

    def in_groups(self) -> tuple[Layout | None, bool]:
        """By records; whether they hold for a few tensors at a time, where the loader can be given few.

        Raises `LayoutError` where the loader has written to local tensors by means that torch does not show.
        """
        before = fingerprints(self.tensors)
        layout, proved = None, False
        try:
            layout = self.by_records()
            for group in groups_by_layout(self.schema, layout, self.tensors):
                own = {name: self.tensors[name] for name in group.targets}
                others = [tensor for name, tensor in self.tensors.items() if name not in own]
                with kept(own):
                    part = group.part_of(layout)
                    # No look at values has been recorded, on which the loader could depend.
                    self._prove(part, group.names, own, barred=others, once=True)
            proved = True
        except Exception as error:  # noqa: BLE001 - as above
            _log.debug("in groups: %s", error)
        for name, now in fingerprints(self.tensors).items():
            if now != before[name]:
                raise impure(repr(name), "its memory is written to past torch, and now holds other bits")
        return layout, proved

    def _proved(self, layout: Layout) -> Layout:
        self._prove(layout, self.schema.names, self.tensors)
        return layout

    def _prove(self, layout: Layout, names: Sequence[str], own: dict[str, torch.Tensor], **how: Any) -> None:
        prove(self.load, self.schema, names, layout, own, self.spared, **how)

    def by_records(self) -> Layout:
        return layout_by_records(self.load, self.schema, self.tensors, self.spared)

    def by_numbers(self) -> Layout:
        return layout_by_numbers(self.load, self.schema, Numbers(self.schema), self.tensors, self.spared)

    def by_bits(self) -> Layout:
        return layout_by_bits(self.load, self.schema, Numbers(self.schema), self.tensors, self.spared)
