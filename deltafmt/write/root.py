"""The root of a writer: made at the first publish where there is none."""

from __future__ import annotations

from contextlib import suppress

from deltafmt.errors import CommitConflictError, NotFoundError
from deltafmt.read.history import History
from deltafmt.schema import Schema
from deltafmt.write.commit import create_root


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
