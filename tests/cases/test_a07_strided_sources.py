"""A7: sources that are not contiguous: values by logical index, whatever the strides."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import deltafmt
from tests.cases.common import assert_same, new_root


def views(raised: int = 0) -> dict[str, Any]:
    """A transposed, a strided, a Fortran-ordered and an expanded view, element [2, 1] of each raised."""
    base = np.arange(12.0).reshape(3, 4)
    transposed = torch.from_numpy(base.copy()).T
    strided = torch.from_numpy(base.copy())[:, ::2]
    fortran = np.asfortranarray(base)
    for view in (transposed, strided, fortran):
        view[2, 1] += raised
    row = torch.from_numpy(base[:1].copy())
    # An expanded row has its one element in every row.
    row[0, 1] += raised
    return {"t": transposed, "s": strided, "f": fortran, "x": row.expand(3, 4)}


def logical(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(np.asarray(view), order="C")) for name, view in tensors.items()}


def test_logical_order_in_values_and_indices() -> None:
    root = new_root()
    writer = deltafmt.Writer(root)
    writer.publish_anchor(views())
    writer.publish(views(100))
    lineage = deltafmt.open(root)
    assert_same(lineage.read(0), logical(views()))
    assert_same(lineage.read(1), logical(views(100)))
    assert all(tensor.is_contiguous() for tensor in lineage.read(1).values())
    rows = [(row["tensor"], row["index"]) for row in lineage.changes(1).read_all().to_pylist()]
    assert rows == [("t", 2 * 3 + 1), ("s", 2 * 2 + 1), ("f", 2 * 4 + 1), ("x", 1), ("x", 5), ("x", 9)]


def test_targets_that_are_not_contiguous_either() -> None:
    root = new_root()
    deltafmt.Writer(root).publish_anchor(views(7))
    memory = {"t": torch.zeros(3, 4, dtype=torch.float64), "s": torch.full((3, 4), 5.0, dtype=torch.float64)}
    live: dict[str, Any] = {"t": memory["t"].T, "s": memory["s"][:, ::2], "f": np.zeros((3, 4), order="F")}
    deltafmt.Receiver(root, live).advance()
    expected = logical(views(7))
    assert (live["t"] == expected["t"]).all()
    assert (live["s"] == expected["s"]).all()
    assert (torch.from_numpy(live["f"]) == expected["f"]).all()
    assert (memory["s"][:, 1::2] == 5).all()
