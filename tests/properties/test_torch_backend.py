"""The torch back end against the compiled one: the same memory, old bits and digests after every verb."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltafmt.geometry import Box
from deltafmt.kernels import apply as compiled
from deltafmt.kernels import torch_backend
from deltafmt.kernels.digest import zero
from deltafmt.kernels.steps import step_between
from deltafmt.layout import Layout, Placement, TargetInfo
from deltafmt.schema import Schema, TensorSpec
from deltafmt.segments import make_segments
from deltafmt.tiling import make_tiling
from tests.properties.test_apply import Case


def flats(case: Case) -> list[torch.Tensor | None]:
    arrays = [case.whole] + ([case.part] if case.cut else [])
    return [torch.from_numpy(array.reshape(-1).view(f"<i{case.width}")) for array in arrays]


def pairs(seed: int) -> tuple[Case, Case, list[tuple[Any, Any, np.ndarray, np.ndarray]]]:
    """Two equal cases, and per domain the view of either with old and new bits by position."""
    one, two = Case(seed), Case(seed)
    domains = np.flatnonzero(two.table.touched).tolist()
    foreign = [torch_backend.TorchView(two.table, domain, flats(two), two.width) for domain in domains]
    both = [(*views, other) for views, other in zip(one.views(), foreign, strict=True)]
    return one, two, [(view, other, old, new) for view, old, new, other in both]


def alike(one: Case, two: Case) -> bool:
    return bool((one.whole == two.whole).all() and (one.part == two.part).all())


@given(st.integers(0, 2**32), st.sampled_from([0, 1]), st.booleans())
def test_both_back_ends_do_the_same(seed: int, order: int, steps: bool) -> None:
    one, two, domains = pairs(seed)
    for view, other, old, new in domains:
        positions = np.flatnonzero(old != new).astype(np.uint32)
        values = step_between(old[positions], new[positions], order) if steps else new[positions]
        results = []
        for module, side in ((compiled, view), (torch_backend, other)):
            before, change, gathered = np.zeros_like(values), zero(), np.zeros_like(old)
            if steps:
                module.apply_step(side, positions, values, order, before, change)
            else:
                module.apply_set(side, positions, values, before, change)
            total = module.scan(side, old)
            module.gather_dense(side, gathered)
            results.append([before, change, total, gathered])
        for found, expected in zip(*results, strict=True):
            assert (found == expected).all()
        assert alike(one, two)
    for view, other, old, _ in domains:
        compiled.apply_dense(view, old)
        torch_backend.apply_dense(other, old)
    assert alike(one, two)
    assert two.holds(two.old)


@pytest.mark.parametrize("seed", range(6))
def test_parts_of_a_view_are_the_same_parts(seed: int) -> None:
    one, two, domains = pairs(seed)
    for view, other, old, _ in domains:
        segments = len(other.flats)
        for chosen in (np.arange(segments) % 2 == 0, np.zeros(segments, bool), np.ones(segments, bool)):
            found = torch_backend.scan(other.restricted(chosen), old)
            assert (found == compiled.scan(view.restricted(chosen), old)).all()
            assert (found == compiled.scan(view, old)[chosen]).all()
    assert alike(one, two)


@given(
    seed=st.integers(0, 2**32),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    transposed=st.booleans(),
    order=st.sampled_from([0, 1]),
    inexact=st.booleans(),
)
def test_both_do_the_same_behind_a_cast(
    seed: int, shape: tuple[int, int], transposed: bool, order: int, inexact: bool
) -> None:
    """BF16 in the upper half of FP32, wherever its elements lie."""
    rng = np.random.default_rng(seed)
    rows, columns = shape
    schema = Schema((TensorSpec("w", "bfloat16", shape),))
    strides = (1, rows) if transposed else (columns, 1)
    targets = {"w": TargetInfo("float32", shape, strides)}
    layout = Layout([Placement("w", Box.full(shape), "w", 0, strides)], casts={"w": "bfloat16"})
    table = make_segments(schema, make_tiling(schema), layout, targets)
    old = rng.integers(0, 2**16, rows * columns).astype("<u2")
    in_place = old.reshape(shape).T if transposed else old.reshape(shape)
    wide = np.ascontiguousarray(in_place).reshape(-1).astype("<u4") << 16
    if inexact:
        wide[rng.integers(len(wide))] |= 1 << int(rng.integers(16))
    one, two = wide.copy(), wide.copy()
    addresses = np.array([one.ctypes.data], np.int64)
    sides: list[tuple[Any, Any]] = [
        (compiled, compiled.DomainView(table, 0, addresses, 2)),
        (torch_backend, torch_backend.TorchView(table, 0, [torch.from_numpy(two.view("<i4"))], 2)),
    ]
    assert [module.cast_exact(side, old) for module, side in sides] == [not inexact] * 2
    if inexact:
        return
    positions = np.flatnonzero(rng.random(len(old)) < 0.5).astype(np.uint32)
    values = rng.integers(1, 2**16, len(positions)).astype("<u2")
    results = []
    for module, side in sides:
        before, moved, gathered = np.zeros_like(values), zero(), np.zeros_like(old)
        module.apply_step(side, positions, values, order, before, moved)
        module.apply_set(side, positions[::2], values[::2], None, moved)
        total = module.scan(side, old)
        module.gather_dense(side, gathered)
        results.append([before, moved, total, gathered])
    for found, expected in zip(*results, strict=True):
        assert (found == expected).all()
    assert (one == two).all()
    assert (one & 0xFFFF == 0).all()
    for module, side in sides:
        module.apply_dense(side, old)
    assert (one == wide).all()
    assert (two == wide).all()
