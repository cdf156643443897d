#!/usr/bin/env python3
"""Run every check of the project: `python tools/check.py`.

    lint      ruff check
    format    ruff format --check
    types     mypy, strict
    imports   import-linter: which module may import which
    spec      the spec's tables are in step with the code's records
    tests     pytest, on as many processes as there are cores

All steps run, also after a failure; tests come last, so that the last line is the test runner's own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def _script(name: str) -> str:
    """A console script of the running environment, which need not be activated."""
    return str(Path(sysconfig.get_path("scripts")) / name)


def _steps(processes: str) -> dict[str, list[str]]:
    python = sys.executable
    return {
        "lint": [python, "-m", "ruff", "check", "."],
        "format": [python, "-m", "ruff", "format", "--check", "."],
        "types": [python, "-m", "mypy"],
        "imports": [_script("lint-imports"), "--no-cache"],
        "spec": [python, "tools/spec_in_step.py"],
        "tests": [python, "-m", "pytest", "-q", "-n", processes],
    }


def _run(name: str, command: list[str]) -> bool:
    print(f"== {name}: {' '.join(command)}", flush=True)
    began = time.monotonic()
    # import-linter and mypy find the package from the root that they are started in.
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if name != "tests":
        verdict = "ok" if code == 0 else f"FAILED ({code})"
        print(f"== {name}: {verdict} in {time.monotonic() - began:.1f} s", flush=True)
    return code == 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help="run only these (default: all)")
    parser.add_argument("-n", default="auto", metavar="N", help="test processes (default: one per core)")
    options = parser.parse_args(arguments)
    steps = _steps(options.n)
    if unknown := [step for step in options.steps if step not in steps]:
        parser.error(f"no such step: {', '.join(unknown)} (there are: {', '.join(steps)})")
    failed: list[str] = []
    for name, command in steps.items():
        if options.steps and name not in options.steps:
            continue
        if name == "tests" and failed:
            print(f"== failed before the tests: {', '.join(failed)}", flush=True)
        if not _run(name, command):
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
