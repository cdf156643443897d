"""`deltafmt dump`: what stands in any object, down to columns and bytes."""

from __future__ import annotations

import argparse
from pathlib import Path

from deltafmt.cli.arguments import Verbs, add_verb, storage_options
from deltafmt.cli.failures import FINE, UsageError
from deltafmt.cli.output import Output
from deltafmt.cli.targets import find_target

_EXAMPLES = """\
  deltafmt dump ./run/lineage.dfm                        a metadata object: all fields, tables cut to 16 rows
  deltafmt dump s3://bucket/run versions/00000000000000000003.dfm --all
  deltafmt dump ./run/data/.../00000.dfs                 a shard: its footer and chunks, without any other object
  deltafmt dump ./run/data/.../00000.dfs --chunk 5       one chunk: columns, checksums, the first elements
  deltafmt dump ./run/data/.../00000.dfs --chunk 5 --column gap --hex
  deltafmt dump ./run/data/.../00000.dfs --chunk 5 --column gap --hex --stored
  deltafmt dump ./run/lineage.dfm --hex                  the object's bytes

A manifest takes --chunk as well; it then reads the chunk from its shard."""


def add(verbs: Verbs, common: argparse.ArgumentParser) -> None:
    parser = add_verb(verbs, common, "dump", "show what stands in an object", _EXAMPLES)
    parser.add_argument("target", metavar="OBJECT", help="path or URL of an object; with KEY, of the root")
    parser.add_argument("key", metavar="KEY", nargs="?", help="the object's name below the root")
    parser.add_argument("--chunk", type=int, metavar="N", help="one chunk of a shard or manifest, by its row")
    parser.add_argument(
        "--column", metavar="NAME", help="one column of the chunk: gap, low, block, code, ..., b0"
    )
    parser.add_argument("--hex", action="store_true", help="bytes in hex: of the object, or of the column")
    parser.add_argument(
        "--stored", action="store_true", help="with --hex: the column as stored, not as decoded"
    )
    parser.add_argument(
        "--rows", type=int, default=16, metavar="N", help="rows of a table to show (default: 16)"
    )
    parser.add_argument("--all", action="store_true", help="all rows, all bytes")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, out: Output) -> int:
    from deltafmt.cli import dump_chunk, dump_object
    from deltafmt.store import open_store

    if options.column is not None and options.chunk is None:
        raise UsageError("--column needs a chunk", "add --chunk N; without it, dump lists the chunks")
    if options.key is None and Path(options.target).is_dir():
        raise UsageError(
            f"{options.target} is a folder", "name an object in it: deltafmt dump URL versions/....dfm"
        )
    target = find_target(options.target, options.key)
    source = dump_object.Source(store=open_store(target.root, storage_options(options)), target=target)
    limit = None if options.all else options.rows
    if options.chunk is not None:
        dump_chunk.dump(source, options, out, limit)
    elif options.hex:
        dump_object.dump_hex(source, out, limit)
    else:
        dump_object.dump(source, out, limit)
    return FINE
