from __future__ import annotations

import numpy as np
import pytest
import torch

from deltafmt import LayoutError, Schema, UnsupportedError
from deltafmt.read.targets import Targets


def test_each_tensor_is_a_memory_of_its_own_unless_addresses_meet() -> None:
    flat = torch.zeros(24)
    given = {"x": flat[:8], "y": flat[8:16], "z": flat[12:], "e": flat[:0], "n": np.zeros((2, 2), np.float32)}
    targets = Targets(given)
    members = {name: memory.members for name, memory in zip(targets.names, targets.memories, strict=True)}
    assert members == {"x": {"x": 0}, "y": {"y": 0, "z": 4}, "e": {"e": 0}, "n": {"n": 0}}
    info = targets.memory_infos["y"]
    assert (info.shape, info.strides) == ((16,), (1,))
    row = targets.names.index("y")
    assert targets.addresses[row] == flat.data_ptr() + 8 * 4


def test_the_fast_path_is_taken_only_where_nothing_is_left_to_check() -> None:
    schema = Schema.of({"a": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16)})
    assert Targets({"b": torch.zeros(5, dtype=torch.bfloat16)}).fit(schema)
    assert Targets({}).fit(schema)
    assert not Targets({"a": torch.zeros(4, 3).T}).fit(schema), "strides"
    assert not Targets({"a": torch.zeros(4, 3)}).fit(schema), "shape"
    assert not Targets({"a": torch.zeros(3, 4, dtype=torch.float16)}).fit(schema), "dtype"
    assert not Targets({"c": torch.zeros(3, 4)}).fit(schema), "name"
    one = torch.zeros(3, 4)
    assert not Targets({"a": one, "b": one}).fit(schema), "shared memory"


def test_what_cannot_be_written_is_refused() -> None:
    frozen = np.zeros(3, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(LayoutError):
        Targets({"a": frozen})
    with pytest.raises(UnsupportedError) as caught:
        Targets({"a": torch.zeros(3, device="meta")})
    assert caught.value.kind == "device-unsupported"
    with pytest.raises(LayoutError):
        Targets({"a": torch.zeros(3, dtype=torch.complex64).conj()})
    with pytest.raises(LayoutError):
        Targets({"a": torch.zeros(3, dtype=torch.complex64).conj().imag})
