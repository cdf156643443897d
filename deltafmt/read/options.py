"""What a reader may be told about its resources."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from deltafmt.format.signing import Verifier, check_verifiers

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

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, not {self.threads}")
        if self.undo_bytes < 0 or self.audit_domains < 0:
            raise ValueError("undo_bytes and audit_domains must be at least 0")
        if self.lease_seconds is not None and self.lease_seconds < 1:
            raise ValueError(f"lease_seconds must be at least 1, or None, not {self.lease_seconds}")
        check_verifiers(self.trust)
