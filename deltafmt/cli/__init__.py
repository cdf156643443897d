"""The `deltafmt` command: one small module per verb.

A verb module has `add(verbs)`, which declares its arguments, and `run(options, out)`, which does the work and
returns an exit code. Whatever is heavy is imported inside `run`, so that `deltafmt --help` answers at once.
"""

from __future__ import annotations

from deltafmt.cli.main import main

__all__ = ["main"]
