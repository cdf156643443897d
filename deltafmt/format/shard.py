"""A shard's frame: magic, chunks back to back, footer, and the trailer that finds the footer."""

from __future__ import annotations

import struct

from deltafmt.errors import FormatError
from deltafmt.format.constants import SHARD_END, SHARD_MAGIC, TRAILER_BYTES
from deltafmt.format.objects import emit_footer, parse_footer
from deltafmt.format.records import Footer

_TRAILER = struct.Struct("<Q8s")


def shard_tail(footer: Footer, offset: int) -> bytes:
    """Footer and trailer of a shard whose chunks end at byte `offset`."""
    return emit_footer(footer) + _TRAILER.pack(offset, SHARD_END)


def footer_offset(trailer: bytes | memoryview, size: int, *, where: object) -> int:
    """First byte of the footer, from the last `TRAILER_BYTES` bytes of a shard of `size` bytes."""
    if len(trailer) != TRAILER_BYTES or size < len(SHARD_MAGIC) + TRAILER_BYTES:
        raise FormatError("shard is cut", kind="truncated", where=where, found=f"{size} bytes")
    offset, end = _TRAILER.unpack(trailer)
    if end != SHARD_END:
        raise FormatError("shard has no end mark", kind="magic-wrong", where=where, found=end.hex())
    if not len(SHARD_MAGIC) <= offset <= size - TRAILER_BYTES:
        raise FormatError("footer lies outside the shard", kind="footer-offset", where=where, found=offset)
    return int(offset)


def read_footer(shard: memoryview, *, where: object) -> Footer:
    """The footer of a whole shard in memory."""
    if bytes(shard[: len(SHARD_MAGIC)]) != SHARD_MAGIC:
        raise FormatError("not a shard", kind="magic-wrong", where=where, found=bytes(shard[:8]).hex())
    offset = footer_offset(shard[-TRAILER_BYTES:], len(shard), where=where)
    return parse_footer(shard[offset:-TRAILER_BYTES], where=f"{where}, footer")
