"""Small inputs that ask for much, tried one after another under a limit; prints what became of each as JSON.

Run by itself, since the limit is that of a process. Linux only.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import deltafmt
from deltafmt.errors import DeltafmtError
from deltafmt.format.body import emit
from deltafmt.format.checksum import crc32c
from deltafmt.format.chunk import ChunkHead, ColumnHead, unpack_chunk
from deltafmt.format.codec import compress
from deltafmt.format.constants import DENSE, PLANE, SHARD_END, SHARD_MAGIC, ZSTD
from deltafmt.format.objects import digest_of_schema, emit_schema, parse_lineage, parse_schema, parse_tiling
from deltafmt.format.records import BoxTable, DomainShapeTable, TensorTable, TilingRecord
from deltafmt.format.shard import read_footer
from deltafmt.schema import Schema, TensorSpec
from tests.formats import edited, enveloped

VECTORS = Path(__file__).resolve().parents[2] / "spec" / "vectors"
ADDRESS_SPACE = 512 << 20
NESTED = b"\x81\xa1a" + bytes.fromhex("dd0000ea60") * 400 + b"\xc0" * 60_000


def status(name: str) -> int:
    """A size in bytes of this process, as the kernel counts it."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def zeros(size: int) -> bytes:
    return compress(np.zeros(size, np.uint8))[1]


def chunk(stored: bytes, listed: int) -> Callable[[], object]:
    """A dense chunk of one-byte elements, its checksum right."""
    head = ChunkHead(domain=0, operation=DENSE, order=0, width=1, shift=0, block=0, listed=listed)
    column = ColumnHead(column=PLANE, codec=ZSTD, stored=len(stored), raw=listed, crc=crc32c(stored))
    return lambda: unpack_chunk(head, (column,), memoryview(stored), volume=listed, blocks=0, where="chunk")


def body(packed: bytes) -> Callable[[], object]:
    return lambda: parse_lineage(enveloped(packed), where="object")


def many_tensors() -> bytes:
    """A schema of three million tensors without names."""
    rows = 3 << 20

    def grow(record: dict[str, Any]) -> None:
        columns = {
            name: [ZSTD, rows * dtype.itemsize, zeros(rows * dtype.itemsize)]
            for name, dtype in TensorTable.column_types()
        }
        record.update(tensors={"rows": rows, **columns}, names=[0, 0, b""], shapes=[0, 0, b""])

    return edited(emit_schema(Schema((TensorSpec("w", "int8", (2,)),))), grow)


def many_boxes(schema: Schema) -> bytes:
    """A tiling of two million boxes of a scalar, beside a tensor of 16 dimensions."""
    count = (8 << 20) // 4 - 1000
    record = TilingRecord(
        schema=digest_of_schema(schema),
        domains=DomainShapeTable(width=np.array([1], "<u1"), boxes=np.array([count], "<u4")),
        boxes=BoxTable(tensor=np.zeros(count, "<u4")),
        starts=np.empty(0, "<u8"),
        stops=np.empty(0, "<u8"),
    )
    return emit(record, "tiling")


def announced_table() -> bytes:
    """Names of half a gibibyte in a few kilobytes."""
    frame = zeros(1 << 20)
    spoil = {"names": [ZSTD, 512 << 20, frame]}
    return edited(emit_schema(Schema((TensorSpec("w", "int8", (2,)),))), lambda record: record.update(spoil))


def read_vector(vector: dict[str, Any]) -> Callable[[], object]:
    root = str(VECTORS / vector["root"])
    return lambda: deltafmt.open(root).read(vector["version"])


def bombs() -> dict[str, Callable[[], object]]:
    wide = Schema((TensorSpec("s", "int8", ()), TensorSpec("wide", "int8", (1,) * 16)))
    envelope = enveloped(b"\x80")
    tensors, boxes, table = many_tensors(), many_boxes(wide), announced_table()
    tail = (1 << 62).to_bytes(8, "little") + SHARD_END
    index = json.loads((VECTORS / "index.json").read_text())
    return {
        "a frame that claims 7 * 10^18 bytes": chunk(bytes.fromhex("28b52ffde06c06060663636363"), 100),
        "64 MiB of zeros for 100 bytes": chunk(zeros(64 << 20), 100),
        "an array of 2^31 - 1": body(bytes.fromhex("dd7fffffff")),
        "a map of 2^31 - 1": body(bytes.fromhex("df7fffffff")),
        "a string of 2^31 - 1": body(bytes.fromhex("c67fffffff")),
        "100,000 deep": body(b"\x91" * 100_000),
        "arrays that each announce all": body(NESTED),
        "a body of 2^62 bytes": lambda: parse_lineage(
            envelope[:12] + (1 << 62).to_bytes(8, "little") + envelope[20:], where="object"
        ),
        "a footer at 2^62": lambda: read_footer(memoryview(SHARD_MAGIC + envelope + tail), where="shard"),
        "three million tensors": lambda: parse_schema(tensors, where="schema"),
        "two million boxes": lambda: parse_tiling(boxes, wide, where="tiling"),
        "half a gibibyte of names": lambda: parse_schema(table, where="schema"),
        **{f"vector {v['name']}": read_vector(v) for v in index["bad"] if "version" in v},
    }


def tried(bomb: Callable[[], object]) -> dict[str, Any]:
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    try:
        bomb()
    except DeltafmtError as error:
        outcome = {"class": type(error).__name__, "kind": error.kind}
    except BaseException as error:  # noqa: BLE001 - whatever leaks is to be told
        outcome = {"class": type(error).__name__, "kind": str(error)[:200]}
    else:
        outcome = {"class": "none", "kind": "accepted"}
    return {**outcome, "peak_bytes": status("VmHWM") - before}


def main() -> int:
    every = bombs()
    good = str(VECTORS / "good" / "many-boxes")
    deltafmt.open(good).read(2)
    limit = status("VmSize") + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    print(json.dumps({name: tried(bomb) for name, bomb in every.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
