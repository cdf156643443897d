#!/usr/bin/env python3
"""Hold the tables of spec/ equal to the code's records, constants and reason codes.

spec_in_step.py            exit code 1 and the names of pages that differ
spec_in_step.py --write    bring the pages' tables up to date
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from deltafmt.dtypes import DTYPES
from deltafmt.errors import REASONS
from deltafmt.format import constants
from deltafmt.format.records import RECORDS, TABLES, described
from deltafmt.schema_check import MAX_NAME_BYTES, MAX_RANK

SPEC = Path(__file__).resolve().parent.parent / "spec"
_MARK = re.compile(r"<!-- (fields: (\w+)|\w+) -->\n.*?<!-- end -->", re.DOTALL)


def table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def fields(name: str) -> str:
    rows = [
        (f"`{field}`", wire.removeprefix("<"), doc)
        for field, wire, doc in described((RECORDS | TABLES)[name])
    ]
    return table(("column" if name in TABLES else "field", "type", "meaning"), rows)


def dtypes() -> str:
    rows = [(f"`{d.name}`", d.safetensors, d.width, f"{d.order_id} ({d.order})") for d in DTYPES.values()]
    return table(("dtype", "safetensors", "width", "order"), rows)


def columns() -> str:
    return table(("id", "column"), constants.COLUMNS.items())


def limits() -> str:
    rows = [
        ("bytes of a metadata object", f"{constants.MAX_OBJECT_BYTES:,}"),
        ("items of a metadata body", f"{constants.MAX_ITEMS:,}"),
        (
            "raw bytes of all columns of a metadata object",
            f"{constants.FREE_TABLE_BYTES:,} + {constants.TABLE_RATIO} per byte of the object, at most {constants.MAX_TABLE_BYTES:,}",
        ),
        ("tensors of a schema", f"{constants.MAX_TENSORS:,}"),
        ("bytes of a tensor's name", f"{MAX_NAME_BYTES:,}"),
        ("dimensions of a tensor", MAX_RANK),
        ("elements of a domain", f"{constants.MAX_DOMAIN_ELEMENTS:,}"),
        ("`shift`", f"0 to {constants.MAX_SHIFT}"),
        ("`block`", f"{constants.MIN_BLOCK_LOG2} to {constants.MAX_BLOCK_LOG2}"),
        ("writers", f"1 to {constants.MAX_WRITERS:,}"),
        ("versions", f"0 to {constants.MAX_VERSION - 1:,}"),
        ("seconds of a lease", f"0 to {constants.MAX_LEASE_SECONDS:,}"),
    ]
    return table(("what", "limit"), rows)


def reasons() -> str:
    return table(("code", "stands for"), ((f"`{code}`", text) for code, text in sorted(REASONS.items())))


_TABLES: dict[str, Callable[[], str]] = {
    "dtypes": dtypes,
    "columns": columns,
    "limits": limits,
    "reasons": reasons,
}


def brought_up_to_date(page: str) -> str:
    """The page with every marked table as the code has it."""

    def replace(match: re.Match[str]) -> str:
        mark, name = match[1], match[2]
        body = fields(name) if name else _TABLES[mark]()
        return f"<!-- {mark} -->\n{body}\n<!-- end -->"

    return _MARK.sub(replace, page)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the tables instead of comparing them")
    options = parser.parse_args()
    behind = 0
    marks = set()
    for path in sorted(SPEC.glob("*.md")):
        page = path.read_text()
        marks |= {match[2] or match[1] for match in _MARK.finditer(page)}
        wanted = brought_up_to_date(page)
        if page != wanted and options.write:
            path.write_text(wanted)
        elif page != wanted:
            behind += 1
            print(f"{path.relative_to(SPEC.parent)} is behind the code; run tools/spec_in_step.py --write")
    missing = ({*RECORDS, *TABLES, *_TABLES} - {"way"}) - marks
    for name in sorted(missing):
        print(f"spec/ has no table of {name}")
    return 1 if behind or missing else 0


if __name__ == "__main__":
    sys.exit(main())
