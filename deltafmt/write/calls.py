"""The calls by which rank 0 brings the ranks together; a rank that is alone calls itself."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deltafmt.format.ranks import HOLDING_BYTES
from deltafmt.format.records import Attempt
from deltafmt.write.commit import now_ms
from deltafmt.write.cut import Cut
from deltafmt.write.ranks import Want

UNKNOWN_HOLDING = bytes(HOLDING_BYTES)


def call_of(
    want: Want,
    *,
    lineage: bytes,
    cut: Cut | None,
    holdings: Sequence[bytes],
    owner: npt.NDArray[Any],
    holders: npt.NDArray[Any],
    job: bytes = bytes(16),
    coordinator: bytes = bytes(16),
    number: int = 0,
) -> Attempt:
    """A call for what is wanted, under a new random id; `holdings` are those known, one per rank.

    Without a `cut` it asks what the ranks hold. `number` counts the calls of a coordinator.
    """
    return Attempt(
        lineage=lineage,
        version=want.version,
        base=None if want.base is None else want.base.manifest.version,
        base_digest=None if want.base is None else want.base.digest,
        attempt=secrets.token_bytes(16),
        job=job,
        coordinator=coordinator,
        round=number,
        purpose=want.purpose,
        writers=len(holdings),
        created=now_ms(),
        data=want.data,
        beside=want.beside,
        signed=want.signed,
        meta=want.meta,
        schema=None if cut is None else cut.schema_digest,
        tiling=None if cut is None else cut.tiling_digest,
        holdings=np.frombuffer(b"".join(holdings), np.uint8),
        owner=owner.astype("<u4"),
        holders=holders.astype("<u4"),
    )
