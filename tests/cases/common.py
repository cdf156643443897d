"""What the cases share: exact comparison and roots of their own."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import torch

from deltafmt.store import open_store, register_protocol
from deltafmt.tensors import bits, empty, numpy_bits
from deltafmt.testing.faulty import FaultyStore

Tensors = dict[str, torch.Tensor]

_roots = itertools.count()


def new_root() -> str:
    """A root in this process's memory that nobody else uses."""
    return f"memory://case-{next(_roots)}"


def faulty(root: str) -> tuple[str, FaultyStore]:
    """The same root behind a store that misbehaves when told to, and its URL."""
    store = FaultyStore(open_store(root))
    protocol = f"faulty-{next(_roots)}"
    register_protocol(protocol, lambda rest, options: store)
    return f"{protocol}://", store


def of_bits(dtype: str, values: object, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """A tensor with these bit patterns."""
    array = np.array(values)
    tensor = empty(dtype, array.shape if shape is None else shape)
    numpy_bits(tensor)[...] = array.reshape(tensor.shape)
    return tensor


def copied(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def blank(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Contiguous tensors like these, full of bits that nobody published."""
    result = {}
    for name, tensor in tensors.items():
        result[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        bits(result[name]).fill_(0x55)
    return result


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Same names, dtypes, shapes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(bits(found[name]), bits(tensor)), name
