from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from deltafmt import FormatError
from deltafmt.dtypes import SIGN_MAGNITUDE
from deltafmt.format.constants import DENSE, SET, STEP
from deltafmt.kernels.steps import add_step
from deltafmt.read.decode import Decoded
from deltafmt.read.fold import Folded, fold


def chunk(operation: int, positions: list[int] | None, values: list[int]) -> Decoded:
    return Decoded(
        operation=operation,
        order=SIGN_MAGNITUDE,
        positions=None if positions is None else np.array(positions, np.uint32),
        values=np.array(values, np.int64).astype(np.uint16),
    )


def listed(changes: tuple[Any, Any] | None) -> dict[int, int]:
    return {} if changes is None else dict(zip(changes[0].tolist(), changes[1].tolist(), strict=True))


def folded(*links: list[Decoded]) -> Folded:
    return fold(iter(links), where="domain 0")


def test_steps_add_up_and_what_cancels_drops_out() -> None:
    result = folded([chunk(STEP, [1, 4, 7], [1, 2, -1])], [chunk(STEP, [4, 5, 7], [-2, 3, -1])])
    assert listed(result.step) == {1: 1, 5: 3, 7: 2**16 - 2}
    assert (result.set, result.dense) == (None, None)


def test_a_step_on_a_set_value_gives_the_computed_value() -> None:
    result = folded([chunk(SET, [2, 3], [0x3F80, 0x8000])], [chunk(STEP, [3, 4], [1, 5])])
    moved = int(add_step(np.array([0x8000], np.uint16), np.array([1], np.uint16), SIGN_MAGNITUDE)[0])
    assert listed(result.set) == {2: 0x3F80, 3: moved}
    assert listed(result.step) == {4: 5}


def test_a_later_value_replaces() -> None:
    result = folded([chunk(SET, [1], [7]), chunk(STEP, [2, 3], [1, 1])], [chunk(SET, [1, 2], [8, 9])])
    assert listed(result.set) == {1: 8, 2: 9}
    assert listed(result.step) == {3: 1}


def test_all_elements_replace_whatever_came_before_and_take_what_follows() -> None:
    result = folded(
        [chunk(STEP, [0], [1])],
        [chunk(DENSE, None, [10, 20, 30])],
        [chunk(SET, [1], [99]), chunk(STEP, [2], [1])],
    )
    assert result.dense is not None
    assert result.dense.tolist() == [10, 99, _after(30, 1)]
    assert (result.set, result.step) == (None, None)


@pytest.mark.parametrize(
    "chunks",
    [
        [chunk(SET, [1, 2], [5, 5]), chunk(STEP, [2, 3], [1, 1])],
        [chunk(DENSE, None, [1, 2]), chunk(STEP, [1], [1])],
    ],
)
def test_one_way_lists_a_position_once(chunks: list[Decoded]) -> None:
    with pytest.raises(FormatError) as caught:
        folded(chunks)
    assert caught.value.kind == "position-twice"


def _after(bits: int, step: int) -> int:
    result: npt.NDArray[Any] = add_step(
        np.array([bits], np.uint16), np.array([step], np.uint16), SIGN_MAGNITUDE
    )
    return int(result[0])
