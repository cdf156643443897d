"""Bytes as hex, sixteen to a line."""

from __future__ import annotations

from collections.abc import Iterator

LINE_BYTES = 16


def hex_lines(data: bytes | memoryview, *, start: int = 0, limit: int | None = None) -> Iterator[str]:
    """Lines of offset, hex and printable characters; at most `limit` bytes, then a line that says what is left.

    >>> list(hex_lines(b"DFM!", start=32))
    ['00000020  44 46 4d 21                                      DFM!']
    """
    view = memoryview(data)
    shown = len(view) if limit is None else min(limit, len(view))
    for first in range(0, shown, LINE_BYTES):
        piece = bytes(view[first : min(first + LINE_BYTES, shown)])
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in piece)
        yield f"{start + first:08x}  {piece.hex(' '):<{3 * LINE_BYTES}} {text}"
    if shown < len(view):
        yield f"... {len(view) - shown:,} more bytes (--all shows them)"
