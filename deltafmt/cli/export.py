"""`deltafmt export`: a version as ordinary safetensors."""

from __future__ import annotations

import argparse
from pathlib import Path

from deltafmt.cli.arguments import (
    Verbs,
    add_url,
    add_verb,
    open_lineage,
    resolve_version,
    version_argument,
)
from deltafmt.cli.failures import FINE, UsageError
from deltafmt.cli.output import Output, bytes_text

_EXAMPLES = """\
  deltafmt export s3://bucket/run 12 ./v12
  deltafmt export ./run latest ./newest

The directory then holds safetensors shards with their index, and the side files that were published with them:
`transformers.AutoModelForCausalLM.from_pretrained("./v12")` loads it."""


def add(verbs: Verbs, common: argparse.ArgumentParser) -> None:
    parser = add_verb(verbs, common, "export", "write a version as a safetensors directory", _EXAMPLES)
    add_url(parser)
    parser.add_argument("version", metavar="VERSION", type=version_argument, help="a number, or latest")
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write; made if absent")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, out: Output) -> int:
    folder: Path = options.directory
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty", "name a new directory")
    lineage = open_lineage(options)
    version = resolve_version(lineage, options.version)
    with out.bytes_progress(f"exporting version {version}") as progress:
        written = lineage.export(version, folder, progress=progress)
    files = {file.relative_to(folder).as_posix(): file.stat().st_size for file in written}
    result = {"version": version, "directory": str(folder), "files": files}
    total = bytes_text(sum(files.values()))
    out.give(result, lambda _: [f"version {version}: {len(files)} file(s), {total} in {folder}"])
    return FINE
