"""Work on worker threads, a bounded amount of it at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

UNDER_WAY_BYTES = 64 << 20
"""Memory that the items under way may take together; one item is always let through."""


def run_bounded(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    threads: int,
    weigh: Callable[[Item], int] | None = None,
    limit: int = UNDER_WAY_BYTES,
) -> list[Result]:
    """Results of `work` on all items, in order of completion.

    An item is taken from `items` only when a worker is about to be free and its weight in bytes fits. The
    first failure stops the rest; it is raised when every item under way has ended.
    """
    results: list[Result] = []
    with ThreadPoolExecutor(threads, "deltafmt-work") as pool:
        pending: dict[Future[Result], int] = {}
        try:
            for item in items:
                weight = weigh(item) if weigh else 0
                while pending and (len(pending) >= 2 * threads or sum(pending.values()) + weight > limit):
                    results += _take(pending)
                pending[pool.submit(work, item)] = weight
            while pending:
                results += _take(pending)
        finally:
            for future in pending:
                future.cancel()
            _outlast(pending)
    return results


def _outlast(pending: Iterable[Future[Result]]) -> None:
    """Wait until nothing is under way; an interrupt meanwhile is raised then, not before.

    Who undoes what the items did must not run beside them.
    """
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            wait(pending)
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def _take(pending: dict[Future[Result], int]) -> list[Result]:
    done, _ = wait(pending, return_when=FIRST_COMPLETED)
    for future in done:
        del pending[future]
    return [future.result() for future in done]
