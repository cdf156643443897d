from __future__ import annotations

import numpy as np
import pytest
import torch

from deltafmt.dtypes import DTYPES
from deltafmt.errors import LayoutError, NotFoundError, SchemaError
from deltafmt.geometry import Box
from deltafmt.schema import Schema, TensorSpec


def test_same_storage_becomes_an_alias_and_empties_never_do() -> None:
    weight = torch.zeros(4, 2)
    schema = Schema.of(
        {"embed": weight, "head": weight, "view": weight.T, "e1": torch.zeros(0), "e2": torch.zeros(0)}
    )
    assert [spec.alias_of for spec in schema] == [None, "embed", None, None, None]
    assert schema.resolve("head") is schema["embed"]
    assert schema.owners == (0, 2, 3, 4)


def test_numpy_and_torch_give_the_same_schema() -> None:
    arrays = {"a": np.zeros((2, 3), np.float32), "b": np.zeros((), np.int64), "c": np.zeros(3, np.bool_)}
    assert Schema.of(arrays) == Schema.of({k: torch.from_numpy(v) for k, v in arrays.items()})


@pytest.mark.parametrize(
    ("specs", "kind"),
    [
        ([TensorSpec("a", "float32", ()), TensorSpec("a", "int8", ())], "name-twice"),
        ([TensorSpec("__metadata__", "float32", ())], "name-reserved"),
        ([TensorSpec("x" * 4097, "float32", ())], "name-invalid"),
        ([TensorSpec("\ud800", "float32", ())], "name-invalid"),
        ([TensorSpec("a", "float128", ())], "dtype-unknown"),
        ([TensorSpec("a", "float32", (2**31, 2**31))], "shape-overflow"),
        ([TensorSpec("a", "float32", (0, 2**40, 2**40))], "shape-overflow"),
        ([TensorSpec("a", "float32", (-1,))], "shape-overflow"),
        ([TensorSpec("a", "float32", (1,) * 17)], "shape-overflow"),
        ([TensorSpec("a", "float32", (2,), "b")], "alias-invalid"),
        ([TensorSpec("a", "float32", (2,), "a")], "alias-invalid"),
        ([TensorSpec("a", "float32", (2,)), TensorSpec("b", "float32", (3,), "a")], "alias-invalid"),
        ([TensorSpec("a", "float32", (2,)), TensorSpec("b", "int32", (2,), "a")], "alias-invalid"),
    ],
)
def test_what_cannot_be_a_schema_is_refused_by_reason(specs: list[TensorSpec], kind: str) -> None:
    with pytest.raises((SchemaError, NotFoundError)) as caught:
        Schema(tuple(specs))
    assert caught.value.kind == kind


def test_an_alias_may_stand_before_its_owner() -> None:
    schema = Schema((TensorSpec("b", "float32", (2,), "a"), TensorSpec("a", "float32", (2,))))
    assert schema.owners == (1,)


def test_unknown_name() -> None:
    with pytest.raises(NotFoundError, match="'x'"):
        Schema(())["x"]


def test_every_dtype_has_an_unsigned_twin_of_its_width() -> None:
    assert all(dtype.bits.itemsize == dtype.width for dtype in DTYPES.values())
    assert len({dtype.safetensors for dtype in DTYPES.values()}) == len(DTYPES)


def test_boxes_intersect_and_contain() -> None:
    box = Box((0, 2), (4, 6))
    assert box.intersect(Box((3, 0), (9, 3))) == Box((3, 2), (4, 3))
    assert box.intersect(Box((4, 0), (9, 9))) is None
    assert box.contains(Box((1, 2), (2, 6)))
    assert not box.contains(Box((1, 2), (2, 7)))
    assert Box((), ()).volume == 1


@pytest.mark.parametrize(("start", "stop"), [((0,), (1, 2)), ((-1,), (2,)), ((3,), (2,))])
def test_invalid_boxes(start: tuple[int, ...], stop: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="invalid box"):
        Box(start, stop)


def test_columns_say_what_the_specs_say() -> None:
    specs = (
        TensorSpec("tied", "bfloat16", (6, 5), "embed"),
        TensorSpec("embed", "bfloat16", (6, 5)),
        TensorSpec("scalar", "float64", ()),
        TensorSpec("none", "float32", (3, 0, 2)),
        TensorSpec("größe", "uint8", (7,)),
    )
    columns = ([s.name for s in specs], [s.dtype for s in specs], [s.shape for s in specs])
    schema = Schema.of_columns(*columns, [s.alias_of for s in specs])
    assert schema == Schema(specs)
    assert hash(schema) == hash(Schema(specs))
    assert schema.tensors == specs
    assert [schema[name] for name in schema.names] == list(specs)
    assert schema.ranks.tolist() == [2, 2, 0, 3, 1]
    assert schema.padded_shapes.tolist() == [[1, 6, 5], [1, 6, 5], [1, 1, 1], [3, 0, 2], [1, 1, 7]]
    assert schema.volumes.tolist() == [spec.volume for spec in specs]
    assert schema.widths.tolist() == [spec.width for spec in specs]
    assert schema.owner_rows.tolist() == [1, 1, 2, 3, 4]
    assert (schema.elements, schema.nbytes) == (30 + 1 + 7, 60 + 8 + 7)
    assert schema != Schema(specs[1:])
    with pytest.raises(ValueError, match="read-only"):
        schema.volumes[0] = 1
