"""A5: FP8 weights and their scales."""

from __future__ import annotations

import torch

import deltafmt
from tests.cases.common import assert_same, blank, new_root, of_bits


def tensors(w: int, scale: int, sc: int) -> dict[str, torch.Tensor]:
    return {
        "w": of_bits("float8_e4m3fn", [*range(15), w], (4, 4)),
        "w.scale_inv": of_bits("float32", [scale], (1, 1)),
        "x": of_bits("float8_e5m2", [1, 2, 0x7F]),
        "sc": of_bits("float8_e8m0fnu", [127, sc]),
    }


def test_each_change_lands_alone() -> None:
    root = new_root()
    states = [tensors(15, 1, 1), tensors(0xFF, 1, 1), tensors(0xFF, 2, 1), tensors(0xFF, 2, 0)]
    writer = deltafmt.Writer(root)
    writer.publish_anchor(states[0])
    for state in states[1:]:
        writer.publish(state)
    live = blank(states[0])
    receiver = deltafmt.Receiver(root, live)
    for version, state in enumerate(states):
        receiver.advance(version)
        assert_same(live, state)
    names = [
        {row["tensor"] for row in deltafmt.open(root).changes(v).read_all().to_pylist()} for v in (1, 2, 3)
    ]
    assert names == [{"w"}, {"w.scale_inv"}, {"sc"}]
