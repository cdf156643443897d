"""`python -m deltafmt` is the `deltafmt` command."""

from __future__ import annotations

import sys

from deltafmt.cli import main

if __name__ == "__main__":
    sys.exit(main())
