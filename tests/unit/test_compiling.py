"""Kernels that are not compiled yet: somebody waits, and is told; and where they are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

USE = """
from deltafmt.kernels import compiling
compiling.SILENT_SECONDS = 0.0
from deltafmt.kernels.digest import multipliers
multipliers()
"""


def run(code: str, **variables: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {key: str(value) for key, value in variables.items()}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_whoever_waits_for_the_first_time_is_told_once(tmp_path: Path) -> None:
    first = run(USE, NUMBA_CACHE_DIR=tmp_path).stderr
    assert first.count("compiling the kernels") == 1
    assert f"only once on this machine, they are kept in {tmp_path}" in first
    assert run(USE, NUMBA_CACHE_DIR=tmp_path).stderr == ""


def test_other_peoples_kernels_are_not_our_business(tmp_path: Path) -> None:
    code = """
import numba
from deltafmt.kernels import compiling
compiling.SILENT_SECONDS = 0.0
numba.njit(lambda x: x + 1)(3)
"""
    assert run(code, NUMBA_CACHE_DIR=tmp_path).stderr == ""


def test_a_machine_without_a_place_for_compiled_kernels() -> None:
    """As in a container whose file system is read-only: numba finds no place, and refuses to cache at all."""
    code = f"""
from numba import config
from numba.core import caching
caching.CacheImpl._locator_classes = [caching.UserProvidedCacheLocator]
config.CACHE_DIR = ""  # which is asked first, and of which there is none
{USE}
print(config.CACHE_DIR)
"""
    done = run(code)
    assert "set NUMBA_CACHE_DIR" in done.stderr
    folder = Path(done.stdout.strip())
    assert folder.name.startswith("deltafmt-kernels-")
    assert not folder.exists(), "it goes with the process"
