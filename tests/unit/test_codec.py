from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from deltafmt.format.codec import compress, decompress
from deltafmt.format.constants import RAW, ZSTD
from tests.formats import kind_of

CONTENT = b"abcd" * 100
FRAME = zstandard.ZstdCompressor(write_checksum=False).compress(CONTENT)


def unpacked(stored: bytes, raw_bytes: int, codec: int = ZSTD) -> bytes:
    return decompress(codec, memoryview(stored), raw_bytes, where="column").tobytes()


@given(st.binary(max_size=300), st.integers(1, 50))
def test_columns_come_back(part: bytes, times: int) -> None:
    raw = np.frombuffer(part * times, np.uint8)
    codec, stored = compress(raw)
    assert len(stored) <= len(raw)
    assert unpacked(stored, len(raw), codec) == raw.tobytes()


def test_small_and_random_columns_stay_raw() -> None:
    noise = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8)
    assert compress(noise) == (RAW, noise.tobytes())
    assert compress(b"aaaa") == (RAW, b"aaaa")
    assert compress(b"") == (RAW, b"")


FRAMES = {
    "with a checksum": zstandard.ZstdCompressor(write_checksum=True).compress(CONTENT),
    "of another level": zstandard.ZstdCompressor(level=19).compress(CONTENT),
    "of many blocks": zstandard.ZstdCompressor().compress(CONTENT * 3000),
    "of no bytes": zstandard.ZstdCompressor().compress(b""),
    "of 255 bytes": zstandard.ZstdCompressor().compress(CONTENT[:255]),
    "of 256 bytes": zstandard.ZstdCompressor().compress(CONTENT[:256]),
    "of 65,791 bytes": zstandard.ZstdCompressor().compress((CONTENT * 200)[:65_791]),
    "of 65,792 bytes": zstandard.ZstdCompressor().compress((CONTENT * 200)[:65_792]),
}


@pytest.mark.parametrize("case", FRAMES)
def test_frames_of_other_writers(case: str) -> None:
    content = zstandard.ZstdDecompressor().decompress(FRAMES[case])
    assert unpacked(FRAMES[case], len(content)) == content


def without_size(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(content)


def declared(size: int) -> bytes:
    """A frame's header that declares a size of eight bytes, and one small block."""
    return b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little") + b"\x01\x00\x00"


SPOILED = {
    "hostile": ("zstd-size", bytes.fromhex("28b52ffde06c06060663636363")),
    "size of 2^64 - 1": ("zstd-size", declared(2**64 - 1)),
    "64 MiB of zeros": ("zstd-size", zstandard.ZstdCompressor().compress(bytes(64 << 20))),
    "no size": ("zstd-size", without_size(CONTENT)),
    "right size, no content": ("zstd-corrupt", declared(len(CONTENT))),
    "two frames": ("zstd-trailing", FRAME + FRAME),
    "an empty frame behind": ("zstd-trailing", FRAME + FRAMES["of no bytes"]),
    "a skippable frame behind": ("zstd-trailing", FRAME + bytes.fromhex("502a4d1800000000")),
    "a skippable frame before": ("zstd-corrupt", bytes.fromhex("502a4d1800000000") + FRAME),
    "a byte behind": ("zstd-trailing", FRAME + b"\0"),
    "a byte less": ("zstd-corrupt", FRAME[:-1]),
    "only the magic": ("zstd-corrupt", FRAME[:4]),
    "cut in the header": ("zstd-corrupt", declared(9)[:10]),
    "cut before a block": ("zstd-corrupt", declared(len(CONTENT))[:14]),
    "nothing": ("zstd-corrupt", b""),
    "a reserved block": ("zstd-corrupt", FRAME[:7] + b"\x07\x00\x00"),
    "a checksum that is wrong": ("zstd-corrupt", FRAMES["with a checksum"][:-1] + b"\x77"),
    "a dictionary that nobody has": ("zstd-corrupt", b"\x28\xb5\x2f\xfd\x61\x05\x90\x00\x01\x00\x00"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_spoiled_frames_are_refused(case: str) -> None:
    kind, stored = SPOILED[case]
    assert kind_of(lambda: unpacked(stored, len(CONTENT))) == kind


def test_raw_columns_and_unknown_codecs() -> None:
    assert kind_of(lambda: unpacked(b"abc", 4, RAW)) == "column-length"
    assert kind_of(lambda: unpacked(b"abc", 3, 2)) == "codec-unknown"
    stored = memoryview(b"abc")
    assert np.shares_memory(decompress(RAW, stored, 3, where="x"), np.frombuffer(stored, np.uint8))
