"""What manifests must agree on with each other: a further way with its version, a delta with its base."""

from __future__ import annotations

from deltafmt.errors import FormatError
from deltafmt.format.records import Manifest


def check_further_way(way: Manifest, version: Manifest, *, where: object) -> None:
    """Raise `FormatError` unless a further way leads to the version's schema and content."""
    if way.schema != version.schema:
        raise FormatError(
            "way to another schema than the version's",
            kind="schema-mismatch",
            where=where,
            expected=version.schema.hex(),
            found=way.schema.hex(),
        )
    differ = (way.tensors.digest0 != version.tensors.digest0) | (
        way.tensors.digest1 != version.tensors.digest1
    )
    if differ.any():
        raise FormatError(
            "way to another content than the version's",
            kind="content-mismatch",
            where=f"{where}, tensor {int(differ.argmax())}",
        )


def check_recut(way: Manifest, base: Manifest, domains: int, *, where: object) -> None:
    """Raise `FormatError` unless a way lists all its domains' digests where its base is cut in another way.

    `base` is the manifest of the base version, `domains` the number of domains of the way's tiling.
    """
    same = (way.schema, way.tiling) == (base.schema, base.tiling)
    if not same and len(way.domains) != domains:
        raise FormatError(
            "way of another tiling than its base's without a digest of every domain",
            kind="digest-rows",
            where=where,
            expected=domains,
            found=len(way.domains),
        )
