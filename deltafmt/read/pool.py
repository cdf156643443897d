"""Work on worker threads, a bounded amount of it at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
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
    gate = _Gate()
    with ThreadPoolExecutor(threads, "deltafmt-work") as pool:
        pending: dict[Future[Result], int] = {}
        try:
            for item in items:
                weight = weigh(item) if weigh else 0
                while pending and (len(pending) >= 2 * threads or sum(pending.values()) + weight > limit):
                    results += _take(pending)
                pending[pool.submit(gate.through, work, item)] = weight
            while pending:
                results += _take(pending)
        finally:
            for future in pending:
                future.cancel()
            gate.close()
    return results


class _Gate:
    """Lets items begin until it is closed, and knows when none is under way any more.

    A pool alone does not: a worker that is started while an interrupt arrives may be unknown to it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._closed = False

    def through(self, work: Callable[[Item], Result], item: Item) -> Result:
        with self._changed:
            if self._closed:
                raise CancelledError
            self._running += 1
        try:
            return work(item)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Let nothing more begin, and wait until nothing runs; an interrupt meanwhile is raised then.

        Who undoes what the items did must not run beside them.
        """
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                with self._changed:
                    self._closed = True
                    self._changed.wait_for(lambda: not self._running)
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
