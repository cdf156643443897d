"""Run the fault campaign: `python -m tools.faults`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

from tqdm import tqdm

from tools.faults import injected, kills, ranks, server, space
from tools.faults.world import Tally

PARTS = ("injected", "kills", "kills-s3", "ranks", "space", "server")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.faults",
        description="Break storage and kill processes, and count what was lost: nothing, or exit code 1.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=(
            "parts:\n"
            "  injected   faults at the k-th call, for all k, over publish, advance, add_anchor, squash and gc\n"
            "  kills      writers, receivers and janitors killed by SIGKILL at random times\n"
            "  kills-s3   the same on an S3 server (needs the test extra)\n"
            "  ranks      jobs of several ranks, one of which is killed, by group and through the root\n"
            "  space      a disk that is full (Linux, as root: a small tmpfs is mounted)\n"
            "  server     an S3 server killed and restarted under a writer (needs the test extra)"
        ),
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="only these (default: all)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="injected: so many seeds")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="injected: one fault of so many")
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="processes to kill")
    parser.add_argument("--server-kills", type=int, default=5, metavar="N", help="times to kill the server")
    parser.add_argument("--only", nargs="*", metavar="OPERATION", help="injected: only these operations")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quiet", action="store_true", help="show no progress on stderr")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"no such part: {', '.join(unknown)} (there are: {', '.join(PARTS)})")
    results = {}
    for part in options.parts or PARTS:
        began = time.monotonic()
        tally = _run(part, options)
        results[part] = dataclasses.asdict(tally) | {"seconds": round(time.monotonic() - began, 1)}
    if options.json:
        print(json.dumps(results, indent=2))
    else:
        for part, result in results.items():
            notes = result.pop("notes")
            print(f"{part}: " + ", ".join(f"{name} {value}" for name, value in result.items()))
            for note in notes:
                print(f"  {note}")
            result["notes"] = notes
    clean = all(
        not (r["lost"] or r["wrong_bits"] or r["unrepaired"] or r["untyped"]) for r in results.values()
    )
    return 0 if clean else 1


def _run(part: str, options: argparse.Namespace) -> Tally:
    tally = Tally()
    work: dict[str, Any] = {
        "injected": lambda: (
            step
            for round_ in range(options.rounds)
            for step in injected.campaign(
                tally,
                seed=options.seed + round_,
                only=set(options.only) if options.only else None,
                every=options.every,
            )
        ),
        "kills": lambda: kills.campaign(tally, seed=options.seed, kills=options.kills),
        "kills-s3": lambda: kills.on_s3(tally, seed=options.seed, kills=options.kills),
        "ranks": lambda: ranks.campaign(tally, seed=options.seed, kills=options.kills),
        "space": lambda: space.campaign(tally, seed=options.seed),
        "server": lambda: server.campaign(tally, seed=options.seed, kills=options.server_kills),
    }
    with tqdm(desc=part, unit="", delay=1.0, leave=False, file=sys.stderr, disable=options.quiet) as bar:
        for _ in work[part]():
            bar.update()
    return tally


if __name__ == "__main__":
    sys.exit(main())
