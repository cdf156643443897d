"""`deltafmt show`: one version, or the lineage as a whole."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from deltafmt.cli.arguments import (
    LATEST,
    Verbs,
    add_url,
    add_verb,
    open_lineage,
    resolve_version,
    version_argument,
)
from deltafmt.cli.failures import FINE
from deltafmt.cli.log import way_text
from deltafmt.cli.output import Output, bytes_text, count_text, saving_text, share_text, table, time_text

_EXAMPLES = """\
  deltafmt show s3://bucket/run                the newest version
  deltafmt show s3://bucket/run 12             version 12: labels, ways, what its chunks are made of
  deltafmt show s3://bucket/run 12 --tensors   its tensors too: dtype, shape, content digest
  deltafmt show ./run --json"""


def add(verbs: Verbs, common: argparse.ArgumentParser) -> None:
    parser = add_verb(verbs, common, "show", "show one version: labels, ways, chunks, tensors", _EXAMPLES)
    add_url(parser)
    parser.add_argument(
        "version", metavar="VERSION", nargs="?", default=LATEST, type=version_argument, help="default: latest"
    )
    parser.add_argument("--tensors", action="store_true", help="list the tensors")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, out: Output) -> int:
    lineage = open_lineage(options)
    version = resolve_version(lineage, options.version)
    manifest, schema = lineage.manifest(version), lineage.schema(version)
    info = lineage.info(version)
    result: dict[str, Any] = {
        "lineage": manifest.lineage.hex(),
        "version": version,
        "base": manifest.base,
        "step": info.step,
        "created": info.created,
        "meta": dict(info.meta),
        "ways": list(info.ways),
        "writers": manifest.writers,
        "signature": _signature(manifest),
        "files": {name: size for name, (_, size) in manifest.files.items()},
        "tensors": len(schema),
        "elements": schema.elements,
        "full_bytes": schema.nbytes,
        "changed": manifest.changed,
        "listed": manifest.listed,
        "stored_bytes": manifest.stored_bytes,
        "chunks": _operations(manifest),
        "columns": _columns(manifest),
    }
    if options.tensors:
        result["tensor_list"] = _tensors(manifest, schema)
    out.give(result, _render)
    return FINE


def _signature(manifest: Any) -> dict[str, str] | None:
    """Which key it says it is signed with; nothing is verified here, `--trust` does that."""
    if manifest.signature is None:
        return None
    algorithm, key_id, _ = manifest.signature
    return {"algorithm": algorithm, "key_id": key_id.hex()}


def _operations(manifest: Any) -> list[dict[str, Any]]:
    """Per operation: chunks, listed elements, stored bytes."""
    import numpy as np

    from deltafmt.format.constants import OPERATIONS

    chunks, columns = manifest.chunks, manifest.columns
    owner = np.repeat(np.arange(len(chunks)), chunks.columns)
    stored = np.bincount(owner, columns.stored, len(chunks))
    result = []
    for number, name in OPERATIONS.items():
        rows = chunks.operation == number
        if rows.any():
            listed, size = int(chunks.listed[rows].sum()), int(stored[rows].sum())
            bits = round(8 * size / listed, 3)
            result.append(
                {
                    "operation": name,
                    "chunks": int(rows.sum()),
                    "listed": listed,
                    "stored_bytes": size,
                    "bits": bits,
                }
            )
    return result


def _columns(manifest: Any) -> list[dict[str, Any]]:
    """Per column: bytes decoded and stored."""
    from deltafmt.format.constants import COLUMNS

    columns = manifest.columns
    result = []
    for number, name in COLUMNS.items():
        rows = columns.column == number
        if rows.any():
            raw, stored = int(columns.raw[rows].sum()), int(columns.stored[rows].sum())
            result.append({"column": name, "raw_bytes": raw, "stored_bytes": stored})
    return result


def _tensors(manifest: Any, schema: Any) -> list[dict[str, Any]]:
    lanes = zip(manifest.tensors.digest0.tolist(), manifest.tensors.digest1.tolist(), strict=True)
    return [
        {
            "name": spec.name,
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "alias_of": spec.alias_of,
            "digest": f"{first:016x}{second:016x}",
        }
        for spec, (first, second) in zip(schema, lanes, strict=True)
    ]


def _render(data: dict[str, Any]) -> Iterator[str]:
    yield f"version {data['version']} of lineage {data['lineage']}"
    yield f"  base     {'none: an anchor' if data['base'] is None else data['base']}"
    yield f"  created  {time_text(data['created'])} by {data['writers']} writer(s)"
    if data["signature"] is not None:
        yield f"  signed   {data['signature']['algorithm']}, key {data['signature']['key_id']}"
    labels = {"step": data["step"]} | data["meta"] if data["step"] is not None else data["meta"]
    if labels:
        yield f"  labels   {', '.join(f'{key}={value}' for key, value in labels.items())}"
    yield f"  ways     {', '.join(map(way_text, data['ways']))}"
    yield (
        f"  model    {count_text(data['tensors'])} tensors, {count_text(data['elements'])} elements, "
        f"{bytes_text(data['full_bytes'])}"
    )
    if data["changed"] is not None:
        yield f"  changed  {count_text(data['changed'])} elements ({share_text(data['changed'], data['elements'])})"
    yield f"  stored   {bytes_text(data['stored_bytes'])}, {saving_text(data['full_bytes'], data['stored_bytes'])} less"
    if data["files"]:
        yield f"  files    {', '.join(f'{name} ({bytes_text(size)})' for name, size in data['files'].items())}"
    if data["chunks"]:
        yield ""
        yield from table(
            ("operation", "chunks", "listed", "stored", "bits/element"),
            (
                (
                    row["operation"],
                    count_text(row["chunks"]),
                    count_text(row["listed"]),
                    bytes_text(row["stored_bytes"]),
                    f"{row['bits']:.2f}",
                )
                for row in data["chunks"]
            ),
            left=["operation"],
        )
        yield ""
        yield from table(
            ("column", "decoded", "stored"),
            (
                (c["column"], bytes_text(c["raw_bytes"]), bytes_text(c["stored_bytes"]))
                for c in data["columns"]
            ),
            left=["column"],
        )
    if "tensor_list" in data:
        yield ""
        yield from table(
            ("tensor", "dtype", "shape", "digest"),
            (
                (
                    t["name"] if t["alias_of"] is None else f"{t['name']} = {t['alias_of']}",
                    t["dtype"],
                    "x".join(map(str, t["shape"])) or "scalar",
                    t["digest"],
                )
                for t in data["tensor_list"]
            ),
            left=["tensor", "dtype", "shape"],
        )
