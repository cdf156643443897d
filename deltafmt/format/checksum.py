"""CRC32C for bytes in transit, BLAKE2b for names by content."""

from __future__ import annotations

import hashlib
from typing import Any, cast

import crc32c as _crc32c
import numpy.typing as npt

DIGEST_BYTES = 32
"""Bytes of a BLAKE2b-256."""

Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]


def crc32c(data: Buffer, value: int = 0) -> int:
    """CRC-32C (Castagnoli) of `data`, going on from `value`."""
    # Arrays are buffers too, which their stubs say for later Pythons only.
    return _crc32c.crc32c(cast("bytes", data), value)


def blake2b(*parts: Buffer) -> bytes:
    """BLAKE2b-256 of the parts, one behind another."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(cast("bytes", part))
    return digest.digest()
