"""A1: a NaN that is data, not a mark for "unchanged"."""

from __future__ import annotations

import numpy as np
import torch

import deltafmt
from deltafmt.tensors import numpy_bits
from tests.cases.common import assert_same, new_root, of_bits


def test_nan_comes_and_goes_like_any_other_value() -> None:
    root = new_root()
    versions = [
        {"w": of_bits("bfloat16", w), "i": torch.tensor(i, dtype=torch.int32)}
        for w, i in (
            ([0x3F80, 0x4000, 0x4040, 0x4080], [1, 2, 3]),
            ([0x3F80, 0x7FC0, 0x4040, 0x4080], [1, 9, 3]),
            ([0x3F80, 0x4000, 0x4040, 0x4080], [1, 9, 3]),
        )
    ]
    writer = deltafmt.Writer(root)
    writer.publish_anchor(versions[0])
    for tensors in versions[1:]:
        writer.publish(tensors)
    live = {"w": torch.zeros(4, dtype=torch.bfloat16), "i": torch.zeros(3, dtype=torch.int32)}
    receiver = deltafmt.Receiver(root, live)
    for version, tensors in enumerate(versions):
        receiver.advance(version)
        assert_same(live, tensors)
        receiver.verify()


def test_every_bit_pattern_of_two_bytes_travels() -> None:
    root = new_root()
    old = of_bits("bfloat16", np.arange(65536, dtype=np.uint16))
    new = of_bits("bfloat16", np.random.default_rng(0).permutation(65536).astype(np.uint16))
    writer = deltafmt.Writer(root)
    writer.publish_anchor({"w": old})
    live = {"w": torch.zeros(65536, dtype=torch.bfloat16)}
    receiver = deltafmt.Receiver(root, live)
    receiver.advance()
    writer.publish({"w": new})
    receiver.advance()
    assert (numpy_bits(live["w"]) == numpy_bits(new)).all()
