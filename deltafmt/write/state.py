"""What a writer knows of the version that it published last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from deltafmt.errors import BaseMismatchError, CommitConflictError, NotFoundError, SchemaError
from deltafmt.format.chunk import ColumnHead, PackedChunk
from deltafmt.format.records import Manifest
from deltafmt.kernels.digest import Digest
from deltafmt.read.fetch import StagedChunk
from deltafmt.read.history import History, Stored
from deltafmt.read.materialize import allocate, materialize
from deltafmt.read.materialize import follow as apply_way
from deltafmt.read.views import goes_on
from deltafmt.schema import Schema
from deltafmt.tensors import empty
from deltafmt.write.cut import Cut
from deltafmt.write.detect import SnapshotDetector, copy_live, put_changes
from deltafmt.write.pack import Kept, WayParts, in_order
from deltafmt.write.part import own_layout
from deltafmt.write.source import LiveSource


@dataclass(kw_only=True)
class Base:
    """The version published last: its manifest, how it is cut, and the digests of its domains as known."""

    stored: Stored
    cut: Cut
    digests: dict[int, Digest] = field(default_factory=dict)

    @property
    def version(self) -> int:
        return self.stored.manifest.version


def fill_from_lineage(history: History, stored: Stored, detector: SnapshotDetector, threads: int) -> None:
    """Read a version into the detector's copy."""
    schema = history.schema(stored.manifest.schema)
    detector.tensors = {}
    tensors = allocate(schema)
    materialize(history, stored.manifest.version, tensors, threads=threads)
    detector.tensors = tensors


def fill_from_live(
    cut: Cut,
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    detector: SnapshotDetector,
    threads: int,
) -> None:
    """Copy live tensors that hold the version, proving it by digest; `BaseMismatchError` if they do not."""
    copies = _reusable(cut, detector)
    detector.tensors = {}
    source = LiveSource(cut, tensors)
    found = in_order(lambda domain: copy_live(cut, source, copies, domain), range(len(cut)), threads)
    check_sums(cut.schema, summed(found, len(cut.schema)), manifest)
    detector.tensors = copies


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


def follow(
    history: History, stored: Stored, cut: Cut, parts: WayParts, detector: SnapshotDetector, threads: int
) -> None:
    """Bring the detector's copy from the base to a version just committed, by what was stored of it."""
    tensors = _reusable(cut, detector)
    kept = parts.kept or Kept()
    baseline = detector.flats(cut)
    detector.tensors = {}
    # Domains of which changes were kept have no part that is new: all of it is in the copy.
    changes = kept.changes
    for _ in in_order(lambda d: put_changes(cut, baseline, d, *changes[d]), changes, threads):
        pass
    if kept.chunks or not kept.complete:
        chunks = [_staged(chunk) for chunk in kept.chunks] if kept.complete else None
        full = {name: tensor for name, tensor in tensors.items() if tensor.numel() or cut.part is None}
        layout = own_layout(cut, full)
        apply_way(
            history, stored, full, layout=layout, chunks=chunks, without=changes.keys(), threads=threads
        )
    detector.tensors = tensors


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


def _reusable(cut: Cut, detector: SnapshotDetector) -> dict[str, torch.Tensor]:
    """Copies of a schema's owners: those that the detector has, new ones for the rest."""
    copies = {}
    for row in cut.schema.owners:
        spec, shape = cut.schema.tensors[row], cut.copy_shape(row)
        tensor = detector.tensors.get(spec.name)
        fits = tensor is not None and (str(tensor.dtype), tuple(tensor.shape)) == (
            f"torch.{spec.dtype}",
            shape,
        )
        copies[spec.name] = tensor if tensor is not None and fits else empty(spec.dtype, shape)
    return copies


def _staged(chunk: PackedChunk) -> StagedChunk:
    names = ("column", "codec", "stored", "raw", "crc")
    columns = tuple(ColumnHead(**dict(zip(names, row, strict=True))) for row in chunk.columns)
    return StagedChunk(
        head=chunk.head, columns=columns, data=memoryview(b"".join(chunk.buffers)), where="own chunk"
    )
