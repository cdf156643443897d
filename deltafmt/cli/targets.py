"""What `dump` is pointed at: an object's own path or URL, or a root and a key."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deltafmt.cli.failures import UsageError

_FOLDERS = "versions|ways|schemas|tilings|data|ways-data|files|attempts|floors|leases"
_KEY = re.compile(rf"(?:^|/)((?:{_FOLDERS})/[^?]*|(?:lineage|latest)\.dfm)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A root, the object's key below it, and whether the root looks like a lineage's."""

    root: str
    key: str
    in_lineage: bool


def find_target(where: str, key: str | None) -> Target:
    """Split a path or URL of an object into root and key; with a `key`, `where` is the root.

    >>> find_target("s3://bucket/run/versions/00000000000000000003.dfm", None).root
    's3://bucket/run'
    >>> find_target("/tmp/odd.dfm", None)
    Target(root='/tmp', key='odd.dfm', in_lineage=False)
    """
    if key is not None:
        return Target(root=where, key=key.strip("/"), in_lineage=True)
    match = _KEY.search(where)
    if match:
        return Target(root=where[: match.start()] or ".", key=match[1], in_lineage=True)
    folder, slash, name = where.rpartition("/")
    if not name:
        raise UsageError(f"{where!r} names no object", "give a key too: deltafmt dump URL versions/....dfm")
    return Target(root=(folder or "/") if slash else ".", key=name, in_lineage=False)
