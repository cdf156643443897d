"""`deltafmt create`: begin a lineage."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from deltafmt.cli.arguments import (
    Verbs,
    add_meta,
    add_signing,
    add_url,
    add_verb,
    pairs,
    storage_options,
    writer_options,
)
from deltafmt.cli.failures import FINE
from deltafmt.cli.output import Output, bytes_text

_EXAMPLES = """\
  deltafmt create s3://bucket/run --from ./checkpoint     version 0: all of a safetensors directory
  deltafmt create ./run --from model.safetensors          one file does as well
  deltafmt create ./run --from ./checkpoint --no-data     only the digests: receivers that hold the checkpoint adopt it
  deltafmt create ./run --schema ./checkpoint             no version yet, only names, dtypes and shapes

config.json, tokenizer and other files beside the weights are kept, and `export` puts them out again."""


def add(verbs: Verbs, common: argparse.ArgumentParser) -> None:
    parser = add_verb(verbs, common, "create", "begin a lineage, with a checkpoint as version 0", _EXAMPLES)
    add_url(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--from", dest="source", type=Path, metavar="DIR", help="publish this as version 0")
    source.add_argument("--schema", type=Path, metavar="DIR", help="take only the schema of this checkpoint")
    parser.add_argument("--no-data", action="store_true", help="store digests only, not the weights")
    add_meta(parser)
    add_signing(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, out: Output) -> int:
    import deltafmt
    from deltafmt.cli.checkpoint import read_checkpoint

    given = storage_options(options)
    checkpoint = read_checkpoint(options.source or options.schema)
    lineage = deltafmt.create(options.url, deltafmt.Schema.of(checkpoint.tensors), storage_options=given)
    version = None
    if options.source is not None:
        writer = deltafmt.Writer(options.url, options=writer_options(options), storage_options=given)
        with out.working(f"publishing {bytes_text(checkpoint.nbytes)}"):
            version = writer.publish_anchor(
                checkpoint.tensors,
                step=options.step,
                meta=pairs(options.meta, "--meta"),
                store_data=not options.no_data,
                files=checkpoint.files,
            )
    out.give(summary(lineage, options.url, version), render)
    return FINE


def summary(lineage: Any, url: str, version: int | None) -> dict[str, Any]:
    """What was published, as plain data."""
    schema = lineage.schema(version)
    full_bytes = schema.nbytes
    result: dict[str, Any] = {
        "url": url,
        "version": version,
        "tensors": len(schema),
        "full_bytes": full_bytes,
    }
    if version is not None:
        manifest = lineage.manifest(version)
        result |= {
            "changed": manifest.changed,
            "stored_bytes": manifest.stored_bytes,
            "files": sorted(manifest.files),
        }
    return result


def render(data: dict[str, Any]) -> list[str]:
    model = f"{data['tensors']} tensors, {bytes_text(data['full_bytes'])}"
    if data["version"] is None:
        return [f"{data['url']}: begun for {model}; no version yet"]
    changed = "" if data["changed"] is None else f", {data['changed']:,} elements changed"
    stored = f"{bytes_text(data['stored_bytes'])} stored{changed}"
    files = f", {len(data['files'])} side file(s)" if data["files"] else ""
    return [f"{data['url']}: version {data['version']} ({model}; {stored}{files})"]
