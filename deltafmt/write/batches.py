"""Neighbouring domains taken together, so that memory stays bounded and requests are few."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def batches(sizes: Iterable[int], limit: int) -> Iterator[range]:
    """Ranges of indices whose sizes sum up to at most `limit`; one that is larger stays alone.

    >>> list(batches([3, 3, 3, 9, 1, 0], 6))
    [range(0, 2), range(2, 3), range(3, 4), range(4, 6)]
    """
    first, end, total = 0, 0, 0
    for end, size in enumerate(sizes, 1):
        if end - 1 > first and total + size > limit:
            yield range(first, end - 1)
            first, total = end - 1, 0
        total += size
    if end > first:
        yield range(first, end)
