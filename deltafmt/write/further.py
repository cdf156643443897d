"""Further ways to versions that exist: how each of them comes to exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from deltafmt.errors import ChecksumError, CommitConflictError, FormatError, StoreError
from deltafmt.format.records import Manifest, Receipt
from deltafmt.read.history import History, Stored
from deltafmt.write.commit import Outcome, check_shards, commit, drop
from deltafmt.write.cut import Cut
from deltafmt.write.pack import DomainResult
from deltafmt.write.way import WayPlan, manifest_of, write_shard


def existing_way(history: History, version: int, base: int | None) -> Manifest | None:
    """The way from `base` (None: from nothing) that leads to the version already.

    Raises `FormatError` where something else stands in its place, which is never overwritten.
    """
    first = history.first_way(version).manifest
    if first.base == base and first.data:
        return first
    if base not in history.further_bases(version):
        return None
    try:
        return history.further_way(version, base).manifest
    except FormatError as error:
        raise type(error)(
            f"what stands in the place of this way is none: {error.message}; no reader takes it; remove it by "
            "the storage's own means, then add the way again",
            kind=error.kind,
            where=error.where,
            expected=error.expected,
            found=error.found,
        ) from error


def further_plan(
    history: History,
    version: int,
    base: int | None,
    *,
    cut: Cut | None = None,
    tiling: bytes | None = None,
    **settings: Any,
) -> WayPlan:
    """A way to be added, cut by a tiling of the version's schema (default: as the version is)."""
    target = history.first_way(version)
    manifest = target.manifest
    schema = history.schema(manifest.schema)
    return WayPlan(
        cut=cut or Cut(schema, history.tiling(tiling or manifest.tiling, manifest.schema)),
        lineage=manifest.lineage,
        version=version,
        base=None if base is None else history.first_way(base),
        target=target,
        tensors=np.zeros((len(schema), 2), np.uint64),
        meta={},
        files={},
        **settings,
    )


def add_way(history: History, plan: WayPlan, results: Iterator[DomainResult]) -> Manifest:
    """Write a further way's shard and make the way exist; returns the manifest that then stands there.

    That may be an equal way by somebody else, who was quicker. Raises as `way_of` and `create_way` do.
    """
    receipt, _ = write_shard(history.store, plan, results)
    try:
        made = way_of(plan, [receipt])
    except BaseException:
        drop(history.store, [plan.shard_key])
        raise
    return create_way(history, *made)


def way_of(plan: WayPlan, receipts: list[Receipt]) -> tuple[Stored, bytes]:
    """The manifest of a further way, and its bytes; `ChecksumError` where it does not lead to the version's content."""
    assert plan.target is not None
    stored, data = manifest_of(plan, receipts)
    _check_content(stored.manifest, plan.target.manifest, plan)
    return stored, data


def create_way(history: History, stored: Stored, data: bytes) -> Manifest:
    """Make a further way exist; returns the manifest that then stands there.

    Raises `CommitConflictError` (`way-withdrawn`) where retention removed the shards before the way existed;
    there is no way then.
    """
    store, manifest, ours = history.store, stored.manifest, False
    try:
        if commit(store, stored, data) is not Outcome.OURS:
            drop(store, manifest.shard_keys)
            return history.further_way(manifest.version, manifest.base).manifest
        # The shards may have been collected while no manifest named them.
        ours = True
        check_shards(store, manifest)
    except StoreError as error:
        if error.kind != "short-write":
            raise
        if ours:
            store.delete([stored.key])
        drop(store, manifest.shard_keys)
        raise CommitConflictError(
            "retention removed the shards of a way before it existed; add it again",
            kind="way-withdrawn",
            where=error.where,
        ) from error
    history.remember(stored)
    return manifest


def _check_content(manifest: Manifest, target: Manifest, plan: WayPlan) -> None:
    differ = (manifest.tensors.lanes != target.tensors.lanes).any(axis=1)
    if differ.any():
        raise ChecksumError(
            "these tensors are not those of the version (any more); Lineage.add_anchor reads them from storage",
            kind="content-mismatch",
            where=f"version {plan.version}, {plan.cut.schema.names[int(differ.argmax())]!r}",
        )
