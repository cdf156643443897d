"""Column codecs: raw, or exactly one zstd frame that declares its content size."""

from __future__ import annotations

import threading
from typing import cast

import numpy as np
import numpy.typing as npt
import zstandard

from deltafmt.errors import FormatError
from deltafmt.format.constants import RAW, ZSTD

_FRAME_MAGIC = b"\x28\xb5\x2f\xfd"
_LEVEL = 1


class _Contexts(threading.local):
    """What zstd needs to work, kept per thread: making it anew costs more than a small column's decoding."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_CONTEXTS = _Contexts()


def compress(data: npt.NDArray[np.uint8] | bytes) -> tuple[int, bytes]:
    """Codec id and stored bytes of a column: zstd where that is smaller, raw otherwise."""
    size = len(data)
    if size > 16:
        frame = _CONTEXTS.compressor.compress(cast("bytes", data))
        if len(frame) < size:
            return ZSTD, frame
    return RAW, bytes(data)


def decompress(codec: int, stored: memoryview, raw_bytes: int, *, where: object) -> npt.NDArray[np.uint8]:
    """The column's raw bytes; aliases `stored` for the raw codec.

    `raw_bytes` must have been bounded by the caller: nothing larger is allocated. Raises `FormatError`.
    """
    if codec == RAW:
        if len(stored) != raw_bytes:
            raise FormatError(
                "raw column of another length",
                kind="column-length",
                where=where,
                expected=raw_bytes,
                found=len(stored),
            )
        return np.frombuffer(stored, np.uint8)
    if codec != ZSTD:
        raise FormatError("unknown codec", kind="codec-unknown", where=where, found=codec)
    _check_frame(stored, raw_bytes, where)
    try:
        raw = _CONTEXTS.decompressor.decompress(stored, raw_bytes)
    except zstandard.ZstdError as error:
        raise FormatError(
            f"zstd cannot decode the frame ({error})", kind="zstd-corrupt", where=where
        ) from error
    return np.frombuffer(raw, np.uint8)


def _check_frame(frame: memoryview, raw_bytes: int, where: object) -> None:
    """Walk headers only: one frame, its content size declared as `raw_bytes`, nothing behind it."""
    size, start, has_checksum = _frame_header(frame, where)
    if size != raw_bytes:
        raise FormatError(
            "zstd frame declares another size", kind="zstd-size", where=where, expected=raw_bytes, found=size
        )
    last = False
    while not last:
        if start + 3 > len(frame):
            raise FormatError("zstd frame is cut", kind="zstd-corrupt", where=where)
        header = int.from_bytes(frame[start : start + 3], "little")
        last, kind, length = bool(header & 1), header >> 1 & 3, header >> 3
        start += 3 + (1 if kind == 1 else length)
    start += 4 * has_checksum
    if start > len(frame):
        raise FormatError("zstd frame is cut", kind="zstd-corrupt", where=where)
    if start < len(frame):
        raise FormatError(
            "bytes behind the zstd frame",
            kind="zstd-trailing",
            where=where,
            found=f"{len(frame) - start} bytes",
        )


def _frame_header(frame: memoryview, where: object) -> tuple[int | None, int, bool]:
    """Content size (None where absent), header length, and whether a checksum ends the frame."""
    if len(frame) < 6 or frame[:4] != _FRAME_MAGIC:
        raise FormatError("not a zstd frame", kind="zstd-corrupt", where=where)
    flags = frame[4]
    size_flag, single, dictionary = flags >> 6, flags >> 5 & 1, flags & 3
    size_bytes = (0 if not single else 1, 2, 4, 8)[size_flag]
    start = 5 + (not single) + (0, 1, 2, 4)[dictionary]
    end = start + size_bytes
    if end > len(frame):
        raise FormatError("zstd frame is cut", kind="zstd-corrupt", where=where)
    size = int.from_bytes(frame[start:end], "little") if size_bytes else None
    if size is not None and size_bytes == 2:
        size += 256
    return size, end, bool(flags >> 2 & 1)
