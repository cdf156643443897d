"""`deltafmt cat`: one tensor, or one side file, of a version."""

from __future__ import annotations

import argparse
import sys
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
from deltafmt.cli.output import Output

_EXAMPLES = """\
  deltafmt cat s3://bucket/run model.norm.weight                  values, cut to what fits a screen
  deltafmt cat s3://bucket/run model.norm.weight --at 12          as of version 12
  deltafmt cat ./run model.norm.weight --raw > norm.bin           bytes: little-endian, row-major
  deltafmt cat ./run config.json                                  a side file, as it is"""


def add(verbs: Verbs, common: argparse.ArgumentParser) -> None:
    parser = add_verb(verbs, common, "cat", "print one tensor or side file", _EXAMPLES)
    add_url(parser)
    parser.add_argument("name", metavar="NAME", help="a tensor's name, or a side file's")
    parser.add_argument(
        "--at",
        dest="version",
        default=LATEST,
        type=version_argument,
        metavar="VERSION",
        help="default: latest",
    )
    parser.add_argument("--raw", action="store_true", help="the tensor's bytes instead of text")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, out: Output) -> int:
    lineage = open_lineage(options)
    version = resolve_version(lineage, options.version)
    name = options.name
    files = lineage.manifest(version).files
    if name not in lineage.schema(version) and name in files:
        data = lineage.files(version)[name]
        if out.json:
            out.document({"version": version, "file": name, "bytes": len(data), "hex": data.hex()})
        else:
            sys.stdout.buffer.write(data)
        return FINE
    with out.working(f"reading {name}"):
        tensor = lineage.read(version, [name])[name]
    if options.raw:
        from deltafmt.tensors import numpy_bits

        sys.stdout.buffer.write(numpy_bits(tensor.contiguous()).tobytes())
        return FINE
    out.give(_facts(version, name, tensor), lambda data: _render(data, tensor))
    return FINE


def _facts(version: int, name: str, tensor: Any) -> dict[str, Any]:
    from deltafmt.tensors import dtype_name

    values = tensor.float() if tensor.dtype.itemsize == 1 and tensor.is_floating_point() else tensor
    return {
        "version": version,
        "tensor": name,
        "dtype": dtype_name(tensor),
        "shape": list(tensor.shape),
        "values": str(values.tolist()) if tensor.is_complex() else values.tolist(),
    }


def _render(data: dict[str, Any], tensor: Any) -> list[str]:
    shape = "x".join(map(str, data["shape"])) or "scalar"
    return [f"{data['tensor']}  {data['dtype']} {shape}, version {data['version']}", str(tensor)]
