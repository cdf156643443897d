"""What has to be in storage before a version is written: the root, the schema and the tiling."""

from __future__ import annotations

from contextlib import suppress

from deltafmt.errors import CommitConflictError, NotFoundError
from deltafmt.format.ranks import ANCHOR, WRITE
from deltafmt.read.history import History, Stored
from deltafmt.schema import Schema
from deltafmt.write.commit import create_root, put_cut
from deltafmt.write.cut import Cut
from deltafmt.write.state import check_dtypes


def ensure_root(history: History, schema: Schema) -> bytes:
    """The lineage's id; a root that is not there yet is made for the schema."""
    try:
        return history.descriptor.lineage
    except NotFoundError as error:
        if error.kind != "lineage-missing":
            raise
    # Somebody may be quicker; whose version 0 it becomes, its commit decides.
    with suppress(CommitConflictError):
        create_root(history.store, schema)
    return history.descriptor.lineage


def prepare(history: History, cut: Cut, base: Stored | None, *, purpose: int = WRITE) -> bytes:
    """Store whatever the next version needs and the base does not name; returns the lineage's id.

    Contents are stored anew for every version that names others than its base: retention may have removed
    them since an attempt that failed. Raises `SchemaError` where a tensor's dtype differs from the base's.
    """
    lineage = ensure_root(history, cut.schema)
    history.know({cut.schema_digest: cut.schema}, {cut.tiling_digest: cut.tiling})
    if purpose == ANCHOR:
        return lineage
    if base is not None and purpose == WRITE:
        check_dtypes(history.schema(base.manifest.schema), cut.schema)
    named = None if base is None else (base.manifest.schema, base.manifest.tiling)
    if named != (cut.schema_digest, cut.tiling_digest):
        put_cut(history.store, cut)
    return lineage
