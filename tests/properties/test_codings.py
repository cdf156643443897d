"""Whatever changed comes back from its coding, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafmt.kernels.diff import DiffScratch, diff
from deltafmt.kernels.fold import compose
from deltafmt.kernels.positions import (
    block_starts,
    count_blocks,
    decode_positions,
    encode_positions,
    pack_counts,
    unpack_counts,
)
from deltafmt.kernels.steps import (
    add_step,
    decode_steps,
    encode_steps,
    from_planes,
    negate,
    step_between,
    to_planes,
)
from deltafmt.write.encode import choose_shift

SEEDS = st.integers(0, 2**32 - 1)
WIDTHS = st.sampled_from([1, 2, 4, 8])
DENSITIES = st.sampled_from([0.0003, 0.01, 0.3, 1.0])


def random_bits(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    return rng.integers(0, 2 ** (8 * width) - 1, count, dtype=f"<u{width}", endpoint=True)


def changed_pair(seed: int, width: int, density: float, *, near: bool) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    count = int(rng.choice([1, 63, 64, 65, 1000, 30_000]))
    old = random_bits(rng, count, width)
    new = old.copy()
    at = rng.random(count) < density
    new[at] = (
        old[at] + rng.integers(1, 4, at.sum()).astype(old.dtype)
        if near
        else random_bits(rng, at.sum(), width)
    )
    return old, new


def boxes(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    cuts = np.unique(np.concatenate(([0, count], rng.integers(0, count + 1, 3))))
    return cuts[:-1], np.diff(cuts)


@given(SEEDS, WIDTHS, DENSITIES)
def test_diff_finds_what_differs_and_nothing_else(seed: int, width: int, density: float) -> None:
    old, new = changed_pair(seed, width, density, near=False)
    pieces = diff(old, new, 7, DiffScratch())
    positions = np.concatenate([p for p, _, _ in pieces]) if pieces else np.empty(0, np.uint32)
    expected = np.flatnonzero(old != new)
    assert positions.tolist() == (expected + 7).tolist()
    if pieces:
        assert (np.concatenate([o for _, o, _ in pieces]) == old[expected]).all()
        assert (np.concatenate([n for _, _, n in pieces]) == new[expected]).all()


def test_diff_goes_on_over_pieces() -> None:
    old = np.zeros((1 << 19) + 100, np.uint16)
    new = old.copy()
    new[[0, (1 << 19) - 1, 1 << 19, len(new) - 1]] = 1
    positions = np.concatenate([p for p, _, _ in diff(old, new, 0, DiffScratch())])
    assert positions.tolist() == np.flatnonzero(new).tolist()


@given(SEEDS, DENSITIES, st.sampled_from([6, 10, 16]), st.sampled_from([None, 0, 1, 5, 16]))
def test_positions_come_back(seed: int, density: float, block_log2: int, shift: int | None) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 40_000))
    positions = np.flatnonzero(rng.random(count) < density).astype(np.uint32)
    starts = block_starts(*boxes(seed, count), block_log2)
    assert len(starts) - 1 == count_blocks(boxes(seed, count)[1], block_log2)
    if shift is None:
        shift = choose_shift(positions, starts)
    coded = encode_positions(positions, starts, shift)
    back = decode_positions(
        coded.gap, coded.low, coded.entries, coded.elements,
        starts=starts, shift=shift, listed=len(positions), where="x",
    )  # fmt: skip
    assert back.tolist() == positions.tolist()
    assert all(
        (a == b).all()
        for a, b in zip(
            unpack_counts(pack_counts(coded.entries, coded.elements)[: 8 * (len(starts) - 1)], 2),
            (coded.entries, coded.elements),
            strict=True,
        )
    )


@given(SEEDS, WIDTHS, DENSITIES, st.booleans(), st.sampled_from([0, 1]))
def test_steps_come_back_and_lead_there_and_back(
    seed: int, width: int, density: float, near: bool, order: int
) -> None:
    old, new = changed_pair(seed, width, density, near=near)
    at = np.flatnonzero(old != new)
    old, new = old[at], new[at]
    step = step_between(old, new, order)
    assert (step != 0).all()
    assert (add_step(old, step, order) == new).all()
    assert (add_step(new, negate(step), order) == old).all()
    elements = np.array([len(at) // 2, len(at) - len(at) // 2], np.uint32)
    back = decode_steps(encode_steps(step, elements), elements, listed=len(at), dtype=step.dtype, where="x")
    assert (back == step).all()


@given(SEEDS, WIDTHS)
def test_planes_come_back(seed: int, width: int) -> None:
    bits = random_bits(np.random.default_rng(seed), seed % 999 + 1, width)
    assert (from_planes(list(to_planes(bits)), bits.dtype) == bits).all()


@given(SEEDS, WIDTHS, st.sampled_from([0, 1]))
def test_composed_steps_do_what_both_do(seed: int, width: int, order: int) -> None:
    rng = np.random.default_rng(seed)
    first = random_bits(rng, 500, width)
    second, third = first.copy(), first.copy()
    second[rng.random(500) < 0.3] += np.uint8(1)
    third[:] = second
    back = rng.random(500) < 0.2
    third[back] = first[back]
    third[rng.random(500) < 0.2] += np.uint8(3)

    def steps(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        at = np.flatnonzero(a != b).astype(np.uint32)
        return at, step_between(a[at], b[at], order)

    positions, step = compose(steps(first, second), steps(second, third))
    expected = steps(first, third)
    assert positions.tolist() == expected[0].tolist()
    assert step.tolist() == expected[1].tolist()


@pytest.mark.parametrize(
    ("old", "new", "step"),
    [
        (0x3F80, 0x3F81, 1),  # 1.0 to the next value up
        (0xBF80, 0xBF81, -1),  # -1.0 to the next value down
        (0x0000, 0x8000, -1),  # +0 to -0
        (0x7F80, 0x7F81, 1),  # infinity to the first NaN
        (0x8001, 0x0001, 3),  # across both zeros
    ],
)
def test_neighbouring_values_are_one_step_apart(old: int, new: int, step: int) -> None:
    found = step_between(np.array([old], np.uint16), np.array([new], np.uint16), 1)
    assert found.view(np.int16)[0] == step
