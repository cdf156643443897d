"""Whatever a chunk's columns hold, decoding gives positions inside the domain or a `FormatError`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from deltafmt.errors import FormatError
from deltafmt.format.chunk import ChunkHead, ColumnHead, pack_chunk
from deltafmt.format.constants import BLOCK, CODE, COLUMNS, ESCAPE, GAP, LOW, MAGNITUDE, PLANE, SET, STEP
from deltafmt.kernels.positions import block_starts, encode_positions, pack_counts
from deltafmt.kernels.steps import encode_steps, to_planes
from deltafmt.read.decode import DomainShape, decode_chunk

Bytes = npt.NDArray[np.uint8]


def good_columns(shape: DomainShape, head: ChunkHead, seed: int) -> dict[int, Bytes]:
    """Columns of a chunk that lists `head.listed` elements chosen by `seed`."""
    rng = np.random.default_rng(seed)
    positions = np.sort(rng.choice(shape.volume, head.listed, replace=False)).astype(np.uint32)
    starts = block_starts(shape.box_position, shape.box_volume, head.block)
    coded = encode_positions(positions, starts, head.shift)
    columns: dict[int, Bytes] = {GAP: coded.gap, LOW: coded.low}
    values = rng.integers(1, 300, head.listed).astype(np.int64)
    values = np.where(rng.random(head.listed) < 0.3, -values, values)
    bits = values.astype(f"<i{shape.width}").view(shape.dtype)
    if head.operation == SET:
        nothing = np.zeros_like(coded.entries)
        columns[BLOCK] = pack_counts(coded.entries, coded.elements, nothing, nothing)
        return columns | {PLANE + j: plane for j, plane in enumerate(to_planes(bits))}
    steps = encode_steps(np.where(bits == 0, 1, bits).astype(shape.dtype), coded.elements)
    columns[BLOCK] = pack_counts(coded.entries, coded.elements, steps.magnitudes, steps.escapes)
    return columns | {CODE: steps.code, MAGNITUDE: steps.magnitude, ESCAPE: steps.escape}


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([SET, STEP]),
    st.sampled_from([0, 1, 3, 8, 16]),
    st.sampled_from([6, 7, 16]),
    st.data(),
)
def test_spoiled_columns(
    volumes: list[int], width: int, operation: int, shift: int, block: int, draw: st.DataObject
) -> None:
    box_volume = np.array(volumes, np.int64)
    shape = DomainShape(width=width, box_position=np.cumsum(box_volume) - box_volume, box_volume=box_volume)
    listed = draw.draw(st.integers(1, shape.volume))
    head = ChunkHead(
        domain=0, operation=operation, order=1, width=width, shift=shift, block=block, listed=listed
    )
    columns = good_columns(shape, head, draw.draw(st.integers(0, 9)))
    for _ in range(draw.draw(st.integers(0, 4))):
        column = draw.draw(st.sampled_from(sorted(columns)))
        raw = bytearray(columns[column].tobytes())
        at = draw.draw(st.integers(0, len(raw)))
        cut = draw.draw(st.integers(0, 2))
        raw[at : at + cut] = draw.draw(st.binary(min_size=cut, max_size=cut if column != GAP else cut + 3))
        columns[column] = np.frombuffer(bytes(raw), np.uint8)
    packed = pack_chunk(head, columns)
    heads = tuple(ColumnHead(*row) for row in packed.columns)
    try:
        decoded = decode_chunk(head, heads, memoryview(b"".join(packed.buffers)), shape, where="chunk")
    except FormatError:
        return
    assert decoded.positions is not None
    positions = decoded.positions.astype(np.int64)
    assert len(positions) == len(decoded.values) == listed
    assert (np.diff(positions) > 0).all()
    assert positions[0] >= 0
    assert positions[-1] < shape.volume
    assert operation == SET or (decoded.values != 0).all()


def test_the_columns_unspoiled() -> None:
    shape = DomainShape(width=2, box_position=np.array([0, 300]), box_volume=np.array([300, 77]))
    head = ChunkHead(domain=0, operation=STEP, order=1, width=2, shift=3, block=6, listed=50)
    packed = pack_chunk(head, good_columns(shape, head, 1))
    assert {COLUMNS[row[0]] for row in packed.columns} == {
        "gap",
        "low",
        "block",
        "code",
        "magnitude",
        "escape",
    }
    heads = tuple(ColumnHead(*row) for row in packed.columns)
    decoded = decode_chunk(head, heads, memoryview(b"".join(packed.buffers)), shape, where="chunk")
    assert len(decoded.values) == 50
