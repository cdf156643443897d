"""What the command prints: plain text for people, one JSON document for programs, progress on stderr."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

T = TypeVar("T")

_LOG_SECONDS = 30.0
"""Between two reports of progress where they go into a file."""


class Output:
    """Where a verb's results go."""

    def __init__(self, *, json: bool = False, quiet: bool = False) -> None:
        self.json = json
        self.quiet = quiet

    def give(self, result: T, render: Callable[[T], Iterable[str]]) -> None:
        """Print a result: as JSON, or as the lines that `render` makes of it."""
        if self.json:
            self.document(result)
        else:
            for line in render(result):
                print(line)

    def document(self, result: object) -> None:
        print(json.dumps(result, indent=2, default=_plain, ensure_ascii=False))

    def line(self, result: object) -> None:
        """A JSON document of one line, seen at once: one of many that a program reads as they come."""
        print(json.dumps(result, default=_plain, ensure_ascii=False), flush=True)

    def note(self, text: str) -> None:
        """A remark beside the result."""
        if not self.quiet:
            print(text, file=sys.stderr)

    @contextmanager
    def progress(self, what: str, total: int | None, unit: str = "B") -> Iterator[Callable[[int], object]]:
        """A bar that appears after a second, in a file seldom; call the yielded function with what was done since."""
        from tqdm import tqdm

        with tqdm(
            total=total, desc=what, unit=unit, unit_scale=True, delay=1.0, leave=False,
            file=sys.stderr, disable=self.quiet, mininterval=0.1 if sys.stderr.isatty() else _LOG_SECONDS,
        ) as bar:  # fmt: skip
            yield bar.update

    @contextmanager
    def bytes_progress(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """A bar for work that reports (bytes done, bytes in all)."""
        with self.progress(what, None) as advance:
            bar = getattr(advance, "__self__", None)
            seen = 0

            def report(done: int, total: int) -> None:
                nonlocal seen
                if bar is not None:
                    bar.total = total
                advance(done - seen)
                seen = done

            yield report

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """A bar that counts seconds, for work that does not say how far it is."""
        done = threading.Event()
        with self.progress(what, None, unit="s") as advance:

            def tick() -> None:
                while not done.wait(1.0):
                    advance(1)

            ticker = threading.Thread(target=tick, daemon=True)
            ticker.start()
            try:
                yield
            finally:
                done.set()
                ticker.join()


def _plain(value: Any) -> Any:
    """JSON for what JSON does not know."""
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def bytes_text(count: int | None) -> str:
    """A size for people.

    >>> bytes_text(0), bytes_text(999), bytes_text(1_234_567), bytes_text(None)
    ('0 B', '999 B', '1.23 MB', '-')
    """
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            return f"{count} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError


def count_text(count: int | None) -> str:
    """A number for people.

    >>> count_text(1234567), count_text(None)
    ('1,234,567', '-')
    """
    return "-" if count is None else f"{count:,}"


def share_text(part: int | None, whole: int) -> str:
    """`part` of `whole` in percent.

    >>> share_text(12, 1000), share_text(None, 10), share_text(1, 100_000_000), share_text(0, 0)
    ('1.2 %', '-', '0.000001 %', '0 %')
    """
    if part is None:
        return "-"
    share = 100 * part / whole if whole else 0.0
    return f"{share:.3g} %" if share >= 0.001 or share == 0 else f"{share:.6f} %"


def saving_text(full: int, stored: int) -> str:
    """How many times smaller `stored` is.

    >>> saving_text(1000, 10), saving_text(1000, 0)
    ('100x', '-')
    """
    return f"{full / stored:.3g}x" if stored else "-"


def time_text(milliseconds: int) -> str:
    """A time stamp of the format for people.

    >>> time_text(0)
    '1970-01-01 00:00:00Z'
    """
    try:
        when = datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{milliseconds} ms"
    return when.strftime("%Y-%m-%d %H:%M:%SZ")


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: Iterable[str] = ()) -> list[str]:
    """Lines of an aligned table; columns named in `left` are left-aligned.

    >>> table(("a", "name"), [("1", "x"), ("22", "y")], left=["name"])
    [' a  name', ' 1  x', '22  y']
    """
    grid = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    flush = [name in set(left) for name in header]
    return [
        "  ".join(
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(row, widths, flush, strict=True)
        ).rstrip()
        for row in grid
    ]
