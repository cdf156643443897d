"""Anchors beside deltas: a version's tensors as a way from nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from deltafmt.format.records import Manifest
from deltafmt.format.signing import Signer
from deltafmt.read.history import History
from deltafmt.schema import Schema
from deltafmt.write.further import add_way, existing_way, further_plan
from deltafmt.write.source import LiveSource
from deltafmt.write.way import anchor_results


def add_anchor_way(
    history: History,
    version: int,
    tensors: Mapping[str, torch.Tensor],
    *,
    threads: int | None = None,
    sign_with: Signer | None = None,
) -> Manifest:
    """Add a way from nothing to a version, from its tensors (those that own their elements).

    The tensors are proven against the version's digests before the way comes to exist: `ChecksumError`
    otherwise. Returns the way's manifest; a way that is there already is no error.
    """
    found = existing_way(history, version, None)
    if found is not None:
        return found
    plan = further_plan(history, version, None, sign_with=sign_with)
    source = LiveSource(plan.cut, owners(plan.cut.schema, tensors))
    return add_way(history, plan, anchor_results(plan, source, threads or min(8, os.cpu_count() or 1)))


def owners(schema: Schema, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every name of the schema with the tensor that holds its elements."""
    return {spec.name: tensors[schema.resolve(spec.name).name] for spec in schema}
