"""`deltafmt gc`: say which old versions and leftovers can go, and remove them when asked to."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from deltafmt.cli.arguments import Verbs, add_url, add_verb, open_lineage
from deltafmt.cli.failures import DAMAGE, FINE
from deltafmt.cli.output import Output, bytes_text, table

if TYPE_CHECKING:
    from deltafmt.write.gc import GcPlan

_EXAMPLES = """\
  deltafmt gc s3://bucket/run --keep-last 20                 what would be removed; nothing is
  deltafmt gc s3://bucket/run --keep-last 20 --list          the same, with every object
  deltafmt gc s3://bucket/run --keep-last 20 --apply         remove it
  deltafmt gc s3://bucket/run --keep-last 20 --apply --json  for a cron job

Versions stay that readers hold a lease on, and so do older ones from which the kept ones start: a lineage
without a newer anchor cannot be cut. It may run beside trainers and engines, be interrupted, and run again.
Leftovers (failed attempts, shards without a manifest) go when they are older than --grace; let that be longer
than the longest publish takes."""

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def add(verbs: Verbs, common: argparse.ArgumentParser) -> None:
    parser = add_verb(
        verbs, common, "gc", "show, or remove, versions and leftovers that are not needed", _EXAMPLES
    )
    add_url(parser)
    parser.add_argument(
        "--keep-last", metavar="N", type=_count, required=True, help="the newest N versions stay readable"
    )
    parser.add_argument(
        "--grace",
        metavar="TIME",
        type=duration,
        default=86_400.0,
        help="leave leftovers alone that are younger, such as 90s, 30m, 12h, 2d (default: 1d)",
    )
    parser.add_argument("--apply", action="store_true", help="remove; without it, only say what would be")
    parser.add_argument("--list", action="store_true", help="name every object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, out: Output) -> int:
    lineage = open_lineage(options)
    with out.progress("removing", None, unit=" objects") as advance:
        seen = 0

        def report(done: int, _total: int) -> None:
            nonlocal seen
            advance(done - seen)
            seen = done

        plan = lineage.gc(
            keep_last=options.keep_last,
            grace_seconds=options.grace,
            dry_run=not options.apply,
            progress=report,
        )
    result = _result(plan, names=options.list or out.json)
    out.give(result, _render)
    if not options.apply and plan.removals:
        out.note("nothing was removed: this was a dry run; --apply removes")
    return DAMAGE if plan.damaged else FINE


def _result(plan: GcPlan, *, names: bool) -> dict[str, Any]:
    from deltafmt.write.garbage import REASONS

    sizes = dict.fromkeys(REASONS, 0)
    for removal in plan.removals:
        sizes[removal.reason] += removal.size
    result: dict[str, Any] = {
        "applied": plan.applied,
        "newest": plan.newest,
        "floor": plan.floor,
        "floor_before": plan.floor_before,
        "oldest": plan.oldest,
        "blocked": plan.blocked,
        "damaged": [{"object": found.key, "problem": found.why} for found in plan.damaged],
        "leases": [
            {"lease": lease.reader, "start": lease.start, "seconds_left": round(lease.seconds_left)}
            for lease in plan.leases
        ],
        "objects": len(plan.removals),
        "bytes": plan.nbytes,
        "reasons": [
            {"reason": reason, "objects": count, "bytes": sizes[reason], "what": REASONS[reason]}
            for reason, count in plan.counts.items()
        ],
    }
    if names:
        result["removals"] = [
            {"object": removal.key, "bytes": removal.size, "reason": removal.reason}
            for removal in plan.removals
        ]
    return result


def _render(data: dict[str, Any]) -> Iterator[str]:
    if data["newest"] is None:
        yield "the lineage has no version yet"
        return
    done = data["applied"]
    yield f"{_versions(data['floor'], data['newest'])} stay{'' if data['floor'] < data['newest'] else 's'}"
    if data["floor"] > data["floor_before"]:
        first, last = data["floor_before"], data["floor"] - 1
        verb = (
            ("was" if first == last else "were") + " removed" if done else "goes" if first == last else "go"
        )
        yield f"{_versions(first, last)} {verb}"
    if data["blocked"]:
        yield f"note: {data['blocked']}"
    if data["damaged"]:
        yield "damaged, so that all that they may name stays (`deltafmt verify` says what depends on them):"
        yield from (f"  {found['object']}: {found['problem']}" for found in data["damaged"])
    if data["oldest"] < data["floor"]:
        yield f"readers at work hold back the objects from version {data['oldest']} on:"
        for lease in data["leases"]:
            yield f"  {lease['lease']} from version {lease['start']}, {lease['seconds_left']} s left"
    yield ""
    rows = [
        [row["reason"], f"{row['objects']:,}", bytes_text(row["bytes"]), row["what"]]
        for row in data["reasons"]
    ]
    if rows:
        yield from table(("why", "objects", "bytes", ""), rows, left=("why", ""))
    for removal in data.get("removals", ()):
        yield f"  {removal['object']}  [{removal['reason']}, {removal['bytes']:,} bytes]"
    verb = "removed" if done else "to be removed"
    yield f"{data['objects']:,} objects, {bytes_text(data['bytes'])} {verb}"


def _versions(first: int, last: int) -> str:
    return f"version {first}" if first == last else f"versions {first} to {last}"


def duration(text: str) -> float:
    """Seconds of a time such as `90`, `90s`, `30m`, `12h` or `2d`.

    >>> duration("90"), duration("1.5h")
    (90.0, 5400.0)
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write 90s, 30m, 12h or 2d")
    return float(match[1]) * _UNITS[match[2]]


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of versions to keep: at least 1")
    return int(text)
