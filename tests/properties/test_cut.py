"""Pieces of a domain against the plain order of a tensor's elements."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deltafmt.geometry import Box
from deltafmt.kernels.changes import digest_changes, digest_rows, scatter
from deltafmt.kernels.digest import digest_run, zero
from deltafmt.schema import Schema, TensorSpec
from deltafmt.segments import tensor_salt
from deltafmt.tiling import Tiling
from deltafmt.write.cut import Cut

SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def split_tensor(draw: st.DrawFn) -> Cut:
    """One tensor cut in two along some dimension, both boxes in one domain in any order."""
    shape = draw(SHAPES)
    boxes = [Box.full(shape)]
    if shape and max(shape) > 1:
        d = draw(st.sampled_from([k for k, extent in enumerate(shape) if extent > 1]))
        at = draw(st.integers(1, shape[d] - 1))
        stop, start = list(shape), [0] * len(shape)
        stop[d], start[d] = at, at
        boxes = draw(st.permutations([Box((0,) * len(shape), tuple(stop)), Box(tuple(start), shape)]))
    schema = Schema((TensorSpec("t", "bfloat16", shape),))
    return Cut(schema, Tiling.of([[(0, box) for box in boxes]], schema))


@given(split_tensor(), st.sampled_from([None, 1, 2, 5]))
def test_pieces_are_the_domain_in_order(cut: Cut, most: int | None) -> None:
    shape = cut.schema.tensors[0].shape
    flat = np.arange(int(np.prod(shape)), dtype=np.uint16)
    expected = np.concatenate(
        [
            flat.reshape(shape)[tuple(map(slice, box.start, box.stop))].reshape(-1)
            for _, box in cut.tiling.boxes(0, cut.schema)
        ]
    )
    position = 0
    for piece in cut.pieces(0, most=most):
        assert piece.position == position
        bits = piece.take(flat, shape)
        here = np.arange(position, position + piece.volume, dtype=np.uint32)
        np.testing.assert_array_equal(bits, expected[position : position + piece.volume])
        np.testing.assert_array_equal(piece.flat(here), bits)
        assert most is None or piece.volume <= most
        position += piece.volume
    assert position == len(flat)


@given(st.data(), st.sampled_from(["<u1", "<u2", "<u4", "<u8"]))
def test_digests_of_rows_and_changes_add_up(data: st.DataObject, dtype: str) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    first = data.draw(st.integers(0, columns - 1))
    salt = tensor_salt("w")
    old = random.integers(0, 256, (rows, columns * np.dtype(dtype).itemsize), np.uint8).view(dtype)
    whole, parts = zero(), zero()
    digest_run(old.reshape(-1), 0, salt, whole)
    for low, high in ((0, first), (first, columns)):
        if high > low:
            starts = np.arange(rows, dtype=np.int64) * columns + low
            digest_rows(np.ascontiguousarray(old[:, low:high]).reshape(-1), starts, high - low, salt, parts)
    np.testing.assert_array_equal(whole, parts)
    new = old.copy().reshape(-1)
    at = np.flatnonzero(random.random(new.size) < 0.3).astype(np.int64)
    values = random.integers(0, 2 ** (8 * new.itemsize) - 1, at.size, np.uint64, endpoint=True).astype(dtype)
    moved = whole.copy()
    digest_changes(at, new[at], values, salt, moved)
    scatter(new, at, 0, values)
    after = zero()
    digest_run(new, 0, salt, after)
    np.testing.assert_array_equal(moved, after)
