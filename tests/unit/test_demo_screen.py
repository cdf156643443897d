from __future__ import annotations

import io

import pytest
from rich.console import Console

from deltafmt.cli.demo.screen import Live, Plain, open_screen
from deltafmt.cli.output import Output

ROW = {
    "version": 1,
    "reward": 0.25,
    "changed": 10,
    "elements": 1000,
    "stored_bytes": 20,
    "full_bytes": 2000,
    "publish_seconds": 0.5,
    "fetch_seconds": 0.01,
    "pause_seconds": 0.002,
    "note": "late joiner from nothing in 0.10 s",
}


def test_plain_rows_line_up(capsys: pytest.CaptureFixture[str]) -> None:
    with open_screen(Output()) as screen:
        assert isinstance(screen, Plain)
        screen.add(ROW)
        screen.add(ROW | {"version": 2, "reward": None, "changed": None, "fetch_seconds": None, "note": ""})
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["version", "reward", "changed", "stored", "saving", "publish", "fetch", "pause"]
    assert first.startswith("      1   0.250")
    assert "all" in second


def test_json_shows_nothing_on_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    with open_screen(Output(json=True)) as screen:
        screen.say("hello")
        screen.add(ROW)
    assert capsys.readouterr().out == ""


def test_the_live_table_stands_between_what_is_said_before_and_after() -> None:
    terminal = io.StringIO()
    live = Live(Console(file=terminal, force_terminal=True, width=140))
    live.say("before")
    live.add(ROW)
    live.add(ROW | {"version": 2})
    live.say("after")
    live.close()
    text = terminal.getvalue()
    assert text.index("before") < text.index("version") < text.rindex("late joiner") < text.index("after")
