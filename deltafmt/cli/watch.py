"""`deltafmt watch`: versions as they are published."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

from deltafmt.cli.arguments import Verbs, add_url, add_verb, open_lineage
from deltafmt.cli.failures import FINE, UsageError
from deltafmt.cli.log import HEADER, cells_of, row_of
from deltafmt.cli.output import Output

_EXAMPLES = """\
  deltafmt watch s3://bucket/run                        a line for each new version, until interrupted
  deltafmt watch ./run --from 0 --count 10              from version 0 on, ten of them
  deltafmt watch ./run --json | jq .stored_bytes        one JSON document a line, for programs

Storage that cannot be reached is tried again, after growing pauses, for as long as it takes."""

_WIDTHS = (7, 7, 9, 20, 10, 8, 6, 6)


def add(verbs: Verbs, common: argparse.ArgumentParser) -> None:
    parser = add_verb(verbs, common, "watch", "print each version as it is published", _EXAMPLES)
    add_url(parser)
    parser.add_argument(
        "--from", dest="first", type=int, metavar="V", help="begin with this version (default: the next one)"
    )
    parser.add_argument("--count", type=int, metavar="N", help="stop after so many versions")
    parser.add_argument(
        "--poll",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="pause between looks, on average (default: 1)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, out: Output) -> int:
    if options.poll <= 0:
        raise UsageError(f"--poll {options.poll} is no pause", "give a positive number of seconds")
    rows = _rows(options, out)
    for number, row in enumerate(itertools.islice(rows, options.count)):
        if out.json:
            out.line(row)
        else:
            for line in [_aligned(HEADER)] * (number == 0) + [_aligned(cells_of(row))]:
                print(line, flush=True)
    return FINE


def _rows(options: argparse.Namespace, out: Output) -> Iterator[dict[str, Any]]:
    from deltafmt.errors import StoreError
    from deltafmt.read.follow import Pace

    pace = Pace(options.poll)
    lineage = open_lineage(options)
    upcoming: int | None = options.first
    down = False
    while True:
        try:
            newest = lineage.latest()
            if down:
                out.note("storage is back")
            down = False
            upcoming = _next(newest) if upcoming is None else upcoming
            while newest is not None and upcoming <= newest:
                row = row_of(lineage, lineage.info(upcoming))
                upcoming += 1
                yield row
        except StoreError as error:
            if not down:
                out.note(f"storage cannot be reached, trying again: {error}")
            down = True
            time.sleep(pace.failed())
            continue
        time.sleep(pace.succeeded())


def _aligned(cells: Sequence[str]) -> str:
    """A line of a table that grows, so that nobody knows yet how wide its columns will be."""
    padded = (cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
    return "  ".join(padded).rstrip()


def _next(newest: int | None) -> int:
    return 0 if newest is None else newest + 1
