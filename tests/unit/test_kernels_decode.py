"""Decoders refuse each way in which columns can be false, by its reason, and touch no memory beyond them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from deltafmt.errors import FormatError
from deltafmt.kernels.positions import decode_positions, encode_positions
from deltafmt.kernels.steps import CodedSteps, decode_steps, encode_steps

Ints = Sequence[int]

# Two blocks of a box, and a shorter one of the next box.
STARTS = np.array([0, 1024, 2048, 2100], np.int64)


def positions(
    gap: Ints, entries: Ints, elements: Ints, *, low: Ints = (), shift: int = 0, listed: int | None = None
) -> Any:
    return decode_positions(
        np.array(gap, np.uint8),
        np.array(low, np.uint8),
        np.array(entries, np.uint32),
        np.array(elements, np.uint32),
        starts=STARTS,
        shift=shift,
        listed=sum(elements) if listed is None else listed,
        where="chunk 7",
    ).tolist()


def test_positions_begin_anew_in_every_block() -> None:
    assert positions([0, 2, 0, 255, 5, 51], [2, 3, 1], [2, 2, 1]) == [0, 3, 1024, 1285, 2099]
    assert positions([3], [0, 1, 0], [0, 1, 0]) == [1027]


def test_low_bits_stand_behind_one_another() -> None:
    # 3 bits each: 5 and 2, gaps of 1 and 0 times 8.
    assert positions([1, 0], [2, 0, 0], [2, 0, 0], low=[5 | 2 << 3], shift=3) == [13, 16]


@pytest.mark.parametrize(
    ("kind", "gap", "entries", "elements", "low", "shift", "listed"),
    [
        ("block-counts", [0, 0], [1, 0, 0], [1, 0, 0], [], 0, None),  # more gaps than entries
        ("block-counts", [0], [2, 0, 0], [1, 0, 0], [], 0, None),  # fewer
        ("block-counts", [0, 0], [2, 0, 0], [2, 0, 0], [], 0, 1),  # another number listed
        ("block-counts", [0, 0], [2, 0, 0], [1, 1, 0], [], 0, None),  # sums agree, blocks do not
        ("block-counts", [0, 255, 0], [3, 0, 0], [3, 0, 0], [], 0, None),  # 255 lists nothing
        ("block-counts", [0], [2**32 - 1, 2, 0], [1, 0, 0], [], 0, None),  # a sum that wraps in 32 bits
        ("gap-trailing", [0, 255], [2, 0, 0], [1, 0, 0], [], 0, None),
        ("gap-trailing", [255, 0], [1, 1, 0], [0, 1, 0], [], 0, None),
        ("position-outside", [255] * 4 + [4], [5, 0, 0], [1, 0, 0], [], 0, None),
        ("position-outside", [52], [0, 0, 1], [0, 0, 1], [], 0, None),
        ("position-outside", [6], [0, 0, 1], [0, 0, 1], [4], 3, None),
        ("padding-nonzero", [0], [1, 0, 0], [1, 0, 0], [0b1000], 3, None),
    ],
)
def test_false_positions(
    kind: str, gap: Ints, entries: Ints, elements: Ints, low: Ints, shift: int, listed: int | None
) -> None:
    with pytest.raises(FormatError) as caught:
        positions(gap, entries, elements, low=low, shift=shift, listed=listed)
    assert caught.value.kind == kind
    assert "chunk 7" in str(caught.value)


def test_the_last_position_of_a_block_is_inside() -> None:
    assert positions([255] * 4 + [3], [5, 0, 0], [1, 0, 0]) == [1023]
    coded = encode_positions(np.array([0, 1023, 1024, 2047, 2048, 2099], np.uint32), STARTS, 0)
    assert coded.elements.tolist() == [2, 2, 2]


def steps(
    code: Ints,
    magnitude: Ints,
    escape: Ints = (),
    *,
    elements: Ints,
    magnitudes: Ints,
    escapes: Ints | None = None,
    width: int = 2,
) -> Any:
    coded = CodedSteps(
        code=np.array(code, np.uint8),
        magnitude=np.array(magnitude, np.uint8),
        escape=np.array(escape, f"<i{width}").view(np.uint8),
        magnitudes=np.array(magnitudes, np.uint32),
        escapes=np.array(escapes or [0] * len(elements), np.uint32),
    )
    decoded = decode_steps(
        coded,
        np.array(elements, np.uint32),
        listed=sum(elements),
        dtype=np.dtype(f"<u{width}"),
        where="chunk 7",
    )
    return decoded.view(f"<i{width}").tolist()


def test_steps_of_every_size() -> None:
    # Codes from the lowest bits on: 1, -1, and a magnitude with either sign; one escape in the next block.
    code, magnitude = [0b11_10_01_00, 0b11], [0, 254, 255]
    found = steps(code, magnitude, [-257], elements=[4, 1], magnitudes=[2, 1], escapes=[0, 1])
    assert found == [1, -1, 2, -256, -257]


def test_the_largest_step_down_of_a_byte() -> None:
    assert steps([0b11], [126], elements=[1], magnitudes=[1], width=1) == [-128]
    coded = encode_steps(np.array([128], np.uint8), np.array([1], np.uint32))
    assert (coded.code.tolist(), coded.magnitude.tolist()) == ([0b11], [126])


_ONE_ESCAPE: dict[str, Any] = {"elements": [1], "magnitudes": [1], "escapes": [1]}


@pytest.mark.parametrize(
    ("kind", "code", "magnitude", "escape", "counts"),
    [
        ("block-counts", [0b10], [], [], {"elements": [1], "magnitudes": [0]}),
        ("block-counts", [0b10], [0], [], {"elements": [1], "magnitudes": [0]}),
        ("block-counts", [0b00], [0], [], {"elements": [1], "magnitudes": [1]}),
        ("block-counts", [0b0010], [0], [], {"elements": [1, 1], "magnitudes": [0, 1]}),
        ("block-counts", [0b10], [255], [], {"elements": [1], "magnitudes": [1]}),
        ("block-counts", [0b10], [0], [300], _ONE_ESCAPE),
        (
            "block-counts",
            [0b1010],
            [255, 255],
            [300],
            {"elements": [1, 1], "magnitudes": [1, 1], "escapes": [1, 0]},
        ),
        ("escape-short", [0b10], [255], [256], _ONE_ESCAPE),
        ("escape-short", [0b11], [255], [-1], _ONE_ESCAPE),
        ("escape-short", [0b10], [255], [0], _ONE_ESCAPE),
        ("escape-sign", [0b11], [255], [257], _ONE_ESCAPE),
        ("escape-sign", [0b10], [255], [-32768], _ONE_ESCAPE),
        ("escape-short", [0b10], [126], [], {"elements": [1], "magnitudes": [1], "width": 1}),
        ("escape-short", [0b11], [127], [], {"elements": [1], "magnitudes": [1], "width": 1}),
        ("escape-short", [0b10], [255], [-128], {**_ONE_ESCAPE, "width": 1}),
        ("padding-nonzero", [0b0100], [], [], {"elements": [1], "magnitudes": [0]}),
        ("padding-nonzero", [0, 0b1000_0000], [], [], {"elements": [4, 3], "magnitudes": [0, 0]}),
    ],
)
def test_false_steps(kind: str, code: Ints, magnitude: Ints, escape: Ints, counts: dict[str, Any]) -> None:
    with pytest.raises(FormatError) as caught:
        steps(code, magnitude, escape, **counts)
    assert caught.value.kind == kind
    assert "chunk 7" in str(caught.value)


def test_escapes_of_half_an_element() -> None:
    coded = CodedSteps(
        code=np.array([0b10], np.uint8),
        magnitude=np.array([255], np.uint8),
        escape=np.zeros(3, np.uint8),
        magnitudes=np.array([1], np.uint32),
        escapes=np.array([1], np.uint32),
    )
    with pytest.raises(FormatError) as caught:
        decode_steps(coded, np.array([1], np.uint32), listed=1, dtype=np.dtype("<u2"), where="x")
    assert caught.value.kind == "block-counts"
