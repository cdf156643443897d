"""`deltafmt publish`: a checkpoint as the next version."""

from __future__ import annotations

import argparse
from pathlib import Path

from deltafmt.cli.arguments import (
    Verbs,
    add_meta,
    add_signing,
    add_url,
    add_verb,
    open_lineage,
    pairs,
    storage_options,
    writer_options,
)
from deltafmt.cli.create import render, summary
from deltafmt.cli.failures import FINE
from deltafmt.cli.output import Output, bytes_text

_EXAMPLES = """\
  deltafmt publish s3://bucket/run ./checkpoint-200 --step 200
  deltafmt publish ./run ./checkpoint-200 --meta reward=0.71 --meta note=warm-up
  deltafmt publish ./run ./other-dtype --anchor           all bytes again: dtypes may change

What the newest version holds is read from the lineage and compared bit by bit; only what differs is stored."""


def add(verbs: Verbs, common: argparse.ArgumentParser) -> None:
    parser = add_verb(verbs, common, "publish", "publish a checkpoint as the next version", _EXAMPLES)
    add_url(parser)
    parser.add_argument("directory", type=Path, metavar="DIR", help="safetensors directory or file")
    parser.add_argument("--anchor", action="store_true", help="store all bytes instead of what changed")
    add_meta(parser)
    add_signing(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, out: Output) -> int:
    import deltafmt
    from deltafmt.cli.checkpoint import read_checkpoint

    given = storage_options(options)
    lineage = open_lineage(options)
    checkpoint = read_checkpoint(options.directory)
    writer = deltafmt.Writer(options.url, options=writer_options(options), storage_options=given)
    # The first version of a lineage has no base to differ from.
    anchor = options.anchor or lineage.latest() is None
    publish = writer.publish_anchor if anchor else writer.publish
    with out.working(f"publishing {bytes_text(checkpoint.nbytes)}"):
        version = publish(
            checkpoint.tensors,
            step=options.step,
            meta=pairs(options.meta, "--meta"),
            files=checkpoint.files or None,
        )
    out.give(summary(lineage, options.url, version), render)
    return FINE
