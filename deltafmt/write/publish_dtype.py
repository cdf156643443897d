"""The schema under which tensors are published: their own, or with FP32 masters as their cast."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch

from deltafmt.dtypes import dtype_of
from deltafmt.errors import SchemaError
from deltafmt.schema import Schema, TensorSpec

PublishDtype = str | torch.dtype | Mapping[str, str | torch.dtype] | None

CASTS = {("float32", "bfloat16"), ("float32", "float16")}


def published_schema(tensors: Mapping[str, torch.Tensor], publish_dtype: PublishDtype) -> Schema:
    """The schema of whole tensors, with dtypes as they are published."""
    return as_published(Schema.of(tensors), publish_dtype)


def as_published(schema: Schema, publish_dtype: PublishDtype) -> Schema:
    """A schema with dtypes as they are published.

    One dtype counts for every FP32 tensor, a mapping for the names that its patterns match (the first that
    does). Raises `SchemaError` for a cast of anything but FP32 to BF16 or FP16.
    """
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


def _dtype_of(spec: TensorSpec, publish_dtype: str | torch.dtype | Mapping[str, str | torch.dtype]) -> str:
    if not isinstance(publish_dtype, Mapping):
        wanted = _name(publish_dtype)
        if wanted not in {target for _, target in CASTS}:
            raise SchemaError(
                "FP32 tensors are published as BF16 or FP16, or as they are",
                kind="dtype-mismatch",
                where="publish_dtype",
                found=wanted,
            )
        return wanted if (spec.dtype, wanted) in CASTS else spec.dtype
    pattern = next((pattern for pattern in publish_dtype if fnmatchcase(spec.name, pattern)), None)
    wanted = spec.dtype if pattern is None else _name(publish_dtype[pattern])
    if wanted != spec.dtype and (spec.dtype, wanted) not in CASTS:
        raise SchemaError(
            "only FP32 tensors are published as another dtype, and only as BF16 or FP16",
            kind="dtype-mismatch",
            where=repr(spec.name),
            found=f"{spec.dtype}, to be published as {wanted}",
        )
    return wanted


def _name(dtype: str | torch.dtype) -> str:
    return dtype_of(str(dtype).removeprefix("torch.")).name
