"""How an attempt has ended, as far as storage says."""

from __future__ import annotations

from deltafmt.errors import FormatError, NotFoundError
from deltafmt.format import keys
from deltafmt.format.objects import parse_manifest
from deltafmt.format.ranks import CONFLICT, DONE
from deltafmt.read.history import History


def outcome_of(history: History, version: int, attempt: bytes) -> int | None:
    """`DONE` or `CONFLICT` by the manifest of the version; None while there is none that can be read.

    It need not be one that this rank takes for a base: a rank that does not trust rank 0's key must still not
    remove its shard of a version that is there.
    """
    try:
        manifest = history.first_way(version).manifest
    except NotFoundError:
        return None
    except FormatError:
        key = keys.version_key(version)
        try:
            manifest = parse_manifest(history.store.read(key), way=False, where=key)
        except (NotFoundError, FormatError):
            return None
    return DONE if manifest.attempt == attempt else CONFLICT
