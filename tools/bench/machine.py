"""What the machine can do, and what the process takes: bandwidth, times, memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

MIB = 1 << 20


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def best_of(times: int, action: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs."""
    best = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - began)
    return best


@njit(nogil=True)
def _differ(a: Any, b: Any) -> Any:
    found = np.uint64(0)
    for i in range(a.size):
        found |= a[i] ^ b[i]
    return found


def two_stream_bandwidth(size_bytes: int, threads: int, times: int = 5) -> float:
    """Bytes per second at which two arrays of `size_bytes` each are read side by side."""
    a = np.ones(size_bytes // 8, np.uint64)
    b = np.ones(size_bytes // 8, np.uint64)
    _differ(a[:8], b[:8])
    cuts = np.linspace(0, len(a), threads + 1).astype(np.int64)
    with ThreadPoolExecutor(threads) as pool:

        def read(part: int) -> Any:
            return _differ(a[cuts[part] : cuts[part + 1]], b[cuts[part] : cuts[part + 1]])

        seconds = best_of(times, lambda: list(pool.map(read, range(threads))))
    return 2 * a.nbytes / seconds


def read_file_seconds(path: Path) -> float:
    """Seconds to read a file that is in the page cache; a floor for any loader."""
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(8 * MIB)
        return best_of(3, lambda: _drain(file, buffer))


def _drain(file: Any, buffer: bytearray) -> None:
    file.seek(0)
    while file.readinto(buffer):
        pass


def resident_bytes() -> int:
    """Resident memory of this process now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return pages * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """Highest resident memory over a block, above what was resident when it began."""

    def __init__(self) -> None:
        self.extra_bytes = 0


@contextmanager
def peak() -> Iterator[Peak]:
    """Watch resident memory every two milliseconds."""
    result, done, before = Peak(), threading.Event(), resident_bytes()

    def watch() -> None:
        while not done.wait(0.002):
            result.extra_bytes = max(result.extra_bytes, resident_bytes() - before)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield result
    finally:
        result.extra_bytes = max(result.extra_bytes, resident_bytes() - before)
        done.set()
        watcher.join()


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Aligned lines, the first column to the left."""
    grid = [header, *rows]
    widths = [max(len(row[k]) for row in grid) for k in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if k == 0 else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in grid
    ]


Bits = npt.NDArray[Any]
