"""A layout from a loader: by three means, the next one wherever the one before is not sure."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch

from deltafmt.layout import Layout
from deltafmt.schema import Schema
from deltafmt.tensors import NamedTensors, bits, named
from deltafmt.tracing.bits import layout_by_bits
from deltafmt.tracing.counted import layout_by_numbers
from deltafmt.tracing.parts import Numbers
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

    All targets hold their old bits again afterwards; a copy of them is kept meanwhile. The second and third
    means take 8 bytes per local element beside. Raises `LayoutError`: `trace-impure` for a loader that does
    anything but move elements, `target-unfilled` for a target that it does not write to, `layout-too-fine`
    for one that it scatters.
    """
    tensors = named(targets)
    spared = frozenset(untouched)
    known = Numbers(schema)
    quick = [
        partial(layout_by_records, load, schema, tensors, spared),
        partial(layout_by_numbers, load, schema, known, tensors, spared),
    ]
    with _kept(tensors):
        for means in quick:
            try:
                layout = means()
                prove(load, schema, layout, tensors, spared)
            except Exception as error:  # noqa: BLE001 - the loader's own, and told by the last means
                _log.debug("%s: %s", means.func.__name__, error)
            else:
                return layout
        layout = layout_by_bits(load, schema, known, tensors, spared)
        prove(load, schema, layout, tensors, spared)
    return layout


@contextmanager
def _kept(tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Give all tensors their bits back in the end."""
    saved = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    try:
        yield
    finally:
        for name, tensor in tensors.items():
            bits(tensor).copy_(bits(saved[name]))
