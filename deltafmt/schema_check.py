"""Whether columns make a schema: the strict checks behind `Schema`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from deltafmt.dtypes import dtype_of
from deltafmt.errors import SchemaError

Shape = tuple[int, ...]

MAX_NAME_BYTES = 4096
MAX_RANK = 16
RESERVED_NAME = "__metadata__"


def check_columns(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Shape], rows: Mapping[str, int]
) -> None:
    """Raise `SchemaError` for names, dtypes and shapes that are bad in themselves; `rows` numbers the names."""
    # One pass each at the speed of the interpreter's own loops; what is wrong is looked for only when something
    # is. This runs over maybe 100,000 tensors whenever a lineage is opened.
    plain = set(map(type, names)) <= {str} and all(map(str.isascii, names))
    if not plain or max(map(len, names), default=0) > MAX_NAME_BYTES:
        for name in names:
            _check_encoded(name)
    for dtype, shape in dict.fromkeys(zip(dtypes, shapes, strict=True)):
        if not _fits(dtype, shape):
            raise SchemaError(
                "shape is out of bounds",
                kind="shape-overflow",
                where=repr(names[shapes.index(shape)]),
                found=shape,
                expected=f"at most {MAX_RANK} dimensions and fewer than 2^63 bytes",
            )
    if RESERVED_NAME in rows:
        raise SchemaError(
            "the safetensors view reserves this name; rename the tensor",
            kind="name-reserved",
            where=repr(RESERVED_NAME),
        )
    if len(rows) != len(names):
        # The last of equal names has the row.
        twice = next(name for row, name in enumerate(names) if rows[name] != row)
        raise SchemaError("tensor name stands twice", kind="name-twice", where=repr(twice))


def check_aliases(
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Shape],
    aliases: Sequence[str | None],
    rows: Mapping[str, int],
) -> None:
    """Raise `SchemaError` unless each alias has an owner of its dtype and shape that is no alias itself."""
    if not any(alias is not None for alias in dict.fromkeys(aliases)):
        return
    for row, alias in enumerate(aliases):
        if alias is None:
            continue
        owner = rows.get(alias)
        like = None if owner is None else (aliases[owner], dtypes[owner], shapes[owner])
        if like != (None, dtypes[row], shapes[row]):
            raise SchemaError(
                "alias does not fit its owner",
                kind="alias-invalid",
                where=repr(names[row]),
                expected=f"{alias!r} to own {dtypes[row]} {shapes[row]}",
                found=None if like is None else f"alias of {like[0]!r}, {like[1]} {like[2]}",
            )


def _fits(dtype: str, shape: Shape) -> bool:
    # Zero extents count as one: strides over the other dimensions must stay in 63 bits as well.
    stretch = dtype_of(dtype).width * math.prod(extent or 1 for extent in shape)
    return len(shape) <= MAX_RANK and min(shape, default=0) >= 0 and stretch < 2**63


def _check_encoded(name: Any) -> None:
    try:
        encoded = name.encode()
    except (UnicodeEncodeError, AttributeError):
        encoded = None
    if encoded is None or len(encoded) > MAX_NAME_BYTES:
        raise SchemaError("invalid tensor name", kind="name-invalid", where=repr(name)[:200])
