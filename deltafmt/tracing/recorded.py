"""The first means: a loader runs on tensors without elements, and what it does to them is written down."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

from deltafmt.geometry import Box
from deltafmt.layout import Layout, TargetInfo
from deltafmt.schema import Schema
from deltafmt.tensors import torch_dtype
from deltafmt.tracing.boxes import boxes_of, without
from deltafmt.tracing.found import Found
from deltafmt.tracing.meet import Budget, UnsureError
from deltafmt.tracing.memory import Memory
from deltafmt.tracing.moves import MOVES
from deltafmt.tracing.pieces import Pieces, view_of
from deltafmt.tracing.recorder import Held, Recorder, Stand, Watching
from deltafmt.tracing.running import Load

_CPU = torch.device("cpu")
_WORK = 1 << 22


def layout_by_records(
    load: Load, schema: Schema, tensors: Mapping[str, torch.Tensor], spared: Collection[str]
) -> Layout:
    """The layout by the copies that a loader makes; touches no element. Raises `UnsureError`, or what `load` raises."""
    pieces = Pieces(Budget(_WORK), MOVES)
    recorder = Recorder(pieces)
    memories = {name: pieces.of(recorder.watch(tensor)) for name, tensor in tensors.items()}
    sources = {}
    for row in schema.owners:
        spec = schema.tensors[row]
        dtype = torch_dtype(spec.dtype)
        sources[spec.name] = Held(pieces.source(spec.shape, dtype, row, 0), dtype, _CPU)
    named = ((name, Stand(sources[schema.resolve(name).name], recorder)) for name in schema.names)
    follow(load, recorder, named)
    found = Found(spared=spared)
    gathered: dict[int, Memory] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            memory = memories[name]
            _place(gathered.setdefault(id(memory), memory.gathered()), name, tensor, schema, found)
    return found.layout()


def follow(load: Load, recorder: Recorder, sources: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Run a loader under a recorder; raises `UnsureError` where that has lost it."""
    try:
        with torch.no_grad(), Watching(recorder):
            load(sources)
    except Exception as error:
        raise UnsureError(recorder.doubt or repr(error)) from error
    if recorder.doubt is not None:
        raise UnsureError(recorder.doubt)


def _place(memory: Memory, name: str, tensor: torch.Tensor, schema: Schema, found: Found) -> None:
    info = TargetInfo.of(tensor)
    rest = [Box.full(info.shape)]
    volume = 0
    for piece, part in memory.read(view_of(tensor)):
        volume += part.volume
        nest = [(run.times, run.step, run.unit * info.strides[run.axis]) for run in part.runs]
        place = sum(a * s for a, s in zip(part.start, info.strides, strict=True))
        found.place(nest, piece.first + part.first, place, schema.tensors[piece.row], name, info)
        for box in boxes_of(part):
            rest = without(rest, box)
    if volume == 0:
        found.leave_all(name, info.shape)
    else:
        found.leave(name, rest)
