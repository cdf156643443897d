"""What tensors come to after a way, held against the sums per tensor that its version states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deltafmt.errors import FormatError
from deltafmt.read.history import Stored
from deltafmt.read.proof import held_elements, scan_tensors
from deltafmt.read.views import View
from deltafmt.schema import Schema

Ints = npt.NDArray[np.int64]
Sums = npt.NDArray[np.uint64]


def check_reached(view: View, path: Sequence[Stored], *, threads: int) -> None:
    """Raise `FormatError` (`content-mismatch`) unless tensors held whole have the sums of the path's last version.

    The path begins with an anchor, and each domain held whole has been proven by its digest. A tensor that
    shares no domain with others is the sum of its domains' digests; only the others are digested here.
    """
    volumes = view.schema.volumes
    whole = (held_elements(view) == volumes) & (volumes > 0)
    apart, sums = _sums_of_domains(view, path)
    mixed = whole & ~apart
    if mixed.any():
        sums[mixed] = scan_tensors(view, threads=threads, only=mixed)[mixed]
    check_sums(view.schema, sums, path[-1], whole)


def check_sums(schema: Schema, sums: Sums, way: Stored, chosen: npt.NDArray[np.bool_]) -> None:
    """Raise `FormatError` (`content-mismatch`) for the first chosen tensor with another sum than the way states."""
    differ = chosen & (sums != way.manifest.tensors.lanes).any(axis=1)
    if differ.any():
        raise FormatError(
            "tensor does not have the digest recorded",
            kind="content-mismatch",
            where=f"{way.key}, {schema.names[int(differ.argmax())]!r}",
        )


def _sums_of_domains(view: View, path: Sequence[Stored]) -> tuple[npt.NDArray[np.bool_], Sums]:
    """(which tensors stand in domains of their own whose digests are known, the sums of these digests)."""
    tiling, count = view.tiling, len(view.schema)
    sums = np.zeros((count, 2), np.uint64)
    if not len(tiling):
        return np.zeros(count, bool), sums
    first = tiling.domain_box[:-1]
    tensor = np.minimum.reduceat(tiling.box_tensor, first)
    own = (tensor == np.maximum.reduceat(tiling.box_tensor, first)) & view.table.full
    digests, known = np.zeros((len(tiling), 2), np.uint64), np.zeros(len(tiling), bool)
    for way in path:
        manifest = way.manifest
        if (manifest.schema, manifest.tiling) == (path[-1].manifest.schema, path[-1].manifest.tiling):
            digests[manifest.domains.domain] = manifest.domains.lanes
            known[manifest.domains.domain] = True
    apart = np.ones(count, bool)
    boxes = tiling.box_tensor
    apart[boxes[~(own & known)[tiling.domains_of_boxes()]]] = False
    np.add.at(sums, tensor[own], digests[own])
    return apart, sums
