"""Where compiled kernels are kept, and a word to whoever waits for them to be compiled."""

from __future__ import annotations

import atexit
import logging
import shutil
import tempfile
import time
from typing import Any

from numba import config, njit
from numba.core import event

SILENT_SECONDS = 1.0
"""Compiling that takes no longer than this is not worth a word."""

_LOG = logging.getLogger("deltafmt.kernels")


class Notice(event.Listener):  # type: ignore[misc]
    """Says once in a process that kernels are being compiled, when that begins to be felt.

    numba compiles under one lock, so that events of several threads do not mix, and tells nothing of kernels that
    it finds compiled. Other people's kernels do not count.
    """

    def __init__(self) -> None:
        self._spent = 0.0
        self._told = False
        self._depth = 0
        self._began = 0.0
        self._outer: Any = None

    def on_start(self, found: Any) -> None:
        now = time.monotonic()
        if self._depth == 0:
            self._began = now
            dispatcher = found.data["dispatcher"]
            self._outer = dispatcher if dispatcher.py_func.__module__.startswith(__package__) else None
        self._depth += 1
        if self._outer and not self._told and self._spent + now - self._began > SILENT_SECONDS:
            self._told = True
            # A warning, since only those are shown where nobody has set up logging.
            _LOG.warning("%s", _message(self._outer))

    def on_end(self, found: Any) -> None:  # noqa: ARG002 (numba's interface)
        self._depth -= 1
        if self._depth == 0 and self._outer:
            self._spent += time.monotonic() - self._began


def _message(dispatcher: Any) -> str:
    text = "compiling the kernels that are needed, for up to a minute in all"
    if _Temporary.folder is not None:
        return (
            f"{text}; they are lost with this process, since neither the package's folder nor the user's cache can "
            "be written: set NUMBA_CACHE_DIR to a folder to keep them in"
        )
    kept = getattr(dispatcher.stats, "cache_path", None)
    return f"{text}; only once on this machine" + (f", they are kept in {kept}" if kept else "")


class _Temporary:
    """The folder for this process's kernels, where there is no lasting place."""

    folder: str | None = None


def _probe() -> None:
    """Nothing; see `find_place`."""


def find_place() -> None:
    """Let kernels be kept in a temporary folder if numba has no other place, which it would refuse to work without.

    The folder is private to the process: what lies in a shared one would be somebody else's code.
    """
    try:
        njit(cache=True)(_probe)
    except RuntimeError:
        _Temporary.folder = config.CACHE_DIR = tempfile.mkdtemp(prefix="deltafmt-kernels-")
        atexit.register(shutil.rmtree, _Temporary.folder, ignore_errors=True)


def prepare() -> None:
    """To be called before the first kernel is defined."""
    find_place()
    event.register("numba:compile", Notice())
