"""The second reader and the conformance runner as commands: what they print, and how they exit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import deltafmt
from deltafmt.tensors import numpy_bits
from tests.conformance.reference import ROOT

VECTORS = ROOT / "spec" / "vectors"
REFDUMP = f"{sys.executable} tools/refdump.py"


def run(script: str, *arguments: object, code: int) -> Any:
    words = [sys.executable, str(ROOT / "tools" / script), *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if done.stdout else None


def test_refdump_shows_an_object() -> None:
    found = run("refdump.py", VECTORS / "good" / "side-files" / "versions" / f"{0:020d}.dfm", code=0)
    assert found["kind"] == "version"
    assert set(found["files"]) == {"config.json", "tokenizer/vocab.txt"}


def test_refdump_names_what_is_wrong() -> None:
    found = run("refdump.py", VECTORS / "bad" / "magic" / "lineage.dfm", code=1)
    assert found["error"] == "magic-wrong"


def test_refdump_without_a_file() -> None:
    assert run("refdump.py", "no/such/file", code=2) is None


def test_refdump_writes_safetensors(tmp_path: Path) -> None:
    root, out = VECTORS / "good" / "further-ways", tmp_path / "out.safetensors"
    run("refdump.py", root, "--version", 3, "--way", "1", "--out", out, code=0)
    expected = deltafmt.open(str(root)).read(3)
    found = load_file(out)
    assert {name: numpy_bits(tensor).tobytes() for name, tensor in found.items()} == {
        name: numpy_bits(tensor).tobytes() for name, tensor in expected.items()
    }


def test_conform_agrees_with_a_reader_that_conforms() -> None:
    reader, rebuild = f"{REFDUMP} {{object}}", f"{REFDUMP} {{root}} --version {{version}}"
    arguments = ("--reader", reader, "--rebuild", rebuild, "--only", "trailing", "--json")
    found = run("conform.py", *arguments, code=0)
    assert found["agree"] >= 2
    assert (found["differ"], found["not_run"]) == ([], 0)


def test_conform_reports_a_reader_that_does_not() -> None:
    reader = f"{sys.executable} -c 'print(\"[]\")'"
    found = run("conform.py", "--reader", reader, "--only", "trailing", "--json", code=1)
    assert found["agree"] == 0
    assert all("does not fit" in problem["differs"] for problem in found["differ"])


def test_conform_needs_a_reader() -> None:
    assert run("conform.py", code=2) is None
