"""`deltafmt squash`: one way in place of a run of deltas."""

from __future__ import annotations

import argparse
from typing import Any

from deltafmt.cli.arguments import (
    Verbs,
    add_signing,
    add_url,
    add_verb,
    open_lineage,
    resolve_version,
    version_argument,
)
from deltafmt.cli.failures import FINE, UsageError
from deltafmt.cli.output import Output, bytes_text, count_text

_EXAMPLES = """\
  deltafmt squash s3://bucket/run 100 164          one way from version 100 to version 164
  deltafmt squash ./run 100 latest
  deltafmt squash ./run 100 latest --trust trainer.pub --sign-with operator.pem

The deltas are composed chunk by chunk, in memory of some chunks, and nothing is taken away: the new way stands
beside the others, and receivers choose by bytes. A way that is there already is left as it is.
A trainer's writer adds such ways by itself with WriterOptions(squash=64)."""


def add(verbs: Verbs, common: argparse.ArgumentParser) -> None:
    parser = add_verb(verbs, common, "squash", "add one way in place of a run of deltas", _EXAMPLES)
    add_url(parser)
    parser.add_argument("base", metavar="BASE", type=version_argument, help="the version to start from")
    parser.add_argument("version", metavar="VERSION", type=version_argument, help="the version to lead to")
    add_signing(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, out: Output) -> int:
    lineage = open_lineage(options)
    base, version = (resolve_version(lineage, given) for given in (options.base, options.version))
    if base >= version:
        raise UsageError(
            f"version {base} is not older than version {version}", "give the older version first"
        )
    there = base in lineage.info(version).ways
    with out.bytes_progress("squashing") as progress:
        way = lineage.squash(base, version, progress=progress)
    result = {
        "url": options.url,
        "base": base,
        "version": version,
        "existed": there,
        "changed": way.changed,
        "listed": way.listed,
        "stored_bytes": way.stored_bytes,
    }
    out.give(result, _render)
    return FINE


def _render(data: dict[str, Any]) -> list[str]:
    state = "was there already" if data["existed"] else "added"
    what = f"{count_text(data['listed'])} elements, {bytes_text(data['stored_bytes'])}"
    return [f"{data['url']}: way from {data['base']} to {data['version']} {state} ({what})"]
