"""Chunks that a writer makes, decoded again by a reader."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltafmt.format.chunk import ColumnHead, PackedChunk
from deltafmt.kernels.digest import zero
from deltafmt.kernels.steps import add_step
from deltafmt.read.decode import Decoded, DomainShape, decode_chunk
from deltafmt.schema import Schema, TensorSpec
from deltafmt.tiling import make_tiling
from deltafmt.write.cut import Cut
from deltafmt.write.dense import encode_dense
from deltafmt.write.detect import Detected
from deltafmt.write.encode import choose_shift, encode_set, encode_step
from deltafmt.write.source import LiveSource

DTYPES = {"uint8": 1, "bfloat16": 2, "float32": 4, "int64": 8}


def cut_of(dtype: str, volume: int) -> Cut:
    schema = Schema((TensorSpec("a", dtype, (volume // 3,)), TensorSpec("b", dtype, (volume - volume // 3,))))
    return Cut(schema, make_tiling(schema))


def decoded(cut: Cut, chunk: PackedChunk) -> Decoded:
    columns = tuple(ColumnHead(column=a, codec=b, stored=c, raw=d, crc=e) for a, b, c, d, e in chunk.columns)
    shape = DomainShape(
        width=cut.width(0), box_position=cut.tiling.box_position, box_volume=cut.tiling.box_volume
    )
    return decode_chunk(chunk.head, columns, memoryview(b"".join(chunk.buffers)), shape, where="test")


@given(
    st.sampled_from(list(DTYPES)),
    st.integers(6, 200_000),
    st.sampled_from([0.00003, 0.001, 0.02, 0.5, 1.0]),
    st.integers(0, 1000),
)
def test_what_is_encoded_is_decoded(dtype: str, volume: int, share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    cut = cut_of(dtype, volume)
    bits = np.dtype(f"<u{DTYPES[dtype]}")
    positions = np.flatnonzero(random.random(volume) < share).astype(np.uint32)
    if not len(positions):
        positions = np.array([volume - 1], np.uint32)
    size = len(positions) * bits.itemsize
    old, new = (random.integers(0, 256, size, np.uint8).view(bits) for _ in range(2))
    near = random.random(len(positions)) < 0.8
    new = np.where(near, old + random.integers(1, 40, len(positions)).astype(bits), new)
    new = np.where(new == old, old ^ 1, new).astype(bits)
    detected = Detected(domain=0, positions=positions, old=old, new=new, result=zero(), base=None)
    step = decoded(cut, encode_step(cut, detected))
    assert step.positions is not None
    np.testing.assert_array_equal(step.positions, positions)
    np.testing.assert_array_equal(add_step(old, step.values, step.order), new)
    given_bits = decoded(cut, encode_set(cut, 0, positions, new))
    assert given_bits.positions is not None
    np.testing.assert_array_equal(given_bits.positions, positions)
    np.testing.assert_array_equal(given_bits.values, new)


def test_dense_chunks_are_decoded() -> None:
    cut = cut_of("float32", 5000)
    bits = np.arange(5000, dtype="<u4") * 77777
    live = torch.from_numpy(bits.view(np.float32))
    source = LiveSource(cut, {"a": live[:1666], "b": live[1666:]})
    chunk = encode_dense(cut, source, 0)
    np.testing.assert_array_equal(decoded(cut, chunk).values, bits)
    assert encode_dense(cut, source, 0, below=chunk.nbytes) is None
    assert encode_dense(cut, source, 0, below=chunk.nbytes + 1) == chunk


@pytest.mark.parametrize(("share", "limit"), [(0.002, 1.045), (0.01, 1.035), (0.03, 1.035)])
def test_steps_come_close_to_their_entropy(share: float, limit: float) -> None:
    """Stored bits against geometric positions and the entropy of the steps' sizes and signs."""
    random = np.random.default_rng(0)
    volume = 4 << 20
    drawn = np.cumsum(random.geometric(share, int(volume * share * 1.2))) - 1
    positions = drawn[drawn < volume].astype(np.uint32)
    kind = random.random(len(positions))
    size = np.where(kind < 0.90, 1, np.where(kind < 0.98, 2, random.integers(3, 17, len(positions))))
    old = random.integers(0x3C00, 0x3D00, len(positions)).astype("<u2")
    new = np.where(random.random(len(positions)) < 0.5, old + size, old - size).astype("<u2")
    cut = cut_of("bfloat16", volume)
    detected = Detected(domain=0, positions=positions, old=old, new=new, result=zero(), base=None)
    rest = 1 - share
    index = -(share * np.log2(share) + rest * np.log2(rest)) / share
    step = 1 - (0.9 * np.log2(0.9) + 0.08 * np.log2(0.08) + 0.02 * np.log2(0.02 / 14))
    chunk = encode_step(cut, detected)
    assert 8 * chunk.nbytes / len(positions) <= limit * (index + step)


def test_shifts_stay_within_bounds() -> None:
    starts = np.array([0, 2**31 - 1], np.int64)
    assert choose_shift(np.array([2**31 - 2], np.uint32), starts) <= 16
    assert choose_shift(np.arange(1000, dtype=np.uint32), np.array([0, 1000], np.int64)) == 0
