"""Run a benchmark and print its table: `python -m tools.bench whole`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from tools.bench import chain, codec, detect, plan, storage, whole

Bench = tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], dict[str, Any]], Any]

BENCHES: dict[str, Bench] = {
    "codec": (codec.add, codec.run, codec.render),
    "whole": (whole.add, whole.run, whole.render),
    "plan": (plan.add, plan.run, plan.render),
    "detect": (detect.add, detect.run, detect.render),
    "storage": (storage.add, storage.run, storage.render),
    "chain": (chain.add, chain.run, chain.render),
}
"""Name -> (declare arguments, measure, lines of text)."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description="Measure on this machine. Ratios within one run travel to other machines, times do not.",
    )
    benches = parser.add_subparsers(metavar="BENCH", required=True)
    for name, (add, run, render) in BENCHES.items():
        doc = (sys.modules[run.__module__].__doc__ or "").splitlines()[0]
        sub = benches.add_parser(name, help=doc, description=doc)
        sub.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
        add(sub)
        sub.set_defaults(run=run, render=render)
    options = parser.parse_args(arguments)
    result = options.run(options)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print("\n".join(options.render(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
