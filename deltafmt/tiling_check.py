"""Whether a tiling covers a schema: the strict checks behind `Tiling.check`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from deltafmt.errors import FormatError
from deltafmt.joins import self_meetings, spans
from deltafmt.schema import Schema

if TYPE_CHECKING:
    from deltafmt.tiling import Tiling

Ints = npt.NDArray[np.int64]

MAX_DOMAIN = 2**31 - 1
"""Most elements of a domain."""
_MAX_PAIRS = 1 << 24


def check_boxes(tiling: Tiling, schema: Schema, where: object) -> None:
    """Raise `FormatError` for boxes and domains that are bad in themselves."""
    if len(tiling) and (np.diff(tiling.domain_box) < 1).any():
        raise FormatError("domain without boxes", kind="domain-empty", where=where)
    if ((tiling.box_tensor < 0) | (tiling.box_tensor >= len(schema))).any():
        raise FormatError("box of a tensor that the schema lacks", kind="box-tensor", where=where)
    if not _owned(schema)[tiling.box_tensor].all():
        raise FormatError("box of an alias", kind="box-tensor", where=where)
    own = schema.padded_shapes[tiling.box_tensor]
    inside: Any = (tiling.box_start >= 0) & (tiling.box_start < tiling.box_stop) & (tiling.box_stop <= own)
    _refuse(~inside.all(axis=1), "box is empty or leaves its tensor", "box-outside", where)
    # Sums of boxes in floating point cannot wrap around as those of integers could.
    exact = np.prod((tiling.box_stop - tiling.box_start).astype(np.float64), axis=1)
    _refuse(exact > MAX_DOMAIN, "box is larger than a domain may be", "domain-too-large", where)
    if len(tiling):
        sums = np.add.reduceat(exact, tiling.domain_box[:-1])
        _refuse(sums > MAX_DOMAIN, "domain is too large", "domain-too-large", where)
    differ = schema.widths[tiling.box_tensor] != tiling.widths[tiling.domains_of_boxes()]
    _refuse(differ, "box of another element width than its domain's", "width-mismatch", where)


def check_cover(tiling: Tiling, schema: Schema, where: object) -> None:
    """Raise `FormatError` unless boxes that are good in themselves cover every owner exactly once."""
    volumes = np.where(_owned(schema), schema.volumes, 0)
    covered = np.zeros(len(schema), np.int64)
    np.add.at(covered, tiling.box_tensor, tiling.box_volume)
    differ = covered != volumes
    if differ.any():
        row = int(differ.argmax())
        raise FormatError(
            "boxes do not cover the tensor exactly once",
            kind="tiling-overlap" if covered[row] > volumes[row] else "tiling-hole",
            where=f"{where}, {schema.names[row]!r}",
            expected=f"{volumes[row]} elements",
            found=int(covered[row]),
        )
    # Sums are equal: what is left to show is that no two boxes share an element.
    first, last = spans(schema.padded_shapes, tiling.box_tensor, tiling.box_start, tiling.box_stop)
    order = np.argsort(first, kind="stable")
    count, pairs = self_meetings(first[order], last[order])
    if count > _MAX_PAIRS:
        _check_by_sweep(tiling, schema, where)
        return
    for one, other in pairs:
        a, b = order[one], order[other]
        meet = tiling.box_tensor[a] == tiling.box_tensor[b]
        meet &= (tiling.box_start[a] < tiling.box_stop[b]).all(axis=1)
        meet &= (tiling.box_start[b] < tiling.box_stop[a]).all(axis=1)
        if meet.any():
            _refuse_overlap(schema, int(tiling.box_tensor[a[meet.argmax()]]), where)


def _check_by_sweep(tiling: Tiling, schema: Schema, where: object) -> None:
    """Tensor by tensor, for boxes of which most pairs overlap as intervals of canonical order."""
    order = np.argsort(tiling.box_tensor, kind="stable")
    borders = np.flatnonzero(np.diff(tiling.box_tensor[order])) + 1
    for rows in np.split(order, borders):
        if _overlap(tiling.box_start[rows], tiling.box_stop[rows]):
            _refuse_overlap(schema, int(tiling.box_tensor[rows[0]]), where)


def _overlap(start: Ints, stop: Ints) -> bool:
    """Whether two of the boxes share an element: a sweep along the dimension with the most borders."""
    d = max(range(start.shape[1]), key=lambda k: len(np.unique(start[:, k])))
    order = np.argsort(start[:, d], kind="stable")
    start, stop = start[order], stop[order]
    first, last = start[:, d], stop[:, d]
    for row in range(len(start) - 1):
        end = int(np.searchsorted(first, last[row], side="left"))
        others = slice(row + 1, end)
        meet: Any = (start[others] < stop[row]) & (start[row] < stop[others])
        if meet.all(axis=1).any():
            return True
    return False


def _owned(schema: Schema) -> npt.NDArray[np.bool_]:
    """Which tensors store elements of their own."""
    owned: npt.NDArray[np.bool_] = schema.owner_rows == np.arange(len(schema))
    return owned


def _refuse(bad: npt.NDArray[np.bool_], message: str, kind: str, where: object) -> None:
    if bad.any():
        raise FormatError(message, kind=kind, where=f"{where}, row {int(bad.argmax())}")


def _refuse_overlap(schema: Schema, row: int, where: object) -> None:
    name = schema.names[row]
    raise FormatError("boxes of the tensor overlap", kind="tiling-overlap", where=f"{where}, {name!r}")
