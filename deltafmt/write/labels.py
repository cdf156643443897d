"""Labels of a version: the trainer's step and whatever else it wants to remember, as msgpack can hold it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from deltafmt.errors import FormatError, SchemaError
from deltafmt.format.envelope import stored_bytes

LABEL_BYTES = 1 << 20
"""What the labels of one version may take."""


def labels_of(step: int | None, meta: Mapping[str, Any] | None) -> dict[str, Any]:
    """The free map of a manifest.

    Numpy scalars and tensors of one element, such as a loss, become plain numbers. Raises `SchemaError`
    (`meta-invalid`) for what msgpack cannot hold, more than 1 MiB, or a step that is no whole number.
    """
    if not isinstance(meta, Mapping | None):
        raise SchemaError(
            "meta is a mapping of names to values", kind="meta-invalid", found=type(meta).__name__
        )
    labels: dict[str, Any] = _plain(dict(meta or {}))
    if step is not None:
        labels["step"] = step
    if labels.get("step") is not None:
        labels["step"] = _whole(labels["step"])
    try:
        size = stored_bytes(labels)
    except FormatError as error:
        raise SchemaError("meta cannot be stored", kind="meta-invalid", found=error.found) from error
    if size > LABEL_BYTES:
        raise SchemaError("meta takes at most 1 MiB", kind="meta-invalid", found=f"{size} bytes")
    return labels


def _whole(step: Any) -> int:
    try:
        return operator.index(step)
    except (TypeError, RuntimeError):
        raise SchemaError("a step is a whole number", kind="meta-invalid", found=repr(step)[:64]) from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.dim() == 0):
        return value.item()
    return value
