"""`deltafmt diff`: which tensors differ between two versions."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from deltafmt.cli.arguments import (
    Verbs,
    add_url,
    add_verb,
    open_lineage,
    resolve_version,
    version_argument,
)
from deltafmt.cli.failures import FINE
from deltafmt.cli.output import Output, count_text, share_text, table

_EXAMPLES = """\
  deltafmt diff s3://bucket/run 11 12            tensors that differ, most changed first
  deltafmt diff s3://bucket/run 0 latest --top 20
  deltafmt diff ./run 3 4 --json

Bits are compared, not values: +0 and -0 differ, and equal NaNs do not."""


def add(verbs: Verbs, common: argparse.ArgumentParser) -> None:
    parser = add_verb(verbs, common, "diff", "compare two versions, bit by bit", _EXAMPLES)
    add_url(parser)
    parser.add_argument("first", metavar="A", type=version_argument, help="a version, or latest")
    parser.add_argument("second", metavar="B", type=version_argument, help="a version, or latest")
    parser.add_argument("--top", type=int, metavar="N", help="show only the N most changed tensors")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, out: Output) -> int:
    lineage = open_lineage(options)
    a, b = (resolve_version(lineage, version) for version in (options.first, options.second))
    first, second = lineage.schema(a), lineage.schema(b)
    digests_a, digests_b = _digests(lineage, a), _digests(lineage, b)
    differ, tensors = [], []
    for spec in second:
        if spec.name not in first:
            tensors.append(_entry(spec, "added"))
        elif (first[spec.name].dtype, first[spec.name].shape) != (spec.dtype, spec.shape):
            tensors.append(_entry(spec, "retyped"))
        elif digests_a[spec.name] != digests_b[spec.name]:
            differ.append(spec)
    tensors += [_entry(spec, "removed") for spec in first if spec.name not in second]
    with out.progress("comparing", sum(spec.nbytes for spec in differ)) as advance:
        tensors += _compare(lineage, a, b, differ, advance)
    tensors.sort(key=lambda t: (t["change"] == "changed", -(t["changed"] or 0)))
    result = {
        "a": a,
        "b": b,
        "changed": sum(t["changed"] or 0 for t in tensors if t["alias_of"] is None),
        "elements": second.elements,
        "equal_tensors": len(second) - sum(t["change"] != "removed" for t in tensors),
        "tensors": tensors if options.top is None else tensors[: options.top],
    }
    out.give(result, lambda data: _render(data, len(tensors)))
    return FINE


def _digests(lineage: Any, version: int) -> dict[str, tuple[int, int]]:
    """Content digest of each tensor: equal bits have equal ones, so only the others need be read."""
    table_ = lineage.manifest(version).tensors
    lanes = zip(table_.digest0.tolist(), table_.digest1.tolist(), strict=True)
    return dict(zip(lineage.schema(version).names, lanes, strict=True))


def _entry(spec: Any, change: str, changed: int | None = None) -> dict[str, Any]:
    return {
        "name": spec.name,
        "change": change,
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "alias_of": spec.alias_of,
        "changed": changed,
        "elements": spec.volume,
    }


def _compare(lineage: Any, a: int, b: int, specs: list[Any], advance: Any) -> Iterator[dict[str, Any]]:
    if not specs:
        return
    from deltafmt.tensors import bits

    names = [spec.name for spec in specs]
    pairs = zip(specs, lineage.iter_read(a, names), lineage.iter_read(b, names), strict=True)
    for spec, (_, old), (_, new) in pairs:
        yield _entry(spec, "changed", int((bits(old) != bits(new)).sum()))
        advance(spec.nbytes)


def _render(data: dict[str, Any], total: int) -> Iterator[str]:
    yield (
        f"versions {data['a']} and {data['b']}: {count_text(data['changed'])} elements differ "
        f"({share_text(data['changed'], data['elements'])}) in {total} tensors; "
        f"{data['equal_tensors']} tensors are equal"
    )
    if data["tensors"]:
        yield ""
        yield from table(
            ("tensor", "change", "elements", "share", "dtype", "shape"),
            (
                (
                    t["name"],
                    t["change"],
                    count_text(t["changed"]),
                    share_text(t["changed"], t["elements"]),
                    t["dtype"],
                    "x".join(map(str, t["shape"])) or "scalar",
                )
                for t in data["tensors"]
            ),
            left=["tensor", "change", "dtype", "shape"],
        )
    if len(data["tensors"]) < total:
        yield f"... {total - len(data['tensors'])} more tensors (without --top all are shown)"
