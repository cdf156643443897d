"""`deltafmt log`: the versions of a lineage."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from deltafmt.cli.arguments import Verbs, add_url, add_verb, open_lineage
from deltafmt.cli.failures import DAMAGE, FINE
from deltafmt.cli.output import Output, bytes_text, saving_text, share_text, table, time_text
from deltafmt.errors import FormatError

_EXAMPLES = """\
  deltafmt log s3://bucket/run                 all versions, oldest first
  deltafmt log ./run --last 10                 the newest ten
  deltafmt log ./run --json | jq '.[].step'    for programs"""

HEADER = ("version", "base", "step", "created", "changed", "stored", "saving", "ways")


def add(verbs: Verbs, common: argparse.ArgumentParser) -> None:
    parser = add_verb(verbs, common, "log", "list the versions of a lineage", _EXAMPLES)
    add_url(parser)
    parser.add_argument("--last", type=int, metavar="N", help="only the newest N versions")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, out: Output) -> int:
    lineage = open_lineage(options)
    rows = [_row(lineage, version, line) for version, line in lineage.lines(last=options.last)]
    out.give(rows, _render)
    return DAMAGE if any("damage" in row for row in rows) else FINE


def _row(lineage: Any, version: int, line: Any) -> dict[str, Any]:
    """A version's line; one whose manifest is damaged does not hide the others."""
    if isinstance(line, FormatError):
        return {"version": version, "damage": line.kind, "message": str(line)}
    return row_of(lineage, line)


def row_of(lineage: Any, info: Any) -> dict[str, Any]:
    """A version's line as plain data."""
    schema = lineage.schema(info.version)
    return {
        "version": info.version,
        "base": info.base,
        "step": info.step,
        "created": info.created,
        "changed": info.changed,
        "elements": schema.elements,
        "stored_bytes": info.stored_bytes,
        "full_bytes": schema.nbytes,
        "ways": list(info.ways),
        "meta": dict(info.meta),
    }


def _render(rows: list[dict[str, Any]]) -> Iterator[str]:
    if not rows:
        yield "no version yet"
        return
    yield from table(HEADER, map(cells_of, rows), left=["ways"])
    if any("damage" in row for row in rows):
        yield "next: run `deltafmt verify URL` to see all damage and which versions it takes down"


def cells_of(row: dict[str, Any]) -> tuple[str, ...]:
    """A version's line for people, under `HEADER`."""
    if "damage" in row:
        return (str(row["version"]), *["-"] * (len(HEADER) - 2), f"damaged: {row['damage']}")
    return (
        str(row["version"]),
        "-" if row["base"] is None else str(row["base"]),
        "-" if row["step"] is None else str(row["step"]),
        time_text(row["created"]),
        share_text(row["changed"], row["elements"]),
        bytes_text(row["stored_bytes"]),
        saving_text(row["full_bytes"], row["stored_bytes"]),
        " ".join(map(way_text, row["ways"])),
    )


def way_text(base: int | None) -> str:
    return "anchor" if base is None else f"from {base}"
