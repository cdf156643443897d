"""The records of format v1. Parsing and emitting are derived from what stands here, and the spec's field
tables are held equal to it.

A table is stored column by column; each of its arrays has one element per row. All integers are
little-endian.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from deltafmt.format import keys

Array = npt.NDArray[Any]


def _column(dtype: str, doc: str) -> Any:
    return field(metadata={"type": dtype, "doc": doc})


def _entry(wire: str, doc: str, **default: Any) -> Any:
    return field(metadata={"type": wire, "doc": doc}, **default)


class Table:
    """Base of the tables: row count, and the (name, element type) of each column."""

    __slots__ = ()

    @classmethod
    def column_types(cls) -> tuple[tuple[str, np.dtype[Any]], ...]:
        return tuple((f.name, np.dtype(f.metadata["type"])) for f in fields(cls))  # type: ignore[arg-type]

    @classmethod
    def empty(cls) -> Any:
        return cls(**{name: np.empty(0, dtype) for name, dtype in cls.column_types()})

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[int, ...]]) -> Any:
        """A table of given rows, each in the order of the columns."""
        turned = zip(*rows, strict=True) if rows else [()] * len(cls.column_types())
        names = cls.column_types()
        return cls(**{n: np.array(v, dtype) for (n, dtype), v in zip(names, turned, strict=True)})

    def __len__(self) -> int:
        return len(getattr(self, self.column_types()[0][0]))

    def take(self, rows: Any) -> Any:
        """The table of the chosen rows (an index array, mask or slice)."""
        return type(self)(**{name: getattr(self, name)[rows] for name, _ in self.column_types()})

    def replaced(self, **columns: Array) -> Any:
        """The table with some columns exchanged."""
        return type(self)(**{name: columns.get(name, getattr(self, name)) for name, _ in self.column_types()})


class DigestColumns(Table):
    """Base of the tables that have digests."""

    __slots__ = ()

    @property
    def lanes(self) -> npt.NDArray[np.uint64]:
        """The digests, shape (rows, 2)."""
        found: Any = self
        return np.stack((found.digest0, found.digest1), axis=1).astype(np.uint64, copy=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTable(Table):
    """Tensors of a schema, in order."""

    name_length: Array = _column("<u4", "bytes of the tensor's name in `names`")
    dtype: Array = _column("<u1", "index into `dtypes`")
    rank: Array = _column("<u1", "number of dimensions; that many extents in `shapes`")
    alias: Array = _column("<u4", "0, or 1 + row of the tensor that owns the elements")


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainShapeTable(Table):
    """Domains of a tiling, in order."""

    width: Array = _column("<u1", "bytes per element: 1, 2, 4 or 8")
    boxes: Array = _column("<u4", "number of boxes, at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxTable(Table):
    """Boxes of a tiling, domain after domain."""

    tensor: Array = _column("<u4", "row of the tensor in the schema; never an alias")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTable(Table):
    """Shards of a way; a shard's key follows from version, base, attempt and writer."""

    writer: Array = _column("<u4", "rank of the writer, ascending")
    size: Array = _column("<u8", "bytes of the whole shard object")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTable(Table):
    """Chunks, ascending by (domain, operation)."""

    shard: Array = _column("<u4", "row in the shard table; 0 in a footer")
    domain: Array = _column("<u4", "domain of the tiling")
    operation: Array = _column("<u1", "1 set, 2 step, 3 dense")
    order: Array = _column("<u1", "order of bit patterns: 0 plain, 1 sign-magnitude")
    width: Array = _column("<u1", "bytes per element, the domain's")
    shift: Array = _column("<u1", "low bits of each distance that stand in `low`, 0 to 16; 0 for dense")
    block: Array = _column("<u1", "log2 of the elements of a block, 6 to 24; 0 for dense")
    listed: Array = _column("<u4", "elements listed, at least 1; for dense the domain's volume")
    offset: Array = _column("<u8", "first byte of the chunk's first column in the shard")
    columns: Array = _column("<u1", "number of columns stored")


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnTable(Table):
    """Columns of all chunks, chunk after chunk, ascending by id within one."""

    column: Array = _column("<u1", "0 gap, 1 low, 2 block, 3 code, 4 magnitude, 5 escape, 16+j byte plane j")
    codec: Array = _column("<u1", "0 raw, 1 zstd")
    stored: Array = _column("<u8", "bytes stored")
    raw: Array = _column("<u8", "bytes after decoding, at least 1")
    crc: Array = _column("<u4", "CRC32C of the stored bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainTable(DigestColumns):
    """Content digests of domains, ascending by domain."""

    domain: Array = _column("<u4", "domain of the tiling")
    digest0: Array = _column("<u8", "first lane of the digest of the result")
    digest1: Array = _column("<u8", "second lane of the digest of the result")
    base0: Array = _column("<u8", "first lane of the digest of the base's elements; 0 where unknown")
    base1: Array = _column("<u8", "second lane of the digest of the base's elements; 0 where unknown")
    base_known: Array = _column("<u1", "1 where the base digest is given, else 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestTable(DigestColumns):
    """Content digests of all tensors, in the schema's order; an alias has its owner's."""

    digest0: Array = _column("<u8", "first lane: sum over the tensor's domains")
    digest1: Array = _column("<u8", "second lane: sum over the tensor's domains")


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedTable(DigestColumns):
    """Changes of digests of tensors, ascending by tensor."""

    tensor: Array = _column("<u4", "row of the tensor in the schema")
    digest0: Array = _column("<u8", "first lane of the difference, modulo 2^64")
    digest1: Array = _column("<u8", "second lane of the difference, modulo 2^64")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTable(DigestColumns):
    """Digests of domains that several ranks hold, ascending by domain."""

    domain: Array = _column("<u4", "domain of the tiling")
    digest0: Array = _column("<u8", "first lane of the digest of the result")
    digest1: Array = _column("<u8", "second lane of the digest of the result")


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageRecord:
    """`lineage.dfm`: what a root holds."""

    lineage: bytes = _entry("bin16", "random id of the lineage")
    created: int = _entry("int", "creation time, milliseconds since 1970 UTC")
    schema: bytes = _entry("bin32", "digest of the first version's schema")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaRecord:
    """`schemas/<digest>.dfm`: the ordered table of tensors."""

    dtypes: list[str] = _entry("texts", "names of the dtypes used, as torch names them")
    tensors: TensorTable = _entry("TensorTable", "the tensors")
    names: Array = _entry("column u1", "UTF-8 names, one behind another")
    shapes: Array = _entry("column u8", "extents, tensor after tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class TilingRecord:
    """`tilings/<digest>.dfm`: the domains into which a schema is cut."""

    schema: bytes = _entry("bin32", "digest of the schema")
    domains: DomainShapeTable = _entry("DomainShapeTable", "the domains")
    boxes: BoxTable = _entry("BoxTable", "their boxes")
    starts: Array = _entry("column u8", "first index of each box per dimension, box after box")
    stops: Array = _entry("column u8", "index behind the last of each box per dimension, box after box")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """`versions/<version>.dfm` (kind `version`) or `ways/<version>/<base or anchor>.dfm` (kind `way`).

    A field with a default is optional: where it has that value, the body lacks it.
    """

    lineage: bytes = _entry("bin16", "id of the lineage")
    version: int = _entry("int", "the version that the way leads to")
    base: int | None = _entry("int?", "the version that it starts from; nil for an anchor")
    base_digest: bytes | None = _entry("bin32?", "digest of versions/<base>.dfm; nil for an anchor")
    target_digest: bytes | None = _entry(
        "bin32?", "kind `way` only: digest of versions/<version>.dfm; else nil"
    )
    schema: bytes = _entry("bin32", "digest of the schema of the result")
    tiling: bytes = _entry("bin32", "digest of the tiling of the chunks")
    attempt: bytes = _entry("bin16", "random id of the try that wrote the shards")
    writers: int = _entry("int", "number of writer ranks")
    created: int = _entry("int", "time of the commit, milliseconds since 1970 UTC")
    data: bool = _entry("bool", "false for an anchor whose bytes are elsewhere (see `meta`)")
    meta: dict[str, Any] = _entry("map", "free for the trainer: step and what else it likes")
    files: dict[str, tuple[bytes, int]] = _entry("files", "side files: relative name -> [BLAKE2b-256, bytes]")
    changed: int | None = _entry("int?", "elements whose bits differ from the base's; nil where unknown")
    listed: int = _entry("int", "elements stored in all chunks")
    shards: ShardTable = _entry("ShardTable", "the shards")
    chunks: ChunkTable = _entry("ChunkTable", "the chunks")
    columns: ColumnTable = _entry("ColumnTable", "their columns")
    domains: DomainTable = _entry("DomainTable", "digests of domains")
    tensors: DigestTable = _entry("DigestTable", "digests of tensors")
    chunk_digests: bytes | None = _entry(
        "bin", "optional: BLAKE2b-256 of the stored bytes of each chunk, in their order", default=None
    )
    signature: tuple[str, bytes, bytes] | None = _entry(
        "signature", "optional, and the last entry: [algorithm, key id, signature]", default=None
    )

    @property
    def stored_bytes(self) -> int:
        """Bytes of the way's shards."""
        return int(self.shards.size.sum())

    @property
    def shard_keys(self) -> list[str]:
        """Keys of the way's shards, in the order of the shard table."""
        return [
            keys.shard_key(
                version=self.version,
                base=self.base,
                attempt=self.attempt,
                writer=writer,
                further=self.is_way,
            )
            for writer in self.shards.writer.tolist()
        ]

    @property
    def is_way(self) -> bool:
        """Whether this is a further way to a version that exists already."""
        return self.target_digest is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestRecord:
    """`latest.dfm`: a hint where to look for the newest version."""

    lineage: bytes = _entry("bin16", "id of the lineage")
    version: int = _entry("int", "a version that was the newest when this was written")


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorRecord:
    """`floors/<version>.dfm`: versions below no longer exist."""

    lineage: bytes = _entry("bin16", "id of the lineage")
    version: int = _entry("int", "the oldest version that is kept")
    created: int = _entry("int", "when it was made, milliseconds since 1970 UTC")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """`leases/<reader>.dfm`: what a reader still needs, and for how long."""

    lineage: bytes = _entry("bin16", "id of the lineage")
    reader: bytes = _entry("bin16", "random id of the reader")
    start: int = _entry("int", "the oldest version that the reader needs; it needs all later ones, too")
    seconds: int = _entry("int", "how long the lease holds from the time at which the storage wrote it")
    created: int = _entry("int", "when it was written by the reader's clock, milliseconds since 1970 UTC")


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """The end of a shard: its chunk table again, and the receipt of the rank that wrote it."""

    lineage: bytes = _entry("bin16", "id of the lineage")
    version: int = _entry("int", "the version that the way leads to")
    base: int | None = _entry("int?", "the version that it starts from; nil for an anchor")
    schema: bytes = _entry("bin32", "digest of the schema of the result")
    tiling: bytes = _entry("bin32", "digest of the tiling of the chunks")
    attempt: bytes = _entry("bin16", "random id of the try")
    writer: int = _entry("int", "rank of the writer")
    writers: int = _entry("int", "number of writer ranks")
    changed: int | None = _entry("int?", "as in the manifest, of this rank")
    listed: int = _entry("int", "as in the manifest, of this rank")
    chunks: ChunkTable = _entry("ChunkTable", "the shard's chunks")
    columns: ColumnTable = _entry("ColumnTable", "their columns")
    domains: DomainTable = _entry("DomainTable", "digests of the domains that this rank owns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What a rank says of its finished shard to whoever commits; also when it has nothing to store."""

    lineage: bytes = _entry("bin16", "id of the lineage")
    version: int = _entry("int", "the version that the way leads to")
    base: int | None = _entry("int?", "the version that it starts from; nil for an anchor")
    base_digest: bytes | None = _entry("bin32?", "digest of versions/<base>.dfm; nil for an anchor")
    schema: bytes = _entry("bin32", "digest of the schema of the result")
    tiling: bytes = _entry("bin32", "digest of the tiling of the chunks")
    attempt: bytes = _entry("bin16", "random id of the try")
    writer: int = _entry("int", "rank of the writer")
    writers: int = _entry("int", "number of writer ranks")
    size: int = _entry("int", "bytes of the whole shard object; 0 where there is none")
    changed: int | None = _entry(
        "int?", "elements of this rank whose bits differ from the base's; nil where unknown"
    )
    listed: int = _entry("int", "elements stored in all chunks of this rank")
    chunks: ChunkTable = _entry("ChunkTable", "the shard's chunks")
    columns: ColumnTable = _entry("ColumnTable", "their columns")
    domains: DomainTable = _entry(
        "DomainTable", "digests of the domains that this rank owns, as in the manifest"
    )
    moved: MovedTable = _entry("MovedTable", "what this rank's domains add to digests of tensors")
    replicas: ReplicaTable = _entry("ReplicaTable", "digests of all domains that this rank and others hold")
    chunk_digests: bytes | None = _entry(
        "bin", "optional, as in the manifest, for the chunks of this rank", default=None
    )
    signature: tuple[str, bytes, bytes] | None = _entry(
        "signature", "optional, and the last entry, as in the manifest", default=None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """`attempts/<version>/<attempt>.dfm`: rank 0 calls the ranks of its job to write a version together."""

    lineage: bytes = _entry("bin16", "id of the lineage; zero while there is none")
    version: int = _entry("int", "the version to be written")
    base: int | None = _entry("int?", "the version that it starts from; nil for an anchor")
    base_digest: bytes | None = _entry("bin32?", "digest of versions/<base>.dfm; nil for an anchor")
    attempt: bytes = _entry("bin16", "random id of the try")
    job: bytes = _entry("bin16", "digest of the job's name: ranks of other jobs take no part")
    coordinator: bytes = _entry("bin16", "random id of the process that calls")
    round: int = _entry("int", "number of the call among those of its coordinator, ascending")
    purpose: int = _entry(
        "int", "0 write the version, 1 prove that the ranks hold the base, 2 add an anchor to the version"
    )
    writers: int = _entry("int", "number of writer ranks")
    created: int = _entry("int", "time of the call, milliseconds since 1970 UTC")
    data: bool = _entry("bool", "false for an anchor whose bytes are elsewhere")
    beside: bool = _entry("bool", "whether the ranks add an anchor to the version once it is there")
    signed: bool = _entry(
        "bool", "whether receipts give `chunk_digests`, for a manifest that is to be signed"
    )
    meta: dict[str, Any] = _entry("map", "labels of the version, as in its manifest")
    schema: bytes | None = _entry(
        "bin32?", "digest of the schema of the result; nil: ranks tell what they hold"
    )
    tiling: bytes | None = _entry("bin32?", "digest of the tiling; nil with the schema")
    holdings: Array = _entry(
        "column u1", "16 bytes per writer: digest of what it is known to hold; zero: not known"
    )
    owner: Array = _entry("column u4", "rank that stores each domain of the tiling")
    holders: Array = _entry("column u4", "number of ranks that hold each domain, all of it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`attempts/<version>/<attempt>/<writer>.dfm`: what a rank holds, or why it does not take part."""

    attempt: bytes = _entry("bin16", "the attempt that is answered")
    writer: int = _entry("int", "rank of the writer")
    failure: dict[str, Any] = _entry("map", "empty, or what went wrong: `error`, `kind`, `message`, `where`")
    dtypes: list[str] = _entry("texts", "as in a schema, of the tensors that the rank knows")
    tensors: TensorTable = _entry("TensorTable", "as in a schema")
    names: Array = _entry("column u1", "as in a schema")
    shapes: Array = _entry("column u8", "as in a schema")
    boxes: BoxTable = _entry("BoxTable", "the parts that the rank holds, by row of `tensors`")
    starts: Array = _entry("column u8", "first index of each part per dimension, part after part")
    stops: Array = _entry("column u8", "index behind the last of each part per dimension, part after part")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`attempts/<version>/<attempt>/verdict.dfm`: how an attempt ended, where no manifest tells."""

    attempt: bytes = _entry("bin16", "the attempt that has ended")
    outcome: int = _entry(
        "int", "0 done, 1 another writer has the version, 2 a new call follows, 3 failed, 4 unknown"
    )
    failure: dict[str, Any] = _entry("map", "for 3 what went wrong: `error`, `kind`, `message`, `where`")


TABLES: dict[str, type[Table]] = {
    table.__name__: table
    for table in (
        TensorTable,
        DomainShapeTable,
        BoxTable,
        ShardTable,
        ChunkTable,
        ColumnTable,
        DomainTable,
        DigestTable,
        MovedTable,
        ReplicaTable,
    )
}
"""Every table by its name."""

RECORDS: dict[str, type[Any]] = {
    "lineage": LineageRecord,
    "schema": SchemaRecord,
    "tiling": TilingRecord,
    "version": Manifest,
    "way": Manifest,
    "footer": Footer,
    "latest": LatestRecord,
    "attempt": Attempt,
    "answer": Answer,
    "receipt": Receipt,
    "verdict": Verdict,
    "floor": FloorRecord,
    "lease": LeaseRecord,
}
"""The record of each kind of metadata object."""


def optional(record: type[Any]) -> frozenset[str]:
    """Names of the fields that a body may lack; they then have their default."""
    return frozenset(f.name for f in fields(record) if f.default is not MISSING)


def described(record: type[Any]) -> list[tuple[str, str, str]]:
    """(field, wire type, meaning) of each field of a record or table, in order."""
    return [(f.name, f.metadata["type"], f.metadata["doc"]) for f in fields(record)]
