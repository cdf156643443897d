"""A24: tiny inputs that ask for huge allocations end in a typed error, with little memory used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = {
    "a frame that claims 7 * 10^18 bytes": "zstd-size",
    "64 MiB of zeros for 100 bytes": "zstd-size",
    "an array of 2^31 - 1": "msgpack-invalid",
    "a map of 2^31 - 1": "msgpack-invalid",
    "a string of 2^31 - 1": "msgpack-invalid",
    "100,000 deep": "msgpack-invalid",
    "arrays that each announce all": "msgpack-invalid",
    "a body of 2^62 bytes": "truncated",
    "a footer at 2^62": "footer-offset",
    "three million tensors": "table-too-large",
    "two million boxes": "table-too-large",
    "half a gibibyte of names": "table-too-large",
}


@pytest.mark.skipif(sys.platform != "linux", reason="address space and peak memory are read from /proc")
def test_bombs_under_a_limit_of_address_space() -> None:
    command = [sys.executable, "-m", "tests.cases.bombs"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    outcome = json.loads(done.stdout)
    index = json.loads((ROOT / "spec" / "vectors" / "index.json").read_text())
    vectors = {f"vector {v['name']}": v["error"] for v in index["bad"] if "version" in v}
    assert {name: found["kind"] for name, found in outcome.items()} == EXPECTED | vectors
    for name in EXPECTED:
        assert outcome[name]["class"] == "FormatError", name
    assert {name for name, found in outcome.items() if found["peak_bytes"] > 64 << 20} == set()
