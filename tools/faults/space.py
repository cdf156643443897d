"""A disk that fills up under a writer, and has room again."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import deltafmt
from deltafmt.errors import DeltafmtError
from deltafmt.testing.strategies import same
from tools.faults.world import Tally, first_tensors, moved

_DISK_BYTES = 1 << 20
_PAGE_BYTES = 4096
_VERSIONS = 12


def possible() -> bool:
    """Whether a small disk can be had here."""
    return sys.platform == "linux" and os.geteuid() == 0 and shutil.which("mount") is not None


def campaign(tally: Tally, *, seed: int) -> Iterator[Tally]:
    """Publish on a tmpfs with less and less room left, make room, and go on; yields after each version."""
    if not possible():
        tally.notes.append("no small disk can be mounted here: this part did not run")
        return
    with tempfile.TemporaryDirectory(prefix="deltafmt-faults-") as folder:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", folder]
        subprocess.run(mount, check=True)
        try:
            yield from _fill(Path(folder), tally, seed)
        finally:
            subprocess.run(["umount", folder], check=True)


def _fill(folder: Path, tally: Tally, seed: int) -> Iterator[Tally]:
    root, ballast = str(folder / "run"), folder / "ballast"
    versions = [first_tensors(seed)]
    with deltafmt.Writer(root, options=deltafmt.WriterOptions(domain_elements=4096)) as writer:
        writer.publish_anchor(versions[0])
        for number in range(1, _VERSIONS):
            tensors = moved(versions[-1], seed + number)
            # A publish takes two pages, one for the shard and one for the manifest.
            leave = number % 4
            _take(ballast, leave=leave)
            try:
                writer.publish(tensors)
            except (DeltafmtError, OSError) as error:
                tally.faults += 1
                if not _is_full(error):
                    tally.fail("untyped", f"no word of a full disk in {error!r}")
                _unchanged(root, number - 1, tally)
                ballast.unlink()
                writer.publish(tensors)
            else:
                ballast.unlink()
            versions.append(tensors)
            tally.rounds += 1
            tally.acknowledged = number + 1
            for version, wanted in enumerate(versions):
                if not same(deltafmt.open(root).read(version), wanted):
                    tally.fail("wrong_bits", f"version {version}, with {leave} pages left")
            yield tally


def _take(ballast: Path, *, leave: int) -> None:
    """Fill the disk up to so many pages."""
    file = os.open(ballast, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(file, bytes(_PAGE_BYTES))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.ftruncate(file, max(0, os.fstat(file).st_size - leave * _PAGE_BYTES))
    finally:
        os.close(file)


def _is_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return True
        error = error.__cause__ or error.__context__
    return False


def _unchanged(root: str, newest: int, tally: Tally) -> None:
    found = deltafmt.open(root).latest()
    if found != newest:
        tally.fail("wrong_bits", f"the newest version is {found} after a publish that failed")
