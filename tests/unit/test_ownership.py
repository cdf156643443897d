"""Who of several ranks stores what: planned without any storage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafmt.errors import IncompleteError, LayoutError, SchemaError
from deltafmt.geometry import Box
from deltafmt.layout import Layout, Placement
from deltafmt.schema import Schema, TensorSpec
from deltafmt.write.ownership import Holding, Ownership, share_out

W = TensorSpec("w", "bfloat16", (8, 6))
NORM = TensorSpec("norm", "float32", (6,))
SCHEMA = Schema((W, NORM))


def held(*boxes: tuple[str, Box], schema: Schema = SCHEMA) -> Holding:
    return Holding(schema, boxes)


def rows(low: int, high: int) -> tuple[str, Box]:
    return "w", Box((low, 0), (high, 6))


ALL_NORM = ("norm", Box.full((6,)))


def owners(shares: Ownership, name: str) -> np.ndarray:
    """The owner of each element of a tensor."""
    spec = shares.schema[name]
    result = np.full(spec.shape, -1)
    for domain in range(len(shares.tiling)):
        for tensor, box in shares.tiling.boxes(domain, shares.schema):
            if shares.schema.tensors[tensor].name == name:
                assert (result[box.slices()] == -1).all()
                result[box.slices()] = shares.owner[domain]
    return result


def test_shards_belong_to_their_rank_and_replicas_to_the_lowest() -> None:
    shares = share_out([held(rows(0, 4), ALL_NORM), held(rows(4, 8), ALL_NORM)], domain_elements=1 << 20)
    np.testing.assert_array_equal(owners(shares, "w"), np.repeat([0, 1], 4)[:, None] * np.ones(6, int))
    np.testing.assert_array_equal(owners(shares, "norm"), np.zeros(6))
    assert shares.holders.tolist() == [2 if w == 4 else 1 for w in shares.tiling.widths]


def test_borders_of_ranks_cut_however_small_what_they_hold() -> None:
    # Twelve elements would join any domain, if only receivers cared.
    shares = share_out([held(rows(0, 2), ALL_NORM), held(rows(2, 8))], domain_elements=1 << 20)
    for rank, holding in enumerate([held(rows(0, 2), ALL_NORM), held(rows(2, 8))]):
        np.testing.assert_array_equal(
            holding.domains(SCHEMA, shares.tiling), np.flatnonzero(shares.owner == rank)
        )


def test_hints_of_receivers_do_not_move_what_a_rank_owns() -> None:
    reader = Layout([Placement("w", Box((1, 0), (5, 6)), "x", 0, (6, 1))])
    holdings = [held(rows(0, 3), ALL_NORM), held(rows(3, 8), ALL_NORM)]
    shares = share_out(holdings, domain_elements=1 << 20, layouts=[reader])
    np.testing.assert_array_equal(owners(shares, "w")[:, 0], [0, 0, 0, 1, 1, 1, 1, 1])


def test_parts_held_by_overlapping_sets_of_ranks() -> None:
    holdings = [held(rows(0, 5), ALL_NORM), held(rows(3, 8)), held(rows(4, 6))]
    shares = share_out(holdings, domain_elements=1 << 20)
    np.testing.assert_array_equal(owners(shares, "w")[:, 0], [0, 0, 0, 0, 0, 1, 1, 1])
    for holding in holdings:
        mine = holding.domains(SCHEMA, shares.tiling)
        volume = int(shares.tiling.volume[mine].sum())
        assert volume == sum(box.volume for _, box in holding.boxes)


def test_an_element_that_nobody_holds_is_named() -> None:
    with pytest.raises(IncompleteError, match=r"'w' \(3, 0\) to \(5, 6\)") as caught:
        share_out([held(rows(0, 3), ALL_NORM), held(rows(5, 8))], domain_elements=1 << 20)
    assert caught.value.kind == "element-unowned"


def test_a_box_outside_its_tensor_names_the_rank() -> None:
    with pytest.raises(LayoutError, match="rank 1, 'w'"):
        share_out([held(rows(0, 8), ALL_NORM), held(rows(4, 9))], domain_elements=1 << 20)


def test_tensors_of_pipeline_and_expert_ranks_make_one_schema() -> None:
    one, two = (
        Schema((W, TensorSpec("e.0", "bfloat16", (4,)))),
        Schema((TensorSpec("e.1", "bfloat16", (4,)), W)),
    )
    shares = share_out([Holding.whole(one, one.names), Holding.whole(two, two.names)], domain_elements=100)
    assert shares.schema.names == ("w", "e.0", "e.1")
    assert (owners(shares, "e.1") == 1).all()
    assert (owners(shares, "w") == 0).all()


def test_a_name_that_is_two_tensors_is_refused_with_the_ranks() -> None:
    other = Schema((TensorSpec("w", "bfloat16", (6, 8)), NORM))
    with pytest.raises(SchemaError, match="'w', ranks 0 and 2"):
        share_out([Holding.whole(s, s.names) for s in (SCHEMA, SCHEMA, other)], domain_elements=1 << 20)


@given(st.data())
def test_every_element_has_one_owner_that_holds_it(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    schema = Schema((TensorSpec("w", "bfloat16", shape),))
    corners = [st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).map(sorted) for n in shape]
    box = st.tuples(*corners).map(
        lambda ranges: Box(tuple(a for a, _ in ranges), tuple(b + 1 for _, b in ranges))
    )
    ranks = data.draw(st.lists(st.lists(box, max_size=3), min_size=1, max_size=4))
    expected = np.full(shape, -1)
    for rank in reversed(range(len(ranks))):
        for each in ranks[rank]:
            expected[each.slices()] = rank
    holdings = [Holding(schema, tuple(("w", each) for each in boxes)) for boxes in ranks]
    aim = data.draw(st.sampled_from([1, 4, 1 << 20]))
    if (expected < 0).any():
        with pytest.raises(IncompleteError):
            share_out(holdings, domain_elements=aim)
        return
    shares = share_out(holdings, domain_elements=aim)
    np.testing.assert_array_equal(owners(shares, "w"), expected)
    for rank, holding in enumerate(holdings):
        mine = set(holding.domains(schema, shares.tiling).tolist())
        assert set(np.flatnonzero(shares.owner == rank).tolist()) <= mine
        assert mine == set(range(len(shares.tiling))) or all(
            not any(b.intersect(each) for each in ranks[rank])
            for domain in set(range(len(shares.tiling))) - mine
            for _, b in shares.tiling.boxes(domain, schema)
        )
