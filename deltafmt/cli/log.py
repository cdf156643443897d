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
    versions = lineage.history.versions()
    if options.last is not None:
        versions = versions[max(0, len(versions) - options.last) :]
    rows = [_row(lineage, version) for version in versions]
    out.give(rows, _render)
    return DAMAGE if any("damage" in row for row in rows) else FINE


def _row(lineage: Any, version: int) -> dict[str, Any]:
    """A version's line; one whose manifest is damaged does not hide the others."""
    try:
        return row_of(lineage, lineage.info(version))
    except FormatError as error:
        return {"version": version, "damage": error.kind, "message": str(error)}


def row_of(lineage: Any, info: Any) -> dict[str, Any]:
    """A version's line as plain data."""
    schema = lineage.schema(info.version)
    owners = [schema.tensors[row] for row in schema.owners]
    return {
        "version": info.version,
        "base": info.base,
        "step": info.step,
        "created": info.created,
        "changed": info.changed,
        "elements": sum(spec.volume for spec in owners),
        "stored_bytes": info.stored_bytes,
        "full_bytes": sum(spec.nbytes for spec in owners),
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
