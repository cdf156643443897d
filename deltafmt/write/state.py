"""What a writer knows of the version that it published last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deltafmt.errors import BaseMismatchError, CommitConflictError, NotFoundError, SchemaError
from deltafmt.format.records import Manifest
from deltafmt.kernels.digest import Digest, zero
from deltafmt.read.history import History, Stored
from deltafmt.read.views import goes_on
from deltafmt.schema import Schema
from deltafmt.write.cut import Cut


@dataclass(kw_only=True)
class Base:
    """The version published last: its manifest, how it is cut, and the digests of its domains as known."""

    stored: Stored
    cut: Cut
    digests: dict[int, Digest] = field(default_factory=dict)

    @property
    def version(self) -> int:
        return self.stored.manifest.version


def summed(parts: Iterable[Mapping[int, Digest]], tensors: int) -> npt.NDArray[np.uint64]:
    """Sums of digests per tensor, shape (tensors, 2), over parts that give them by row of the tensor."""
    sums = np.zeros((tensors, 2), np.uint64)
    for part in parts:
        for row, digest in part.items():
            sums[row] += digest
    return sums


def check_sums(schema: Schema, sums: npt.NDArray[np.uint64], manifest: Manifest) -> None:
    """Raise `BaseMismatchError` (`content-mismatch`) unless tensors have the version's digests."""
    rows = list(schema.owners)
    differ = (sums != manifest.tensors.lanes).any(axis=1)[rows]
    if differ.any():
        raise BaseMismatchError(
            "the tensors are not those of the version",
            kind="content-mismatch",
            where=f"version {manifest.version}, {schema.names[rows[int(differ.argmax())]]!r}",
        )


def check_domains(cut: Cut, gained: Iterable[Mapping[int, Digest]], anchor: Manifest) -> None:
    """Raise `BaseMismatchError` unless an anchor gives its own digests to a rank's domains.

    `gained` is what each tensor's digest gains by each of them.
    """
    table = anchor.domains
    expected = table.lanes[np.searchsorted(table.domain, cut.domains)]
    for domain, digest, wanted in zip(cut.domains, gained, expected, strict=True):
        if (sum(digest.values(), zero()) != wanted).any():
            raise BaseMismatchError(
                "the tensors are not those of the version",
                kind="content-mismatch",
                where=f"version {anchor.version}, domain {domain}",
            )


def newest_to_resume(history: History, version: int | None) -> int:
    """The newest version; `CommitConflictError` if another one is asked for, `NotFoundError` before the first."""
    newest = history.latest()
    if newest is None:
        raise NotFoundError(
            "nothing to resume: publish_anchor begins", kind="version-missing", where=history.store.url
        )
    if version is not None and version != newest:
        raise CommitConflictError(
            "only the newest version can be resumed", kind="version-taken", expected=newest, found=version
        )
    return newest


def merged_digests(base: Base | None, cut: Cut, manifest: Manifest) -> dict[int, Digest]:
    """Digests of the domains after a version, as far as they are known."""
    same = base is not None and base.cut.tiling_digest == cut.tiling_digest
    digests = dict(base.digests) if base is not None and same else {}
    digests.update(zip(manifest.domains.domain.tolist(), manifest.domains.lanes, strict=True))
    return digests


def base_sums(before: Schema, base: Manifest, after: Schema) -> npt.NDArray[np.uint64]:
    """Digests of the base per tensor of the schema `after`, shape (tensors, 2); zero for what is new.

    What an alias has does not matter: it gets its owner's in the end.
    """
    if before is after:
        return base.tensors.lanes
    sums, old = np.zeros((len(after), 2), np.uint64), base.tensors.lanes
    for row in after.owners:
        spec = after.tensors[row]
        if goes_on(before, spec):
            sums[row] = old[before.index(spec.name)]
    return sums


def check_dtypes(
    old: Schema, new: Schema, *, message: str = "a delta cannot change a dtype; publish_anchor can"
) -> None:
    """Raise `SchemaError` (`dtype-mismatch`) for a tensor that changed its dtype."""
    for spec in new:
        if spec.name in old and old[spec.name].dtype != spec.dtype:
            raise SchemaError(
                message,
                kind="dtype-mismatch",
                where=repr(spec.name),
                expected=old[spec.name].dtype,
                found=spec.dtype,
            )
