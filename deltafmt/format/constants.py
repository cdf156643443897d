"""Numbers and marks of format v1, each in one place."""

from __future__ import annotations

FORMAT_VERSION = 1

OBJECT_MAGIC = b"\x89DFM\r\n\x1a\n"
"""First 8 bytes of every metadata object, and of the footer inside a shard."""
SHARD_MAGIC = b"\x89DFS\r\n\x1a\n"
"""First 8 bytes of a shard."""
SHARD_END = b"\x89DFE\r\n\x1a\n"
"""Last 8 bytes of a shard."""
ENVELOPE_BYTES = 24
TRAILER_BYTES = 16

SET, STEP, DENSE = 1, 2, 3
OPERATIONS = {SET: "set", STEP: "step", DENSE: "dense"}

GAP, LOW, BLOCK, CODE, MAGNITUDE, ESCAPE, PLANE = 0, 1, 2, 3, 4, 5, 16
"""Column ids; byte plane j is `PLANE + j`."""
COLUMNS = {
    GAP: "gap",
    LOW: "low",
    BLOCK: "block",
    CODE: "code",
    MAGNITUDE: "magnitude",
    ESCAPE: "escape",
    **{PLANE + j: f"b{j}" for j in range(8)},
}

RAW, ZSTD = 0, 1
CODECS = {RAW: "raw", ZSTD: "zstd"}

WIDTHS = (1, 2, 4, 8)

MAX_OBJECT_BYTES = 64 << 20
"""Default cap on one metadata object; a reader may be configured to allow more."""
MAX_ITEMS = 65_536
"""Cap on the msgpack items of one metadata object; everything that grows with the model is in columns."""
MAX_TENSORS = 1 << 20
"""Cap on the tensors of a schema."""
MAX_TABLE_BYTES, FREE_TABLE_BYTES, TABLE_RATIO = 512 << 20, 8 << 20, 256
"""What bounds the raw bytes of all columns of one metadata object; see `table_limit`."""
MAX_DOMAIN_ELEMENTS = 2**31 - 1
MIN_BLOCK_LOG2, MAX_BLOCK_LOG2, DEFAULT_BLOCK_LOG2 = 6, 24, 16
MAX_SHIFT = 16
MAX_WRITERS = 100_000
MAX_VERSION = 10**18
"""Versions stay in 63 bits and in 20 decimal digits."""
MAX_HINT_BYTES = 4096
"""Cap on `latest.dfm`: a larger one is no hint."""
MAX_LEASE_SECONDS = 86_400
"""A lease that holds longer must be renewed, so that a reader that died does not hold versions for ever."""

FEATURES: frozenset[str] = frozenset()
"""Names that a `required` list may hold for this build to go on."""


def table_limit(object_bytes: int) -> int:
    """Most raw bytes that all columns of a metadata object of this size may have: a small one stays small."""
    return min(MAX_TABLE_BYTES, FREE_TABLE_BYTES + TABLE_RATIO * object_bytes)
