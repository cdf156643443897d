"""Whole versions into fresh tensors, for reading, exporting and resuming."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from deltafmt.read.chain import cheapest_chain
from deltafmt.read.history import History
from deltafmt.read.replica import Replica
from deltafmt.schema import Schema
from deltafmt.tensors import empty


def materialize(
    history: History, version: int, targets: Mapping[str, torch.Tensor], *, threads: int | None = None
) -> None:
    """Fill `targets` (any of the version's tensors, any strides) with the content of a version.

    Every fully held domain is proven by its digest. Raises `NotFoundError` where no anchor with data leads
    to the version.
    """
    path = cheapest_chain(history.ways, None, version)
    Replica(history, targets, threads=threads).load(path)


def allocate(schema: Schema, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """New contiguous CPU tensors for the owners among `names` (default: all); not initialised.

    An alias brings its owner along, under the owner's name.
    """
    wanted = schema.names if names is None else names
    owners = dict.fromkeys(schema.resolve(name).name for name in wanted)
    return {name: empty(schema[name].dtype, schema[name].shape) for name in owners}
