from __future__ import annotations

import subprocess
import sys

import pytest

from deltafmt.cli.main import VERBS
from tests.cli_help import run

HEAVY = ("torch", "numba", "pyarrow", "numpy", "safetensors", "fsspec", "tqdm")


def test_help_loads_nothing_heavy() -> None:
    code = f"""
import sys
from deltafmt.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.splitlines()[-1] == "[]"


def test_module_and_script_are_one() -> None:
    printed = subprocess.check_output([sys.executable, "-m", "deltafmt", "--version"], text=True)
    assert printed.startswith("deltafmt ")


@pytest.mark.parametrize("verb", [module.__name__.rsplit(".", 1)[-1] for module in VERBS])
def test_each_verb_teaches_by_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, verb, "--help")
    assert "examples:" in text
    assert f"deltafmt {verb}" in text
    assert "--json" in text


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["no-such-verb"],
        ["show", "x", "twelve"],
        ["create", "x"],
        ["create", "x", "--from", "a", "--schema", "b"],
        ["log"],
        ["demo", "--versions", "1"],
        ["demo", "memory://x"],
        ["dump", "x.dfm", "--column", "gap"],
        ["log", "x", "--storage-option", "no-value"],
    ],
)
def test_usage_errors_end_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, *arguments, code=2)
