#!/usr/bin/env python3
"""Run the vectors of spec/ against any reader, and report what differs.

    conform.py --reader 'python tools/refdump.py {object}' --rebuild 'python tools/refdump.py {root} --version {version}'

A reader is a command that prints one JSON document. `--reader` gets the path of one object and must refuse bad ones;
`--rebuild` gets the folder of a lineage and a version, and must print {"tensors": [{"name", "blake2b"}, ...]}, the
BLAKE2b-256 of every tensor's bytes. Of good objects whose fields are listed `--reader` must print these, bytes in hex
and columns as lists. What is bad must print {"error": reason code} and exit with 1. Either
option may be left out; its vectors are then not run, and that is said.

Exit codes: 0 all agree, 1 some differ, 2 usage.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

VECTORS = Path(__file__).resolve().parent.parent / "spec" / "vectors"


def run(command: str, **places: object) -> dict[str, Any]:
    """The reader's answer: its JSON, or what went wrong with running it."""
    words = [word.format(**places) for word in shlex.split(command)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    try:
        answer = json.loads(done.stdout)
    except json.JSONDecodeError:
        return {"broken": f"exit code {done.returncode}, no JSON; {done.stderr.strip()[-300:]}"}
    if not isinstance(answer, dict) or done.returncode != ("error" in answer):
        return {"broken": f"exit code {done.returncode} does not fit the answer {str(answer)[:200]}"}
    return answer


def differs(vector: dict[str, Any], answer: dict[str, Any]) -> str | None:
    """In words, how an answer differs from what the vector asks for."""
    if "broken" in answer:
        return str(answer["broken"])
    if "error" in vector:
        found = answer.get("error", "no error")
        return None if found == vector["error"] else f"expected {vector['error']}, found {found}"
    if "error" in answer:
        return f"refused: {answer['error']}"
    if "fields" in vector:
        other = [name for name, value in vector["fields"].items() if answer.get(name, answer) != value]
        return f"fields differ: {', '.join(other)}" if other else None
    found = {tensor["name"]: tensor["blake2b"] for tensor in answer.get("tensors", [])}
    wrong = [
        name for name in {**vector["tensors"], **found} if vector["tensors"].get(name) != found.get(name)
    ]
    return f"tensors differ: {', '.join(map(repr, wrong))}" if wrong else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reader", metavar="COMMAND", help="reads one object: 'COMMAND {object}'")
    parser.add_argument("--rebuild", metavar="COMMAND", help="rebuilds a version: 'COMMAND {root} {version}'")
    parser.add_argument("--vectors", type=Path, default=VECTORS, metavar="DIR", help="folder with index.json")
    parser.add_argument("--only", metavar="TEXT", help="only vectors whose name contains this")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    options = parser.parse_args()
    if not options.reader and not options.rebuild:
        parser.error("give --reader, --rebuild or both")
    try:
        index = json.loads((options.vectors / "index.json").read_text())
    except OSError as error:
        parser.error(f"no vectors: {error}")
    vectors = [v for v in index["good"] + index["bad"] if not options.only or options.only in v["name"]]

    def look(vector: dict[str, Any]) -> str | None:
        root = options.vectors / vector["root"]
        if "object" in vector:
            return differs(vector, run(options.reader, object=root / vector["object"]))
        return differs(vector, run(options.rebuild, root=root, version=vector["version"]))

    chosen = [v for v in vectors if (options.reader if "object" in v else options.rebuild)]
    with ThreadPoolExecutor() as pool:
        outcome = list(zip(chosen, pool.map(look, chosen), strict=True))
    problems = [
        {"name": v["name"], "version": v.get("version"), "what": v["what"], "differs": text}
        for v, text in outcome
        if text
    ]
    result = {"agree": len(chosen) - len(problems), "differ": problems, "not_run": len(vectors) - len(chosen)}
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        for problem in problems:
            print(f"{problem['name']} ({problem['what']}): {problem['differs']}")
        print(f"{result['agree']} agree, {len(problems)} differ, {result['not_run']} not run")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
