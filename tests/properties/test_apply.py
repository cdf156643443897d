"""What the kernels do to live memory and to digests, against plain numpy and plain Python."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafmt.addresses import contiguous_strides
from deltafmt.dtypes import dtype_of
from deltafmt.geometry import Box
from deltafmt.kernels.apply import (
    DomainView,
    apply_dense,
    apply_set,
    apply_step,
    cast_exact,
    gather_dense,
    scan,
)
from deltafmt.kernels.digest import GOLDEN, digest_run, zero
from deltafmt.kernels.steps import step_between
from deltafmt.layout import Layout, Placement, TargetInfo
from deltafmt.schema import Schema, TensorSpec
from deltafmt.segments import make_segments, tensor_salt
from deltafmt.tiling import make_tiling

M = 2**64


def plain_mix(x: int) -> int:
    for _ in range(2):
        x ^= x >> 32
        x = x * 0xD6E8FEB86659FD93 % M
    return x ^ (x >> 32)


def plain_digest(name: str, data: bytes) -> list[int]:
    """The definition, word by word."""
    words = np.frombuffer(data + b"\0" * (-len(data) % 4), "<u4").tolist()
    result = []
    for lane, salt in enumerate(tensor_salt(name)):
        total = 0
        for p, word in enumerate(words):
            a = (plain_mix(GOLDEN * (2 * (p % 512) + lane + 1) % M) >> 32) | 1
            m = plain_mix((salt + GOLDEN * (p // 512 + 1)) % M) | 1
            total = (total + a * m * word) % M
        result.append(total)
    return result


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], width: int) -> np.ndarray:
    return rng.integers(0, 2 ** (8 * width) - 1, shape, dtype=f"<u{width}", endpoint=True)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_digest_is_its_definition_whole_and_in_parts(width: int) -> None:
    bits = random_bits(np.random.default_rng(width), (3001,), width)
    expected = plain_digest("x", bits.tobytes())
    for cuts in ([0, 3001], [0, 1, 2, 7, 1031, 3001], [0, 3, 6, 513, 514, 2999, 3001]):
        total = zero()
        for low, high in itertools.pairwise(cuts):
            digest_run(bits[low:high], low, tensor_salt("x"), total)
        assert total.tolist() == expected


def test_known_digest() -> None:
    """A value that another implementation can compare itself with."""
    total = zero()
    digest_run(np.arange(5, dtype=np.uint16), 0, tensor_salt("w"), total)
    assert total.tolist() == plain_digest("w", np.arange(5, dtype="<u2").tobytes())
    assert tensor_salt("w") != tensor_salt("v")


class Case:
    """A tensor held twice: permuted as a whole, and its last columns once more."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.rng = rng
        self.dtype = str(rng.choice(["int8", "bfloat16", "float32", "float64"]))
        self.width = dtype_of(self.dtype).width
        shape = tuple(int(n) for n in rng.integers(1, 40, rng.integers(1, 4)))
        self.schema = Schema((TensorSpec("w", self.dtype, shape), TensorSpec("v", self.dtype, (7,))))
        self.old = random_bits(rng, shape, self.width)
        self.new = self.old.copy()
        at = rng.random(shape) < 0.3
        self.new[at] = random_bits(rng, (int(at.sum()),), self.width)
        permutation = rng.permutation(len(shape))
        self.whole = np.transpose(self.old, permutation).copy(order="C")
        self.live = np.transpose(self.whole, np.argsort(permutation))
        strides = tuple(int(s) // self.width for s in self.live.strides)
        placements = [Placement("w", Box.full(shape), "whole", 0, strides)]
        targets = {"whole": TargetInfo(self.dtype, self.whole.shape, contiguous_strides(self.whole.shape))}
        self.cut = int(rng.integers(1, shape[-1])) if shape and shape[-1] > 1 else 0
        self.part = self.old[..., self.cut :].copy(order="C")
        if self.cut:
            box = Box((0,) * (len(shape) - 1) + (self.cut,), shape)
            placements.append(Placement("w", box, "part", 0, contiguous_strides(self.part.shape)))
            targets["part"] = TargetInfo(self.dtype, self.part.shape, contiguous_strides(self.part.shape))
        layout = Layout(placements)
        layout.validate(self.schema, targets)
        hints = [layout] if rng.random() < 0.5 else []
        self.tiling = make_tiling(
            self.schema, domain_elements=int(rng.choice([10, 1000, 5000])), layouts=hints
        )
        self.table = make_segments(self.schema, self.tiling, layout, targets)
        addresses = [self.whole.ctypes.data] + ([self.part.ctypes.data] if self.cut else [])
        self.addresses = np.array(addresses, np.int64)

    def views(self) -> list[tuple[DomainView, np.ndarray, np.ndarray]]:
        """Each touched domain with its old and new elements by position; tensor `v` is not held."""
        result = []
        for domain in np.flatnonzero(self.table.touched).tolist():
            old = np.zeros(int(self.tiling.volume[domain]), self.old.dtype)
            new, at = old.copy(), 0
            for tensor, box in self.tiling.boxes(domain, self.schema):
                if tensor == 0:
                    old[at : at + box.volume] = self.old[box.slices()].reshape(-1)
                    new[at : at + box.volume] = self.new[box.slices()].reshape(-1)
                at += box.volume
            view = DomainView(self.table, domain, self.addresses, self.width)
            result.append((view, old, new))
        return result

    def holds(self, bits: np.ndarray) -> bool:
        return bool(
            (self.live == bits).all() and (not self.cut or (self.part == bits[..., self.cut :]).all())
        )


@given(st.integers(0, 2**32))
def test_changes_land_everywhere_undo_and_digest(seed: int) -> None:
    case = Case(seed)
    total, change, log = zero(), zero(), []
    for view, old, new in case.views():
        gathered = np.zeros_like(old)
        gather_dense(view, gathered)
        assert (gathered == old).all()
        total += scan(view, old).sum(axis=0)
        positions = np.flatnonzero(old != new).astype(np.uint32)
        undo = np.zeros(len(positions), old.dtype)
        if case.rng.random() < 0.5:
            apply_step(view, positions, step_between(old[positions], new[positions], 1), 1, undo, change)
        else:
            apply_set(view, positions, new[positions], undo, change)
        assert (undo == old[positions]).all()
        log.append((view, positions, undo, new))
    assert case.holds(case.new)
    assert total.tolist() == plain_digest("w", case.old.tobytes())
    assert (total + change).tolist() == plain_digest("w", case.new.tobytes())
    back = zero()
    for view, positions, undo, _ in log:
        apply_set(view, positions, undo, None, back)
    assert case.holds(case.old)
    assert not (back + change).any()
    for view, _, _, new in log:
        apply_dense(view, new)
    assert case.holds(case.new)


def test_a_cast_target_carries_bf16_bits_in_its_upper_half() -> None:
    schema = Schema((TensorSpec("w", "bfloat16", (3, 4)),))
    layout = Layout([Placement("w", Box((0, 0), (3, 4)), "w", 0, (4, 1))], casts={"w": "bfloat16"})
    targets = {"w": TargetInfo("float32", (3, 4), (4, 1))}
    layout.validate(schema, targets)
    table = make_segments(schema, make_tiling(schema), layout, targets)
    bits = np.arange(12, dtype=np.uint16) + np.uint16(0x3F80)
    live = bits.astype(np.uint32) << np.uint32(16)
    view = DomainView(table, 0, np.array([live.ctypes.data], np.int64), 2)
    assert cast_exact(view, bits)
    digest = scan(view, bits).sum(axis=0)
    assert digest.tolist() == plain_digest("w", bits.tobytes())
    apply_step(view, np.array([5], np.uint32), np.array([1], np.uint16), 1, None, zero())
    assert live[5] == (int(bits[5]) + 1) << 16
    live[3] |= 1
    assert not cast_exact(view, bits)
