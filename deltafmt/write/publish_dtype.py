"""The schema under which tensors are published: their own, or with FP32 masters as their cast."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch

from deltafmt.dtypes import dtype_of
from deltafmt.errors import SchemaError
from deltafmt.schema import Schema, TensorSpec

PublishDtype = str | Mapping[str, str] | None

_CASTS = {("float32", "bfloat16"), ("float32", "float16")}


def published_schema(tensors: Mapping[str, torch.Tensor], publish_dtype: PublishDtype) -> Schema:
    """The schema of the tensors, with dtypes as they are published.

    One dtype counts for every FP32 tensor, a mapping for the names that its patterns match (the first that
    does). Raises `SchemaError` for a cast of anything but FP32 to BF16 or FP16.
    """
    schema = Schema.of(tensors)
    if publish_dtype is None:
        return schema
    return Schema(
        tuple(
            TensorSpec(
                spec.name, _dtype_of(schema.resolve(spec.name), publish_dtype), spec.shape, spec.alias_of
            )
            for spec in schema
        )
    )


def _dtype_of(spec: TensorSpec, publish_dtype: str | Mapping[str, str]) -> str:
    if isinstance(publish_dtype, str):
        wanted = dtype_of(publish_dtype).name
        return wanted if (spec.dtype, wanted) in _CASTS else spec.dtype
    pattern = next((pattern for pattern in publish_dtype if fnmatchcase(spec.name, pattern)), None)
    wanted = spec.dtype if pattern is None else dtype_of(publish_dtype[pattern]).name
    if wanted != spec.dtype and (spec.dtype, wanted) not in _CASTS:
        raise SchemaError(
            "only FP32 tensors are published as another dtype",
            kind="dtype-mismatch",
            where=repr(spec.name),
            expected="float32",
            found=spec.dtype,
        )
    return wanted
