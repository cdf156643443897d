"""What a reader may be told about its resources."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from deltafmt.format.signing import Verifier

LEASE_SECONDS = 900
"""How long a lease holds if nobody renews it: what a reader that died still costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Resources of a reader.

    `threads` decode and apply (default: the machine's cores, at most 8); `undo_bytes` is what the log of
    old bits may take before a step is made without one, in which case a failure leaves no known version;
    `audit_domains` is how many domains that changed are digested anew at each step, by turns, to find live
    bits that have drifted (0: none). With keys to `trust`, only versions signed with one of them are taken.
    `lease_seconds` is how long a lease of this reader holds, by which retention knows what is being read (None:
    no lease is written, and what is read may vanish).
    """

    threads: int = min(8, os.cpu_count() or 1)
    undo_bytes: int = 4 << 30
    audit_domains: int = 1
    trust: Sequence[Verifier] = ()
    lease_seconds: int | None = LEASE_SECONDS
