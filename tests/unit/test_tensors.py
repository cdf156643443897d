from __future__ import annotations

import numpy as np
import pytest
import torch

from deltafmt.dtypes import DTYPES
from deltafmt.errors import SchemaError
from deltafmt.tensors import bits, dtype_name, empty, named, numpy_bits, torch_dtype


@pytest.mark.parametrize("name", DTYPES)
def test_bits_share_memory_and_keep_shape_and_strides(name: str) -> None:
    tensor = empty(name, (3, 2)).t()
    view = numpy_bits(tensor)
    assert dtype_name(tensor) == name
    assert view.dtype == DTYPES[name].bits
    assert view.shape == (2, 3)
    view[1, 2] = 1
    assert bits(tensor)[1, 2] == 1
    assert numpy_bits(empty(name, ())).shape == ()
    assert numpy_bits(empty(name, (0, 3))).shape == (0, 3)


def test_numpy_arrays_are_shared_in_logical_order() -> None:
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    shared = named({"f": array})["f"]
    array[1, 2] = 50
    assert shared.tolist() == array.tolist()


def test_read_only_arrays_are_fine_sources() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    assert named([("a", array)])["a"].tolist() == [0, 1, 2]


def test_what_has_no_bits_of_its_own_is_refused() -> None:
    with pytest.raises(SchemaError):
        bits(torch.zeros(2, dtype=torch.complex64).conj())
    with pytest.raises(SchemaError):
        named({"a": np.zeros(3, ">f4")})
    with pytest.raises(SchemaError):
        named([("a", torch.zeros(1)), ("a", torch.zeros(1))])


def test_torch_knows_every_dtype_of_the_table() -> None:
    assert {str(torch_dtype(name)) for name in DTYPES} == {f"torch.{name}" for name in DTYPES}
