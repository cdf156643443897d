from __future__ import annotations

import pytest

from deltafmt.errors import LayoutError
from deltafmt.geometry import Box
from deltafmt.layout import Layout, Placement, TargetInfo
from deltafmt.schema import Schema, TensorSpec

SCHEMA = Schema(
    (
        TensorSpec("w", "bfloat16", (4, 6)),
        TensorSpec("v", "bfloat16", (4, 6)),
        TensorSpec("tied", "bfloat16", (4, 6), "w"),
        TensorSpec("s", "bfloat16", ()),
        TensorSpec("e", "bfloat16", (0, 3)),
        TensorSpec("f", "float32", (2,)),
    )
)


def whole(source: str, target: str, offset: int = 0, strides: tuple[int, ...] = (6, 1)) -> Placement:
    return Placement(source, Box((0, 0), (4, 6)), target, offset, strides)


def bf16(shape: tuple[int, ...], strides: tuple[int, ...]) -> TargetInfo:
    return TargetInfo("bfloat16", shape, strides)


def refused(layout: Layout, targets: dict[str, TargetInfo]) -> str:
    with pytest.raises(LayoutError) as caught:
        layout.validate(SCHEMA, targets)
    return caught.value.kind


def test_identity_covers_scalars_and_empties() -> None:
    targets = {
        "w": bf16((4, 6), (6, 1)),
        "v": bf16((4, 6), (6, 1)),
        "tied": bf16((4, 6), (6, 1)),
        "s": bf16((), ()),
        "e": bf16((0, 3), (3, 1)),
        "f": TargetInfo("float32", (2,), (1,)),
    }
    Layout.identity(SCHEMA).validate(SCHEMA, targets)
    Layout.by_name(SCHEMA, targets).validate(SCHEMA, targets)


def test_strided_targets() -> None:
    Layout([whole("w", "t", strides=(1, 4))]).validate(SCHEMA, {"t": bf16((6, 4), (4, 1))})
    Layout([whole("w", "t", strides=(12, 2))]).validate(SCHEMA, {"t": bf16((4, 6), (12, 2))})


def test_tied_names_fill_one_tensor_once() -> None:
    Layout([whole("w", "t"), whole("tied", "t")]).validate(SCHEMA, {"t": bf16((4, 6), (6, 1))})
    part = Placement("tied", Box((1, 0), (3, 6)), "t", 6, (6, 1))
    Layout([whole("w", "t"), part]).validate(SCHEMA, {"t": bf16((4, 6), (6, 1))})


def test_an_odd_mapping_is_checked_element_by_element() -> None:
    # Rows interleaved: row r of w to row 2 r, row r of v to row 2 r + 1, then one element forgotten.
    targets = {"t": bf16((8, 6), (6, 1))}
    layout = Layout([whole("w", "t", 0, (12, 1)), whole("v", "t", 6, (12, 1))])
    layout.validate(SCHEMA, targets)
    short = Placement("v", Box((0, 0), (4, 5)), "t", 6, (12, 1))
    with pytest.raises(LayoutError, match=r"index \(1, 5\)"):
        Layout([whole("w", "t", 0, (12, 1)), short]).validate(SCHEMA, targets)


@pytest.mark.parametrize(
    ("placements", "kind"),
    [
        ([whole("nothing", "t")], "name-unknown"),
        ([whole("w", "nothing")], "name-unknown"),
        ([whole("w", "t"), whole("v", "t")], "placement-overlap"),
        ([whole("w", "t", 1)], "placement-outside"),
        ([whole("w", "t", -1)], "placement-outside"),
        ([Placement("w", Box((0, 0), (5, 6)), "t", 0, (6, 1))], "placement-outside"),
        ([Placement("w", Box((0, 0), (3, 6)), "t", 0, (6, 1))], "target-unfilled"),
        ([whole("w", "t", strides=(5, 1))], "placement-overlap"),
        ([Placement("f", Box((0,), (2,)), "t", 0, (1,))], "dtype-mismatch"),
        ([Placement("w", Box((0, 0), (4, 6)), "t", 0, (6,))], "placement-outside"),
    ],
)
def test_what_does_not_fit_is_refused(placements: list[Placement], kind: str) -> None:
    assert refused(Layout(placements), {"t": bf16((4, 6), (6, 1))}) == kind


def test_elements_between_a_targets_own_are_not_for_placements() -> None:
    targets = {"t": bf16((4, 3), (6, 2))}
    stray = Placement("w", Box((0, 0), (4, 3)), "t", 0, (6, 1))
    assert refused(Layout([stray]), targets) in {"placement-outside", "target-unfilled"}


def test_targets_that_overlap_themselves_are_refused() -> None:
    assert refused(Layout([whole("w", "t", strides=(0, 1))]), {"t": bf16((4, 6), (0, 1))}) == "target-strides"


def test_untouched_parts_must_lie_in_the_target() -> None:
    targets = {"t": bf16((5, 6), (6, 1))}
    Layout([whole("w", "t")], untouched=[("t", Box((4, 0), (5, 6)))]).validate(SCHEMA, targets)
    assert (
        refused(Layout([whole("w", "t")], untouched=[("t", Box((4, 0), (6, 6)))]), targets)
        == "placement-outside"
    )


def test_only_declared_lossless_casts() -> None:
    wide = {"t": TargetInfo("float32", (4, 6), (6, 1))}
    assert refused(Layout([whole("w", "t")]), wide) == "dtype-mismatch"
    Layout([whole("w", "t")], casts={"t": "bfloat16"}).validate(SCHEMA, wide)
    narrow = {"t": TargetInfo("bfloat16", (2,), (1,))}
    layout = Layout([Placement("f", Box((0,), (2,)), "t", 0, (1,))], casts={"t": "float32"})
    assert refused(layout, narrow) == "dtype-mismatch"
