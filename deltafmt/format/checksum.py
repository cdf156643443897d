"""CRC32C for bytes in transit, BLAKE2b for names by content."""

from __future__ import annotations

import hashlib
from typing import Any, cast

import crc32c as _crc32c
import numpy.typing as npt

Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]


def crc32c(data: Buffer, value: int = 0) -> int:
    """CRC-32C (Castagnoli) of `data`, going on from `value`."""
    # Arrays are buffers too, which their stubs say for later Pythons only.
    return _crc32c.crc32c(cast("bytes", data), value)


def blake2b(data: Buffer) -> bytes:
    """BLAKE2b-256 of `data`."""
    return hashlib.blake2b(cast("bytes", data), digest_size=32).digest()
