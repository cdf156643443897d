"""The demo's table: live in a terminal, plain rows elsewhere, nothing with --json."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from deltafmt.cli.output import Output, bytes_text, saving_text, share_text

COLUMNS = ("version", "reward", "changed", "stored", "saving", "publish", "fetch", "pause", "")


def cells(row: dict[str, Any]) -> list[str]:
    """A row as the texts of the columns."""
    return [
        str(row["version"]),
        "-" if row["reward"] is None else f"{row['reward']:.3f}",
        share_text(row["changed"], row["elements"]) if row["changed"] is not None else "all",
        bytes_text(row["stored_bytes"]),
        saving_text(row["full_bytes"], row["stored_bytes"]),
        f"{row['publish_seconds']:.3f} s",
        "-" if row["fetch_seconds"] is None else f"{1000 * row['fetch_seconds']:.1f} ms",
        f"{1000 * row['pause_seconds']:.1f} ms",
        row["note"],
    ]


class Screen(Protocol):
    """Where the demo shows how it goes."""

    def say(self, text: str) -> None: ...

    def add(self, row: dict[str, Any]) -> None: ...


class Silent:
    def say(self, text: str) -> None:
        pass

    def add(self, row: dict[str, Any]) -> None:
        pass


class Plain:
    """A line at a time, flushed, for pipes and logs."""

    _WIDTHS = (7, 6, 9, 9, 7, 9, 9, 9, 0)

    def __init__(self) -> None:
        self._began = False

    def say(self, text: str) -> None:
        print(text, flush=True)

    def add(self, row: dict[str, Any]) -> None:
        if not self._began:
            self._began = True
            self.say(self._line(COLUMNS))
        self.say(self._line(cells(row)))

    def _line(self, texts: Any) -> str:
        return "  ".join(t.rjust(w) for t, w in zip(texts, self._WIDTHS, strict=True)).rstrip()


class Live:
    """A table that is drawn anew with each version."""

    def __init__(self, console: Any) -> None:
        from rich.live import Live as RichLive
        from rich.table import Table

        self._console = console
        self._table = Table(*COLUMNS, title="one trainer, two tensor-parallel receivers, one late joiner")
        for column in self._table.columns[:-1]:
            column.justify = "right"
        self._live = RichLive(self._table, console=console, auto_refresh=False)

    def say(self, text: str) -> None:
        # What is said before the first row stands above the table, what follows the last one below it.
        self.close()
        self._console.print(text, highlight=False, markup=False)

    def add(self, row: dict[str, Any]) -> None:
        self._live.start()
        self._table.add_row(*cells(row))
        self._live.refresh()

    def close(self) -> None:
        self._live.stop()


@contextmanager
def open_screen(out: Output) -> Iterator[Screen]:
    """The screen that fits where the output goes."""
    if out.json:
        yield Silent()
        return
    try:
        from rich.console import Console
    except ImportError:
        yield Plain()
        return
    if not sys.stdout.isatty():
        yield Plain()
        return
    live = Live(Console())
    try:
        yield live
    finally:
        live.close()
