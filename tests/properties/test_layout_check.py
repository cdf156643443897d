"""Layouts are accepted exactly where each element of a target is filled once, however that is found out."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafmt import layout_check, layout_windows
from deltafmt.addresses import Digits, Strided
from deltafmt.errors import LayoutError
from deltafmt.geometry import Box
from deltafmt.layout import Layout, Placement, TargetInfo
from deltafmt.layout_check import find_clash
from deltafmt.schema import Schema, TensorSpec

SHAPES = {"a": (2, 6), "b": (3, 4), "c": (12,), "d": (2, 2, 3)}
SCHEMA = Schema(
    (
        *(TensorSpec(name, "bfloat16", shape) for name, shape in SHAPES.items()),
        TensorSpec("tied", "bfloat16", SHAPES["a"], "a"),
    )
)
STRIDES = st.sampled_from((0, 1, 1, 2, 2, 3, 4, 6, 6, 7, 12, 24))


@st.composite
def strided(draw: st.DrawFn) -> Strided:
    rank = draw(st.integers(0, 3))
    shape = draw(st.tuples(*[st.integers(1, 6)] * rank))
    return Strided(shape, draw(st.tuples(*[STRIDES] * rank)), draw(st.integers(0, 30)))


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    source = draw(st.sampled_from(SCHEMA.names))
    shape = SCHEMA[source].shape
    if draw(st.booleans()):
        box = Box.full(shape)
    else:
        start = tuple(draw(st.integers(0, n - 1)) for n in shape)
        box = Box(start, tuple(draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True)))
    strides = draw(st.tuples(*[STRIDES] * len(shape)))
    return Placement(source, box, "t", draw(st.integers(0, 12)), strides)


TARGETS = st.sampled_from(
    [
        TargetInfo("bfloat16", shape, strides)
        for shape, strides in [
            ((12,), (1,)),
            ((24,), (1,)),
            ((12,), (2,)),
            ((4, 6), (6, 1)),
            ((6, 4), (1, 6)),
            ((2, 3, 4), (12, 4, 1)),
            ((3, 4), (8, 2)),
            ((3, 5), (7, 1)),
            ((2, 6), (10, 1)),
            ((3, 2, 2), (7, 2, 1)),
        ]
    ]
)


def each(p: Placement) -> list[tuple[int, object]]:
    """(address, (element, map)) of a placement, one by one."""
    owner = SCHEMA.resolve(p.source).name
    start = p.source_box.start
    origin = p.offset - sum(a * s for a, s in zip(start, p.strides, strict=True))
    indices = itertools.product(*map(range, start, p.source_box.stop))
    return [
        (
            origin + sum(i * s for i, s in zip(index, p.strides, strict=True)),
            (owner, index, origin, p.strides),
        )
        for index in indices
    ]


def is_good(info: TargetInfo, filled: list[Placement], idle: list[Box]) -> bool:
    own = {
        sum(i * s for i, s in zip(index, info.strides, strict=True)): index
        for index in itertools.product(*map(range, info.shape))
    }
    stands: dict[int, set[object]] = defaultdict(set)
    for p in filled:
        addresses = [address for address, _ in each(p)]
        if len(set(addresses)) != len(addresses):
            return False
        for address, element in each(p):
            stands[address].add(element)
    for box in idle:
        for address, index in own.items():
            if all(a <= i < b for a, i, b in zip(box.start, index, box.stop, strict=True)):
                if stands[address]:
                    return False
                stands[address].add("idle")
    meant = {address for address, elements in stands.items() if elements}
    return meant == own.keys() and all(len(stands[address]) == 1 for address in meant)


def verdict(info: TargetInfo, filled: list[Placement], idle: list[Box]) -> bool:
    try:
        Layout(filled, untouched=[("t", box) for box in idle]).validate(SCHEMA, {"t": info})
    except LayoutError:
        return False
    return True


@given(info=TARGETS, filled=st.lists(placements(), max_size=3), data=st.data())
def test_any_placements(info: TargetInfo, filled: list[Placement], data: st.DataObject) -> None:
    start = tuple(data.draw(st.integers(0, n - 1)) for n in info.shape)
    stop = tuple(data.draw(st.integers(a, n)) for a, n in zip(start, info.shape, strict=True))
    idle = [Box(start, stop)]
    assert verdict(info, filled, idle) == is_good(info, filled, idle)


@given(info=TARGETS, order=st.permutations(range(4)), data=st.data())
def test_targets_cut_into_placements(info: TargetInfo, order: list[int], data: st.DataObject) -> None:
    """Pieces that fill a target, of which one may be moved, left out or doubled."""
    source = Schema((TensorSpec("w", "bfloat16", info.shape), TensorSpec("w2", "bfloat16", info.shape)))
    cuts = [sorted({0, n, data.draw(st.integers(0, n))}) for n in info.shape]
    boxes = itertools.product(*(list(itertools.pairwise(cut)) for cut in cuts))
    filled = []
    for corners in boxes:
        box = Box(tuple(a for a, _ in corners), tuple(b for _, b in corners))
        offset = sum(a * s for a, s in zip(box.start, info.strides, strict=True))
        filled.append(Placement(data.draw(st.sampled_from(("w", "w2"))), box, "t", offset, info.strides))
    filled.sort(key=lambda p: order[p.offset % 4])
    Layout(filled).validate(source, {"t": info})
    odd = filled[0]
    for wrong in (
        [*filled[1:], Placement(odd.source, odd.source_box, "t", odd.offset + 1, odd.strides)],
        filled[1:],
        [
            *filled,
            Placement("w2" if odd.source == "w" else "w", odd.source_box, "t", odd.offset, odd.strides),
        ],
    ):
        with pytest.raises(LayoutError):
            Layout(wrong).validate(source, {"t": info})
    again = Placement(odd.source, odd.source_box, "t", odd.offset, odd.strides)
    Layout([*filled, again]).validate(source, {"t": info})


@given(filled=st.lists(placements(), max_size=4))
def test_names_that_share_memory(filled: list[Placement]) -> None:
    stands: dict[int, set[object]] = defaultdict(set)
    for p in filled:
        addresses = [address for address, _ in each(p)]
        if len(set(addresses)) != len(addresses):
            return
        for address, element in each(p):
            stands[address].add(element)
    good = all(len(elements) == 1 for elements in stands.values())
    assert (find_clash(filled, SCHEMA) is None) == good


@given(each=strided(), low=st.integers(0, 80), size=st.integers(1, 40))
def test_windows_have_each_element_once(each: Strided, low: int, size: int) -> None:
    found = [each.part(start, shape).addresses().tolist() for start, shape in each.within(low, low + size)]
    wanted = sorted(address for address in each.addresses().tolist() if low <= address < low + size)
    assert sorted(itertools.chain.from_iterable(found)) == wanted


@given(sets=st.lists(strided(), min_size=1, max_size=3))
def test_digits_are_the_addresses(sets: list[Strided]) -> None:
    digits = Digits.of(sets)
    if digits is None:
        return
    for number, one in enumerate(sets):
        boxes = digits.take(digits.owner == number)
        found = [
            sum(i * s for i, s in zip(index, digits.steps.tolist(), strict=True))
            for start, stop in zip(boxes.start.tolist(), boxes.stop.tolist(), strict=True)
            for index in itertools.product(*map(range, start, stop))
        ]
        assert sorted(found) == sorted(one.addresses().tolist())


def _never(*_: object) -> None:
    raise AssertionError("looked at elements")


@pytest.mark.parametrize("experts", [1, 64])
def test_the_usual_layouts_are_told_without_looking_at_elements(
    monkeypatch: pytest.MonkeyPatch, experts: int
) -> None:
    """Interleaved gates, heads as a dimension, flat buffers, padded rows, thousands of rows, 16 GiB and more each."""
    monkeypatch.setattr(layout_check, "check_windows", _never)
    monkeypatch.setattr(layout_check, "clashing", _never)
    rows, columns = 1 << 14, 1 << 20
    names = [f"{name}.{e}" for e in range(experts) for name in "gu"]
    specs = [TensorSpec(name, "bfloat16", (rows, columns)) for name in names]
    specs.append(TensorSpec("flat", "bfloat16", (rows * columns,)))
    specs.append(TensorSpec("heads", "bfloat16", (rows // 64, 64, columns)))
    schema = Schema(specs)
    full, size = Box.full((rows, columns)), rows * columns
    stack = TargetInfo("bfloat16", (experts, 2 * rows, columns), (2 * size, columns, 1))
    interleaved = [
        Placement(f"{name}.{e}", full, "t", 2 * size * e + columns * k, (2 * columns, 1))
        for e in range(experts)
        for k, name in enumerate("gu")
    ]
    Layout(interleaved).validate(schema, {"t": stack})
    assert find_clash(interleaved, schema) is None
    matrix = TargetInfo("bfloat16", (rows, columns), (columns, 1))
    Layout([Placement("flat", Box.full((size,)), "t", 0, (1,))]).validate(schema, {"t": matrix})
    heads = Placement("heads", Box.full((rows // 64, 64, columns)), "t", 0, (64 * columns, columns, 1))
    Layout([heads]).validate(schema, {"t": matrix})
    padded = TargetInfo("bfloat16", (rows, columns, 2), (2 * columns + 3, 2, 1))
    pairs = [Placement(f"{n}.0", full, "t", k, (2 * columns + 3, 2)) for k, n in enumerate("gu")]
    Layout(pairs).validate(schema, {"t": padded})
    shuffled = [
        Placement("g.0", Box((row, 0), (row + 1, columns)), "t", row * 77 % rows * columns, (columns, 1))
        for row in range(rows)
    ]
    Layout(shuffled).validate(schema, {"t": matrix})


def test_what_is_no_box_of_digits_is_looked_at_window_by_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_windows, "WINDOW_ELEMENTS", 16)
    schema = Schema((TensorSpec("two", "bfloat16", (30,)), TensorSpec("three", "bfloat16", (30,))))
    target = {"t": TargetInfo("bfloat16", (60,), (1,))}
    threes = Placement("three", Box((0,), (20,)), "t", 0, (3,))
    twos = Placement("two", Box((0,), (2,)), "t", 2, (2,))
    assert Digits.of([Strided((20,), (3,), 0), Strided((2,), (2,), 2)]) is None
    rest = [("t", Box((a,), (a + 1,))) for a in range(60) if a % 3 and a not in (2, 4)]
    Layout([threes, twos], untouched=rest).validate(schema, target)
    with pytest.raises(LayoutError, match=r"index \(59,\)"):
        Layout([threes, twos], untouched=rest[:-1]).validate(schema, target)
    late = Placement("two", Box((29,), (30,)), "t", 57, (1,))
    with pytest.raises(LayoutError, match="element 57 from its first"):
        Layout([threes, twos, late], untouched=rest).validate(schema, target)
    assert find_clash([threes, twos], schema) is None
    assert find_clash([threes, twos, late], schema) == late
