"""Bit-exact weight versions from a trainer to live inference engines, through storage.

What stands in `__all__` is public. Names are loaded when first used, so that `import deltafmt` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltafmt.errors import (
        BaseMismatchError,
        ChecksumError,
        CommitConflictError,
        CommitUnknownError,
        DeltafmtError,
        FormatError,
        IncompleteError,
        LayoutError,
        NotFoundError,
        SchemaError,
        StoreError,
        UnsupportedError,
        VersionGoneError,
    )
    from deltafmt.format.signing import HmacKey, SigningKey, VerifyKey, load_key
    from deltafmt.geometry import Box
    from deltafmt.layout import Layout, Placement
    from deltafmt.layout_builder import LayoutBuilder
    from deltafmt.lineage import Lineage, create, open  # noqa: A004 (the word everybody expects)
    from deltafmt.read.options import ReadOptions
    from deltafmt.read.receiver import Receiver
    from deltafmt.schema import Schema, TensorSpec
    from deltafmt.shard_builder import ShardBuilder
    from deltafmt.shards import Shards, shards_of
    from deltafmt.tracing import trace_layout
    from deltafmt.write.adamw import AdamWDetector, AdamWReport
    from deltafmt.write.cast import CastDetector
    from deltafmt.write.choice import detector_for
    from deltafmt.write.metrics import PublishMetrics
    from deltafmt.write.options import WriterOptions
    from deltafmt.write.pending import PendingVersion
    from deltafmt.write.snapshot import SnapshotDetector
    from deltafmt.write.writer import Writer

__version__ = "0.1.0"

_HOMES = {
    "errors": (
        "BaseMismatchError",
        "ChecksumError",
        "CommitConflictError",
        "CommitUnknownError",
        "DeltafmtError",
        "FormatError",
        "IncompleteError",
        "LayoutError",
        "NotFoundError",
        "SchemaError",
        "StoreError",
        "UnsupportedError",
        "VersionGoneError",
    ),
    "format.signing": ("HmacKey", "SigningKey", "VerifyKey", "load_key"),
    "geometry": ("Box",),
    "layout": ("Layout", "Placement"),
    "layout_builder": ("LayoutBuilder",),
    "lineage": ("Lineage", "create", "open"),
    "read.options": ("ReadOptions",),
    "read.receiver": ("Receiver",),
    "schema": ("Schema", "TensorSpec"),
    "shard_builder": ("ShardBuilder",),
    "shards": ("Shards", "shards_of"),
    "tracing": ("trace_layout",),
    "write.adamw": ("AdamWDetector", "AdamWReport"),
    "write.cast": ("CastDetector",),
    "write.choice": ("detector_for",),
    "write.metrics": ("PublishMetrics",),
    "write.options": ("WriterOptions",),
    "write.pending": ("PendingVersion",),
    "write.snapshot": ("SnapshotDetector",),
    "write.writer": ("Writer",),
}
_HOME_OF = {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names}

__all__ = [
    "AdamWDetector",
    "AdamWReport",
    "BaseMismatchError",
    "Box",
    "CastDetector",
    "ChecksumError",
    "CommitConflictError",
    "CommitUnknownError",
    "DeltafmtError",
    "FormatError",
    "HmacKey",
    "IncompleteError",
    "Layout",
    "LayoutBuilder",
    "LayoutError",
    "Lineage",
    "NotFoundError",
    "PendingVersion",
    "Placement",
    "PublishMetrics",
    "ReadOptions",
    "Receiver",
    "Schema",
    "SchemaError",
    "ShardBuilder",
    "Shards",
    "SigningKey",
    "SnapshotDetector",
    "StoreError",
    "TensorSpec",
    "UnsupportedError",
    "VerifyKey",
    "VersionGoneError",
    "Writer",
    "WriterOptions",
    "create",
    "detector_for",
    "load_key",
    "open",
    "shards_of",
    "trace_layout",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
