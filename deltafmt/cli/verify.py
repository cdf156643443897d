"""`deltafmt verify`: find damage, name it, and say what it takes down."""

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
from deltafmt.cli.failures import DAMAGE, FINE
from deltafmt.cli.output import Output, bytes_text
from deltafmt.format.keys import FILES

_EXAMPLES = """\
  deltafmt verify s3://bucket/run               everything: all objects, all checksums, all digests
  deltafmt verify s3://bucket/run 12            what version 12 needs
  deltafmt verify s3://bucket/run --shallow     only that objects are there, whole and consistent; no weights read

Exit code 1 says that damage was found."""


def add(verbs: Verbs, common: argparse.ArgumentParser) -> None:
    parser = add_verb(verbs, common, "verify", "find damaged objects and say what they take down", _EXAMPLES)
    add_url(parser)
    parser.add_argument("version", metavar="VERSION", nargs="?", type=version_argument, help="default: all")
    parser.add_argument("--shallow", action="store_true", help="do not read the weights")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, out: Output) -> int:
    # A descriptor that is damaged is a finding like any other.
    lineage = open_lineage(options, damaged=True)
    version = None if options.version is None else resolve_version(lineage, options.version)
    with out.bytes_progress("verifying") as progress:
        report = lineage.verify(version, deep=not options.shallow, progress=progress)
    problems = [_problem(problem) for problem in report.problems]
    lost = sorted({version for problem in problems for version in problem["versions"]})
    out.give(
        {"ok": report.ok, "checked_bytes": report.checked_bytes, "problems": problems, "versions_lost": lost},
        _render,
    )
    return FINE if report.ok else DAMAGE


def _problem(problem: Any) -> dict[str, Any]:
    return {
        "object": problem.key,
        "kind": problem.kind,
        "message": problem.message,
        "versions": list(problem.versions),
    }


def _spared(key: str) -> str:
    if key.startswith(f"{FILES}/"):
        return "no weights; but these versions cannot be exported"
    return "no version (another way leads to each)"


def _render(data: dict[str, Any]) -> Iterator[str]:
    if data["ok"]:
        yield f"no damage found ({bytes_text(data['checked_bytes'])} of shards read)"
        return
    for problem in data["problems"]:
        yield f"{problem['object']}  [{problem['kind']}]"
        yield f"  {problem['message']}"
        takes = ranges_text(problem["versions"])
        yield f"  takes down: {f'version {takes}' if takes else _spared(problem['object'])}"
    lost = ranges_text(data["versions_lost"])
    yield ""
    yield f"{len(data['problems'])} problem(s); versions lost: {lost or 'none'}"
    yield "next: put the objects back from a copy, or publish an anchor: later versions then do not need them"


def ranges_text(numbers: list[int]) -> str:
    """Numbers with their runs drawn together.

    >>> ranges_text([3, 4, 5, 9]), ranges_text([])
    ('3-5, 9', '')
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
