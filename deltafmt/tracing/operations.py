"""The operations of torch that every carrier follows, by the names that torch gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Operation = Callable[..., Any]

_NEW = (
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
)


def operations(
    *,
    copy: Operation,
    equal: Operation,
    fill: Operation,
    clone: Operation,
    to_copy: Operation,
    new: Operation,
) -> Mapping[str, Operation]:
    """A carrier's own ways to do them; `new` makes tensors that hold nothing known, whatever fills them."""
    return {
        "aten.copy_.default": copy,
        "aten.equal.default": equal,
        "aten.fill_.Scalar": fill,
        "aten.fill_.Tensor": fill,
        "aten.zero_.default": fill,
        "aten.clone.default": clone,
        "aten._to_copy.default": to_copy,
        **{f"aten.{name}.default": new for name in _NEW},
    }
