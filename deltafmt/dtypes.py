"""The one table of element types: names, widths, and the order in which their bit patterns count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from deltafmt.errors import SchemaError

Order = Literal["plain", "sign-magnitude"]

PLAIN = 0
"""Order id: bit patterns count as unsigned integers."""
SIGN_MAGNITUDE = 1
"""Order id: bit patterns count as sign and magnitude, so that neighbouring values are one step apart."""


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    `name` is torch's name, `safetensors` the code in that format's header, `width` the bytes of one
    element, `order` the order of its bit patterns in which a step of one is the smallest change.
    """

    name: str
    safetensors: str
    width: int
    order: Order

    @property
    def bits(self) -> np.dtype[np.unsignedinteger]:
        """Unsigned little-endian integer type of the same width."""
        return np.dtype(f"<u{self.width}")

    @property
    def order_id(self) -> int:
        return SIGN_MAGNITUDE if self.order == "sign-magnitude" else PLAIN


DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("bool", "BOOL", 1, "plain"),
        DType("uint8", "U8", 1, "plain"),
        DType("int8", "I8", 1, "plain"),
        DType("uint16", "U16", 2, "plain"),
        DType("int16", "I16", 2, "plain"),
        DType("uint32", "U32", 4, "plain"),
        DType("int32", "I32", 4, "plain"),
        DType("uint64", "U64", 8, "plain"),
        DType("int64", "I64", 8, "plain"),
        DType("float8_e4m3fn", "F8_E4M3", 1, "sign-magnitude"),
        DType("float8_e5m2", "F8_E5M2", 1, "sign-magnitude"),
        DType("float8_e4m3fnuz", "F8_E4M3FNUZ", 1, "sign-magnitude"),
        DType("float8_e5m2fnuz", "F8_E5M2FNUZ", 1, "sign-magnitude"),
        DType("float8_e8m0fnu", "F8_E8M0", 1, "plain"),
        DType("bfloat16", "BF16", 2, "sign-magnitude"),
        DType("float16", "F16", 2, "sign-magnitude"),
        DType("float32", "F32", 4, "sign-magnitude"),
        DType("float64", "F64", 8, "sign-magnitude"),
        # Two FP32 parts in one element: a step is an exact difference here too, only not a small one.
        DType("complex64", "C64", 8, "plain"),
    )
}
"""Every element type of format v1, by torch's name."""


def dtype_of(name: str) -> DType:
    """Look an element type up by torch's name; `SchemaError` (`dtype-unknown`) if v1 lacks it."""
    try:
        return DTYPES[name]
    except KeyError:
        raise SchemaError(
            "unknown dtype", kind="dtype-unknown", found=repr(name), expected=", ".join(DTYPES)
        ) from None
