"""Everything that deltafmt raises on purpose, grouped by what the caller does about it.

    DeltafmtError
    ├── FormatError             an object is not what the format says: restore or re-publish it
    │   └── ChecksumError       bytes or weights differ from their checksum or digest
    ├── UnsupportedError        a valid request or object that this build cannot serve
    ├── NotFoundError           the version, object or tensor is not there
    │   └── VersionGoneError    it was there; retention removed it: start from a newer anchor
    ├── BaseMismatchError       the live bits are not the base that the delta starts from
    ├── CommitConflictError     another writer took the version: resume, then publish again
    ├── CommitUnknownError      storage went away while committing: the next publish settles it
    ├── IncompleteError         what the ranks did makes no whole version or step: some are missing, or disagree
    ├── SchemaError             tensors do not fit the schema: names, shapes, dtypes
    ├── LayoutError             a layout does not fit the schema or the local tensors
    └── StoreError              storage failed or misbehaved: retry, or repair the storage

Every error has a `kind`: one of the stable reason codes of `REASONS`, which the spec lists too.
"""

from __future__ import annotations

REASONS: dict[str, str] = {
    # names, shapes and dtypes
    "dtype-unknown": "a dtype that format v1 does not know",
    "dtype-mismatch": "a tensor's dtype is not the one that the schema or the layout names",
    "shape-mismatch": "a tensor's shape is not the one that the schema or the layout names",
    "shape-overflow": "a shape whose product of extents and element width reaches 2^63, or a negative extent",
    "name-reserved": "a tensor name that the safetensors view reserves",
    "name-invalid": "a tensor name that is not a UTF-8 string of at most 4,096 bytes",
    "name-twice": "one tensor name stands twice in a schema",
    "name-unknown": "a tensor name that the schema does not have",
    "name-missing": "a tensor that the schema has was not given",
    "alias-invalid": "an alias whose owner is missing, is an alias itself, or differs in dtype or shape",
    "box-invalid": "a box with a negative or reversed range, or with two ranks",
    # metadata objects
    "truncated": "fewer bytes than the object or chunk announces",
    "trailing-bytes": "bytes behind the end of an object",
    "magic-wrong": "the first or last bytes are not those of such an object",
    "version-unsupported": "a format version that this build does not read",
    "object-too-large": "a metadata object larger than the configured limit",
    "crc-mismatch": "bytes differ from their CRC32C",
    "msgpack-invalid": "a body that is no msgpack map within the limits",
    "key-twice": "one key stands twice in a map",
    "kind-wrong": "an object of another kind than its place demands",
    "feature-unknown": "a required feature that this build does not know",
    "field-missing": "a field or column that must be there is absent",
    "field-type": "a field of another type, length or range than the format says",
    "table-too-large": "columns of one object that decode to more than the limit",
    "column-length": "a column whose length disagrees with the table, the domain or other columns",
    "codec-unknown": "a codec id that format v1 does not have",
    "zstd-corrupt": "a zstd frame that is cut or cannot be decoded",
    "zstd-size": "a zstd frame that declares no size, or another one",
    "zstd-trailing": "bytes behind a column's only zstd frame, a second frame included",
    "digest-mismatch": "content that differs from the digest that names it",
    "index-range": "an index that points outside its table",
    "key-unsafe": "a name that leaves its root, or holds bytes that no name may hold",
    "signature-missing": "an object without the signature, or the digests of its chunks, that the reader demands",
    "signature-untrusted": "a signature by a key that the reader was not told to trust",
    "signature-wrong": "a signature that the object's bytes do not have by the key that it names",
    "signature-place": "a signature that is not the last entry of its body",
    "key-missing": "no key to sign with, where signatures are demanded",
    "extra-missing": "a package that only some users need and that is not installed",
    "key-unfit": "a key that cannot do what it is given for",
    "target-digest": "a further way without its target's digest, or a version with one",
    "footer-offset": "a trailer that points outside its shard",
    # tilings
    "schema-mismatch": "an object that belongs to another schema",
    "domain-empty": "a domain without boxes",
    "domain-too-large": "a domain of 2^31 elements or more",
    "box-tensor": "a box of an alias or of a tensor that the schema lacks",
    "box-outside": "a box that is empty or leaves its tensor",
    "width-mismatch": "an element width that differs between schema, domain and chunk, or is not 1, 2, 4 or 8",
    "tiling-overlap": "boxes that cover an element twice",
    "tiling-hole": "boxes that leave an element out",
    # chunks
    "column-order": "columns that are not in ascending order, or stand twice",
    "column-unexpected": "a column that does not belong to the chunk's operation",
    "block-counts": "counts of a chunk's blocks that disagree with its columns",
    "gap-trailing": "a block whose last gap byte lists no element",
    "position-outside": "a position outside its block",
    "position-twice": "a position that stands in both chunks of a domain",
    "padding-nonzero": "padding bits that are not zero",
    "escape-short": "an escaped step that needs no escape, or a step too long for its width",
    "escape-sign": "an escaped step whose sign differs from its code",
    "base-digest": "a base without its digest, or a digest without a base",
    "base-order": "a way whose base is the version itself or a later one",
    "shard-order": "shards that are not ascending by writer",
    "operation-unknown": "an operation id that format v1 does not have",
    "order-unknown": "an order id that format v1 does not have",
    "chunk-order": "chunks that are not ascending by domain and operation",
    "chunk-overlap": "a domain with chunks that exclude each other",
    "chunk-listed": "a number of listed elements that the domain cannot have",
    "chunk-coding": "a shift or block size that is out of range",
    "chunk-place": "a chunk outside its shard, or on bytes of another chunk",
    "column-count": "chunks and columns whose numbers disagree",
    "digest-rows": "digests that are missing, out of order or not allowed",
    "anchor-chunk": "an anchor way with a delta chunk",
    "anchor-incomplete": "an anchor way that does not cover every domain",
    "statistics": "statistics that disagree with the chunks",
    # lineages
    "lineage-missing": "no lineage at this root",
    "lineage-exists": "a lineage at this root already",
    "lineage-mismatch": "an object that belongs to another lineage",
    "version-missing": "a version that was never committed, or whose manifest is gone",
    "version-gone": "a version that existed and was removed by retention",
    "version-mismatch": "a manifest of another version or base than its name says",
    "base-differs": "a way made from another version of its base's number than the one that is there",
    "new-not-dense": "a delta way with a new or reshaped tensor that is not dense in it",
    "chain-broken": "no way leads to the version from what is held",
    "content-mismatch": "weights that differ from the digest of the version",
    "cast-inexact": "a live value behind a declared cast that is no image of the source dtype",
    "receiver-state": "a call that the receiver's state does not allow",
    "device-unsupported": "a tensor on a device that this build cannot write to",
    "base-none": "a version that has no base to be compared with",
    "footer-mismatch": "a shard whose footer disagrees with the manifest",
    "export-exists": "a folder for an export that is not empty",
    # writers
    "version-taken": "a version number that another writer used first, or that is not the newest",
    "commit-unknown": "a commit whose outcome could not be read back",
    "schema-differs": "tensors whose names, dtypes or shapes are not those expected",
    "meta-invalid": "labels that msgpack cannot hold, or that are too large",
    "file-unreadable": "a side file that is to be published and cannot be read",
    "way-withdrawn": "a further way whose shards retention removed before the way existed",
    "element-unowned": "an element that no rank holds, so that no version can have it",
    "replicas-differ": "ranks that hold one part of a tensor with different bits",
    "rank-missing": "a rank that has not delivered, or not in time",
    "rank-twice": "two processes that take themselves for one rank of a job",
    "rank-failed": "a rank that could not do its part",
    "rank-disagrees": "a rank that was asked for something else than the others",
    "detector-unsupported": "an optimizer or a parameter that a detector cannot serve",
    # storage
    "object-missing": "an object that is not in the store",
    "already-exists": "an exclusive create of an object that exists",
    "short-read": "storage returned fewer or more bytes than asked for, twice",
    "short-write": "an object in storage that holds another number of bytes than were written",
    "store-failed": "storage refused or failed",
    "store-unreachable": "storage cannot be reached, after several tries",
    "store-busy": "storage was busy with other requests for the same object, at several tries",
    "store-unsupported": "a storage back end that cannot be used, or not for writing",
    "create-not-exclusive": "a storage server that overwrites an object that it was asked to create",
    # layouts
    "trace-impure": "a loader that does anything but move elements and cast bfloat16 to float32",
    "target-unfilled": "a local element that is neither placed nor declared untouched",
    "target-moved": "a local tensor whose memory was exchanged since it was given",
    "target-strides": "a local tensor whose elements share memory",
    "placement-outside": "a placement that leaves its source or its target",
    "shard-unknown": "a part of a sharded tensor whose elements cannot be told, such as a sum still to be made",
    "layout-too-fine": "borders of ranks that cut a tensor into too many parts",
    "placement-overlap": "different elements placed at one address, or a placed one declared untouched",
}
"""Stable reason codes, each with the defect that it stands for."""


class DeltafmtError(Exception):
    """Base of all errors: what happened, where, what was expected and what was found.

    `kind` is a key of `REASONS`; `where` names the object, tensor, file or field concerned.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str,
        where: object = None,
        expected: object = None,
        found: object = None,
    ) -> None:
        assert kind in REASONS, f"unknown reason code {kind!r}"
        super().__init__(message)
        self.message = message
        self.kind = kind
        self.where = where
        self.expected = expected
        self.found = found

    def __str__(self) -> str:
        text = self.message if self.where is None else f"{self.message}: {self.where}"
        facts = [
            f"{label} {value}"
            for label, value in (("expected", self.expected), ("found", self.found))
            if value is not None
        ]
        return f"{text} ({', '.join(facts)})" if facts else text

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default pickling that worker processes rely on.
        return _rebuild, (type(self), self.message, self.kind, self.where, self.expected, self.found)


def _rebuild(
    cls: type[DeltafmtError], message: str, kind: str, where: object, expected: object, found: object
) -> DeltafmtError:
    return cls(message, kind=kind, where=where, expected=expected, found=found)


class FormatError(DeltafmtError):
    """An object breaks a rule of the format."""


class ChecksumError(FormatError):
    """Bytes or weights differ from the checksum or digest recorded for them."""


class UnsupportedError(DeltafmtError):
    """A valid request, object or back end that this build cannot serve."""


class NotFoundError(DeltafmtError):
    """The version, object or tensor asked for does not exist."""


class VersionGoneError(NotFoundError):
    """The version existed and was removed by retention."""


class BaseMismatchError(DeltafmtError):
    """The live bits are not those of the base that a delta starts from."""


class CommitConflictError(DeltafmtError):
    """Another writer committed the version first; nothing was changed."""


class CommitUnknownError(DeltafmtError):
    """Storage became unreachable before the outcome of a commit was known."""


class IncompleteError(DeltafmtError):
    """What the ranks did makes no whole version or step: some failed or are missing, or they disagree."""


class SchemaError(DeltafmtError):
    """Tensors do not fit the schema."""


class LayoutError(DeltafmtError):
    """A layout does not fit the schema or the local tensors."""


class StoreError(DeltafmtError):
    """Storage failed, or did not do what it promised."""
