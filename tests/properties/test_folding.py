"""Folding several ways into one pass gives what applying them one by one gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from deltafmt.format.constants import DENSE, SET, STEP
from deltafmt.kernels.steps import add_step
from deltafmt.read.decode import Decoded
from deltafmt.read.fold import Folded, fold

VOLUME = 12
Bits = npt.NDArray[Any]


@st.composite
def link(draw: st.DrawFn, width: int, order: int) -> list[Decoded]:
    """The chunks of one way for one domain."""
    dtype = np.dtype(f"<u{width}")
    value = st.integers(0, 256**width - 1)

    def chunk(operation: int, positions: list[int] | None, values: list[int]) -> Decoded:
        at = None if positions is None else np.array(positions, np.uint32)
        return Decoded(operation=operation, order=order, positions=at, values=np.array(values, dtype))

    if draw(st.integers(0, 5)) == 0:
        return [chunk(DENSE, None, draw(st.lists(value, min_size=VOLUME, max_size=VOLUME)))]
    kinds = draw(st.lists(st.sampled_from([None, SET, STEP]), min_size=VOLUME, max_size=VOLUME))
    chunks = []
    for operation in (SET, STEP):
        positions = [p for p, kind in enumerate(kinds) if kind == operation]
        least = 0 if operation == SET else 1
        values = [
            draw(st.one_of(st.integers(least, 3), st.integers(least, 256**width - 1))) for _ in positions
        ]
        if positions:
            chunks.append(chunk(operation, positions, values))
    return chunks


def applied(bits: Bits, chunks: list[Decoded]) -> Bits:
    result = bits.copy()
    for chunk in chunks:
        at = slice(None) if chunk.positions is None else chunk.positions
        result[at] = (
            add_step(bits[at], chunk.values, chunk.order) if chunk.operation == STEP else chunk.values
        )
    return result


def written(bits: Bits, folded: Folded) -> Bits:
    if folded.dense is not None:
        assert folded.set is None
        assert folded.step is None
        return folded.dense
    result = bits.copy()
    if folded.set is not None:
        result[folded.set[0]] = folded.set[1]
    if folded.step is not None:
        assert (folded.step[1] != 0).all()
        result[folded.step[0]] = add_step(bits[folded.step[0]], folded.step[1], folded.order)
        if folded.set is not None:
            assert not np.isin(folded.step[0], folded.set[0]).any()
    return result


@given(st.data(), st.sampled_from([1, 2, 4, 8]), st.sampled_from([0, 1]))
def test_folding_is_sequential_application(data: st.DataObject, width: int, order: int) -> None:
    links = data.draw(st.lists(link(width, order), min_size=1, max_size=5))
    seed = data.draw(st.integers(0, 2**32 - 1))
    bits = np.random.default_rng(seed).integers(
        0, 256**width - 1, VOLUME, np.dtype(f"<u{width}"), endpoint=True
    )
    expected = bits
    for chunks in links:
        expected = applied(expected, chunks)
    found = written(bits, fold((chunks for chunks in links if chunks), where="domain"))
    assert (found == expected).all()
