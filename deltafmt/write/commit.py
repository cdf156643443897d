"""Making things exist: roots, content-addressed objects, and manifests, each created exclusively."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path

from deltafmt.errors import (
    CommitConflictError,
    CommitUnknownError,
    DeltafmtError,
    FormatError,
    NotFoundError,
    SchemaError,
    StoreError,
)
from deltafmt.format import keys
from deltafmt.format.checksum import blake2b
from deltafmt.format.constants import MAX_OBJECT_BYTES, MAX_TENSORS
from deltafmt.format.objects import (
    digest_of_schema,
    emit_lineage,
    emit_manifest,
    emit_schema,
    emit_tiling,
    parse_manifest,
)
from deltafmt.format.records import LineageRecord, Manifest
from deltafmt.format.signing import Signer
from deltafmt.given import sort_of
from deltafmt.read.history import History, Stored
from deltafmt.schema import Schema
from deltafmt.store import AlreadyExists, Store
from deltafmt.write.cut import Cut

Files = Mapping[str, "bytes | bytearray | memoryview | str | os.PathLike[str]"]
"""Side files by their names: contents, or paths of local files."""

_CREATE_ATTEMPTS = 3


class Outcome(Enum):
    """How a try to create a manifest ended."""

    OURS = "ours"
    THEIRS = "theirs"
    ABSENT = "absent"


def now_ms() -> int:
    """Milliseconds since 1970 UTC."""
    return time.time_ns() // 1_000_000


def create_root(store: Store, schema: Schema) -> LineageRecord:
    """Begin a lineage; `CommitConflictError` (`lineage-exists`) if there is one."""
    store.check_exclusive()
    if store.exists(keys.LINEAGE):
        raise _exists(store)
    if any(keys.version_of(key) is not None for key in store.list(keys.VERSIONS)):
        raise CommitConflictError(
            "versions are there whose descriptor is gone; put lineage.dfm back, or take another root",
            kind="lineage-exists",
            where=store.url,
        )
    check_count(len(schema))
    store.probe_exclusive()
    digest = digest_of_schema(schema)
    put_content(store, keys.schema_key(digest), _readable(emit_schema(schema)))
    record = LineageRecord(lineage=secrets.token_bytes(16), created=now_ms(), schema=digest)
    try:
        store.create(keys.LINEAGE, emit_lineage(record))
    except AlreadyExists as error:
        raise _exists(store) from error
    return record


def prove_exclusive(store: Store) -> None:
    """Raise `UnsupportedError` for storage in which two writers could both publish one version.

    Where there is a lineage, its descriptor is created once more, which must fail.
    """
    store.check_exclusive()
    with contextlib.suppress(NotFoundError):
        store.probe_exclusive(keys.LINEAGE)


def _exists(store: Store) -> CommitConflictError:
    return CommitConflictError("a lineage is there already; open it", kind="lineage-exists", where=store.url)


def put_content(store: Store, key: str, data: bytes) -> None:
    """Store an object that is named by its content, also when it is there.

    Retention removes old contents that nothing names; one that is new it leaves to whoever is about to name it.
    """
    store.put(key, data)


def put_cut(store: Store, cut: Cut) -> None:
    """Store the schema and the tiling."""
    put_content(store, keys.schema_key(cut.schema_digest), _readable(emit_schema(cut.schema)))
    put_content(store, keys.tiling_key(cut.tiling_digest), _readable(emit_tiling(cut.tiling, cut.schema)))


def check_count(tensors: int) -> None:
    """Raise `SchemaError` for more tensors than a reader takes."""
    if tensors > MAX_TENSORS:
        raise SchemaError(
            "more tensors than a lineage can hold; join small ones",
            kind="table-too-large",
            expected=f"at most {MAX_TENSORS}",
            found=tensors,
        )


def _readable(data: bytes) -> bytes:
    """Metadata that readers, with their usual limits, take; `SchemaError` otherwise."""
    if len(data) > MAX_OBJECT_BYTES:
        raise SchemaError(
            "the metadata of these tensors is larger than readers accept; use larger domains or shorter names",
            kind="object-too-large",
            expected=f"at most {MAX_OBJECT_BYTES} bytes",
            found=len(data),
        )
    return data


def put_files(store: Store, files: Files) -> dict[str, tuple[bytes, int]]:
    """Store side files under their digests; returns what a manifest says of them.

    Raises `NotFoundError` (`file-unreadable`), before any is stored, for a path that cannot be read.
    """
    keys.check_side_names(files)
    result = {}
    for name, data in [(name, _content(name, content)) for name, content in files.items()]:
        digest = blake2b(data)
        put_content(store, keys.file_key(digest), data)
        result[name] = (digest, len(data))
    return result


def _content(name: str, content: bytes | bytearray | memoryview | str | os.PathLike[str]) -> bytes:
    if isinstance(content, bytes | bytearray | memoryview):
        return bytes(content)
    if not isinstance(content, str | os.PathLike):
        raise TypeError(f"a side file is bytes, or a path to read: {name!r} is of type {sort_of(content)}")
    try:
        return Path(content).read_bytes()
    except OSError as error:
        raise NotFoundError(
            f"a side file cannot be read ({error.strerror}); give its bytes, or another path",
            kind="file-unreadable",
            where=f"{name!r} from {os.fspath(content)}",
        ) from error


def sealed(manifest: Manifest, sign_with: Signer | None = None) -> tuple[Stored, bytes]:
    """The manifest as it is going to be stored, and its bytes."""
    data = _readable(emit_manifest(manifest, sign_with))
    return Stored(key=manifest_key(manifest), digest=blake2b(data), manifest=manifest), data


def commit(store: Store, stored: Stored, data: bytes) -> Outcome:
    """Create the manifest: the moment at which a version or way comes to exist.

    A reply that was lost is settled by reading back and comparing the attempt. After any exception the
    outcome is open (a request may still be under way): keep the shards, and `settle` later. The exception
    is `CommitUnknownError` where the storage could not be read either, and `StoreError` (`short-write`),
    before anything is created, for a shard that has not arrived whole.
    """
    try:
        check_shards(store, stored.manifest)
    except DeltafmtError:
        # Ranks that saw sooner that the race was lost have taken their shards away.
        if settle(store, stored.manifest) is Outcome.THEIRS:
            return Outcome.THEIRS
        # So has retention, where others have gone on from the number and it is past.
        if not stored.manifest.is_way and stored.manifest.version < History(store).floor():
            return Outcome.THEIRS
        raise
    for attempt in range(1, _CREATE_ATTEMPTS + 1):
        try:
            store.put_if_absent(stored.key, data)
        except StoreError as error:
            # That something is there may have been said of a request that then failed, ours or another's.
            outcome = settle(store, stored.manifest, cause=error)
            if outcome is not Outcome.ABSENT:
                return outcome
            if attempt == _CREATE_ATTEMPTS:
                raise
            time.sleep(store.pause(attempt))
        else:
            return standing(store, stored.manifest)
    raise AssertionError


def check_shards(store: Store, manifest: Manifest) -> None:
    """Raise `StoreError` (`short-write`) unless all shards lie in the store at their full lengths."""
    shards = list(zip(manifest.shard_keys, manifest.shards.size.tolist(), strict=True))
    if not shards:
        return
    with ThreadPoolExecutor(min(store.readers, len(shards)), "deltafmt-check") as pool:
        sizes = list(pool.map(lambda shard: _size(store, shard[0]), shards))
    for (key, size), found in zip(shards, sizes, strict=True):
        if found != size:
            raise StoreError(
                "storage holds another number of bytes than were written (a collection whose grace time is "
                "shorter than a publish takes shards away); publish again",
                kind="short-write",
                where=key,
                expected=size,
                found="nothing" if found is None else found,
            )


def _size(store: Store, key: str) -> int | None:
    try:
        return store.size(key)
    except NotFoundError:
        return None


def settle(store: Store, manifest: Manifest, *, cause: BaseException | None = None) -> Outcome:
    """What stands where the manifest was to be created; `CommitUnknownError` if that cannot be read."""
    key = manifest_key(manifest)
    try:
        found = parse_manifest(store.read(key), way=manifest.is_way, where=key)
    except NotFoundError:
        return Outcome.ABSENT
    except FormatError:
        # Somebody's broken object is there: the number is taken all the same.
        return Outcome.THEIRS
    except StoreError as error:
        raise CommitUnknownError(
            "storage went away during the commit; the next publish finds out how it ended",
            kind="commit-unknown",
            where=key,
        ) from (cause or error)
    return standing(store, manifest) if found.attempt == manifest.attempt else Outcome.THEIRS


def standing(store: Store, manifest: Manifest) -> Outcome:
    """Look whether retention has passed by while the manifest was made; what it has overtaken is taken back.

    A version below the floor is `THEIRS`: its number was used by others and is used up. A further way that
    starts or ends below it raises `VersionGoneError`.
    """
    history, key = History(store), manifest_key(manifest)
    floor = history.floor()
    if manifest.version < floor or (manifest.base is not None and manifest.base < floor):
        drop(store, [key])
        if not manifest.is_way:
            return Outcome.THEIRS
        drop(store, manifest.shard_keys)
        raise history.gone(manifest.version if manifest.base is None else manifest.base)
    return Outcome.OURS


def manifest_key(manifest: Manifest) -> str:
    if manifest.is_way:
        return keys.way_key(manifest.version, manifest.base)
    return keys.version_key(manifest.version)


def conflict(version: int) -> CommitConflictError:
    return CommitConflictError(
        "another writer has this version; resume, then publish again",
        kind="version-taken",
        where=f"version {version}",
    )


def drop(store: Store, names: Iterable[str]) -> None:
    """Remove objects that nobody will refer to; if that fails, gc finds them."""
    with contextlib.suppress(DeltafmtError):
        store.delete(names)
