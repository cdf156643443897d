"""Further ways to versions that exist: an anchor beside a delta."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import torch

from deltafmt.errors import ChecksumError
from deltafmt.format.signing import Signer
from deltafmt.read.history import History
from deltafmt.schema import Schema
from deltafmt.write.commit import Outcome, commit, drop, sealed
from deltafmt.write.cut import Cut
from deltafmt.write.source import LiveSource
from deltafmt.write.way import WayPlan, anchor_results, build_way, tensor_sums


def add_anchor_way(
    history: History,
    version: int,
    tensors: Mapping[str, torch.Tensor],
    *,
    threads: int | None = None,
    sign_with: Signer | None = None,
) -> None:
    """Add a way from nothing to a version, from its tensors (those that own their elements).

    The tensors are proven against the version's digests before the way comes to exist: `ChecksumError`
    otherwise. A way that is there already is no error.
    """
    target = history.first_way(version)
    if target.manifest.base is None and target.manifest.data:
        return
    if any(way.manifest.base is None for way in history.further_ways(version)):
        return
    schema = history.schema(target.manifest.schema)
    cut = Cut(schema, history.tiling(target.manifest.tiling, target.manifest.schema))
    plan = WayPlan(
        cut=cut,
        lineage=target.manifest.lineage,
        version=version,
        base=None,
        target=target,
        tensors=np.zeros((len(schema), 2), np.uint64),
        meta={},
        files={},
        sign_with=sign_with,
    )
    source = LiveSource(cut, owners(schema, tensors))
    manifest, _ = build_way(
        history.store, plan, anchor_results(plan, source, threads or min(8, os.cpu_count() or 1))
    )
    differ = (tensor_sums(manifest) != tensor_sums(target.manifest)).any(axis=1)
    if differ.any():
        drop(history.store, manifest.shard_keys)
        raise ChecksumError(
            "these tensors are not those of the version",
            kind="content-mismatch",
            where=f"version {version}, {schema.names[int(differ.argmax())]!r}",
        )
    if commit(history.store, *sealed(manifest, sign_with)) is not Outcome.OURS:
        drop(history.store, manifest.shard_keys)


def owners(schema: Schema, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every name of the schema with the tensor that holds its elements."""
    return {spec.name: tensors[schema.resolve(spec.name).name] for spec in schema}
