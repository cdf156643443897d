"""`deltafmt anchor`: a way from nothing to a version."""

from __future__ import annotations

import argparse
from typing import Any

from deltafmt.cli.arguments import (
    LATEST,
    Verbs,
    add_signing,
    add_url,
    add_verb,
    open_lineage,
    resolve_version,
    version_argument,
)
from deltafmt.cli.failures import FINE
from deltafmt.cli.output import Output, bytes_text

_EXAMPLES = """\
  deltafmt anchor s3://bucket/run                  the newest version
  deltafmt anchor ./run 164                        version 164
  deltafmt anchor ./run 164 --trust trainer.pub --sign-with operator.pem

The version is read through its deltas, in memory of the model's size, proven by its digests, and stored in full as a
further way. Nothing is taken away: readers that start from nothing may begin there, and `gc` can remove what is older.
An anchor that is there already is left as it is. A trainer's writer adds them with WriterOptions(anchor_every=100)."""


def add(verbs: Verbs, common: argparse.ArgumentParser) -> None:
    parser = add_verb(verbs, common, "anchor", "add all bytes of a version as one more way to it", _EXAMPLES)
    add_url(parser)
    parser.add_argument(
        "version", metavar="VERSION", type=version_argument, nargs="?", default=LATEST, help="default: latest"
    )
    add_signing(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, out: Output) -> int:
    lineage = open_lineage(options)
    version = resolve_version(lineage, options.version)
    there = None in lineage.info(version).ways
    with out.working(f"anchoring version {version}"):
        way = lineage.add_anchor(version)
    out.give(
        {"url": options.url, "version": version, "existed": there, "stored_bytes": way.stored_bytes}, _render
    )
    return FINE


def _render(data: dict[str, Any]) -> list[str]:
    state = "was there already" if data["existed"] else "added"
    return [
        f"{data['url']}: anchor of version {data['version']} {state} ({bytes_text(data['stored_bytes'])})"
    ]
