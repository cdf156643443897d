"""Whole versions into given tensors, for reading, exporting and resuming."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from deltafmt.layout import Layout
from deltafmt.read.claim import claimed_chain, unless_gone
from deltafmt.read.fetch import StagedChunk
from deltafmt.read.history import History, Stored
from deltafmt.read.lease import Lease
from deltafmt.read.options import ReadOptions
from deltafmt.read.proof import scan_tensors
from deltafmt.read.replica import Replica, StagedLink
from deltafmt.read.sums import check_reached
from deltafmt.read.targets import Targets
from deltafmt.schema import Schema
from deltafmt.tensors import NamedTensors, empty


def materialize(
    history: History,
    version: int,
    targets: NamedTensors,
    *,
    layout: Layout | None = None,
    threads: int | None = None,
    check_tensors: bool = True,
    lease: Lease | None = None,
) -> None:
    """Fill `targets` (any of the version's tensors, any strides) with the content of a version.

    Only the bytes that they need are read. Every domain that is held whole is proven by its digest, and, unless
    `check_tensors` is false, every tensor that is held whole by the version's sum for it. Raises
    `NotFoundError` where no anchor with data leads to the version, `VersionGoneError` where retention has
    removed it, or does so meanwhile and `lease` claims nothing; after any error the targets hold no version.
    """
    claim = lease or Lease(history, None)
    replica = _replica(history, targets, layout, threads)

    def read() -> None:
        path = claimed_chain(claim, version)
        links = replica.links(path)
        with claim.at_work():
            replica.stream(links, None)
        if check_tensors:
            check_reached(links[-1].view, path, threads=replica.options.threads)

    unless_gone(claim, version, read)


def follow(
    history: History,
    way: Stored,
    targets: NamedTensors,
    *,
    layout: Layout | None = None,
    chunks: list[StagedChunk] | None = None,
    without: Collection[int] = (),
    threads: int | None = None,
) -> None:
    """Bring `targets` by one way from its base (or for an anchor from anything) to its version.

    They must hold the base, whose schema must be the way's if it is a delta. `chunks` are the way's chunks
    where they are at hand, else they are read; none of the domains in `without` is touched. After an error
    the targets hold no version.
    """
    replica = _replica(history, targets, layout, threads)
    (link,) = replica.links([way])
    if chunks is None:
        replica.stream([replace(link, plan=link.plan.without(without))], None)
    else:
        chunks = [chunk for chunk in chunks if chunk.head.domain not in without]
        replica.apply([StagedLink(link=link, chunks=chunks)], None)


def tensor_digests(
    history: History, way: Stored, targets: NamedTensors, *, threads: int | None = None
) -> npt.NDArray[np.uint64]:
    """Content digests of `targets`, two lanes per tensor of the way's schema; what is not there counts as zero."""
    replica = _replica(history, targets, None, threads)
    view = replica.views.view(way.manifest, way.manifest.schema)
    return scan_tensors(view, threads=replica.options.threads)


def _replica(history: History, targets: NamedTensors, layout: Layout | None, threads: int | None) -> Replica:
    options = ReadOptions() if threads is None else ReadOptions(threads=threads)
    return Replica(history, Targets(targets), layout, options=options)


def allocate(schema: Schema, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """New contiguous CPU tensors for the owners among `names` (default: all); not initialised.

    An alias brings its owner along, under the owner's name.
    """
    wanted = schema.names if names is None else names
    owners = dict.fromkeys(schema.resolve(name).name for name in wanted)
    return {name: empty(schema[name].dtype, schema[name].shape) for name in owners}
