"""Parse the command line, run a verb, turn errors into exit codes."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

import deltafmt
from deltafmt.cli import (
    anchor,
    cat,
    create,
    demo,
    diff,
    dump,
    export,
    gc,
    log,
    publish,
    show,
    squash,
    verify,
    watch,
)
from deltafmt.cli.failures import INTERRUPTED, PIPE_CLOSED, USAGE, report
from deltafmt.cli.output import Output

VERBS = (create, publish, log, watch, show, dump, verify, gc, diff, squash, anchor, export, cat, demo)

_DESCRIPTION = """\
Publish versions of a policy's weights as small deltas through any storage, and look at what was published.

  deltafmt create s3://bucket/run --from ./checkpoint    version 0 from a safetensors directory
  deltafmt publish s3://bucket/run ./checkpoint-200      what changed, as the next version
  deltafmt log s3://bucket/run                           the versions, their bytes and ways
  deltafmt watch s3://bucket/run                         each new version, as it is published
  deltafmt show s3://bucket/run 12                       one version: chunks, ways, most changed tensors
  deltafmt diff s3://bucket/run 10 12                    which tensors differ, and how much
  deltafmt verify s3://bucket/run                        find and name each damaged object
  deltafmt gc s3://bucket/run --keep-last 20             what can be removed; --apply removes it
  deltafmt dump s3://bucket/run versions/00000000000000000012.dfm
  deltafmt squash s3://bucket/run 10 12                  one way over a run of deltas, for receivers far behind
  deltafmt anchor s3://bucket/run 12                     all of one version, so that readers and gc can start there
  deltafmt export s3://bucket/run latest ./v12           ordinary safetensors again
  deltafmt cat s3://bucket/run model.norm.weight         one tensor
  deltafmt demo                                          train, publish, follow: all of it, here, in a minute

A URL is a local path or anything that fsspec opens (s3://, gs://, memory://, ...)."""

_EPILOG = """\
exit codes:
  0  fine
  1  damage was found: an object or a tensor is not what it should be
  2  the request cannot be served as it stands: usage, no such version, another schema, another writer was first
  3  the storage could not be reached, or failed

`deltafmt VERB --help` shows each verb with examples. Every verb takes --json."""


def _common() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    common.add_argument(
        "--quiet", action="store_true", help="show no progress on stderr, nor that kernels are compiled"
    )
    common.add_argument(
        "--storage-option",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="an option for the storage's fsspec driver; VALUE may be JSON (may be given again)",
    )
    common.add_argument(
        "--trust",
        metavar="FILE",
        action="append",
        default=[],
        help="take only versions signed with this key: Ed25519 in PEM, or a secret in hex digits (may be given again)",
    )
    return common


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser = argparse.ArgumentParser(
        prog="deltafmt",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"deltafmt {deltafmt.__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    common = _common()
    for verb in VERBS:
        verb.add(verbs, common)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code (`SystemExit` for usage errors and --help, as argparse does)."""
    parser = build_parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help(sys.stderr)
        return USAGE
    options = parser.parse_args(arguments)
    if options.quiet:
        logging.getLogger("deltafmt.kernels").setLevel(logging.ERROR)
    out = Output(json=options.json, quiet=options.quiet)
    try:
        code: int = options.run(options, out)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough; the interpreter must not try to flush it once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except Exception as error:  # noqa: BLE001 (what `report` does not expect, it raises again)
        return report(error, out)
    return code
