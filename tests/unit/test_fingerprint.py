from __future__ import annotations

import numpy as np
import pytest

from deltafmt.kernels.fingerprint import fingerprint


@pytest.mark.parametrize("dtype", ["<u1", "<u2", "<u4", "<u8"])
@pytest.mark.parametrize("size", [1, 3, 7, 4096, 20_001])
def test_every_changed_bit_shows_and_parts_add_up(size: int, dtype: str) -> None:
    rng = np.random.default_rng(size)
    bits = rng.integers(0, 256, size * np.dtype(dtype).itemsize).astype(np.uint8).view(dtype)
    found = fingerprint(bits, 0)
    parts = [fingerprint(bits[low : low + 8192], low) for low in range(0, size, 8192)]
    assert sum(parts) % 2**64 == found
    for _ in range(50):
        other = bits.copy()
        at = int(rng.integers(size))
        other[at] ^= other.dtype.type(1 << int(rng.integers(8 * other.itemsize)))
        assert fingerprint(other, 0) != found


def test_what_has_changed_places_shows() -> None:
    bits = np.arange(100_000, dtype="<u4")
    assert fingerprint(bits[::-1].copy(), 0) != fingerprint(bits, 0)
    assert fingerprint(np.roll(bits, 1024), 0) != fingerprint(bits, 0)
    assert fingerprint(np.zeros(10, "<u4"), 0) != fingerprint(np.zeros(12, "<u4"), 0)
