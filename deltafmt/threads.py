"""Thread pools for generators."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def pool_of(threads: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """A thread pool that is left without waiting for work under way; what has not begun is dropped.

    A generator that somebody stopped using is closed by whichever thread collects it. If that is one that
    is about to start or to end, waiting for other threads there never ends.
    """
    pool = ThreadPoolExecutor(threads, name)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
