"""The handle on a lineage: read, list, compare, verify, export."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from deltafmt.changes import CHANGES, name_column, tensor_changes
from deltafmt.errors import FormatError, NotFoundError, UnsupportedError
from deltafmt.export import FILE_BYTES, export_version, side_files
from deltafmt.format.records import Manifest
from deltafmt.format.signing import Signer, Verifier, check_signer, check_verifiers
from deltafmt.given import instance, version_number
from deltafmt.read.history import History, Stored, is_cut
from deltafmt.read.lease import Lease
from deltafmt.read.materialize import allocate, follow, materialize
from deltafmt.read.options import LEASE_SECONDS
from deltafmt.read.overview import overview
from deltafmt.schema import Schema
from deltafmt.store import Url, open_store
from deltafmt.verify import Report, verify_lineage
from deltafmt.write.anchor import add_anchor_way
from deltafmt.write.commit import create_root
from deltafmt.write.further import existing_way
from deltafmt.write.gc import GcPlan, collect
from deltafmt.write.squash import add_squash_way

BATCH_BYTES = 256 << 20
"""Tensors that stream through memory together."""
LEASED_BYTES = 64 << 20
"""Reads of so much are worth a lease; smaller ones are over before it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionInfo:
    """One line of a lineage's log.

    `base` is that of the version's first way (None: an anchor), `ways` the bases of all ways by which it can be had,
    `created` milliseconds since 1970 UTC, `changed` the elements whose bits differ from the base's (None where
    unknown), `listed` the elements stored and `stored_bytes` the size of the first way's shards.
    """

    version: int
    base: int | None
    step: int | None
    created: int
    changed: int | None
    listed: int
    stored_bytes: int
    ways: tuple[int | None, ...]
    meta: dict[str, Any]


def create(url: Url, schema: Schema, *, storage_options: Mapping[str, Any] | None = None) -> Lineage:
    """Make a new, empty lineage at a root.

    Raises `CommitConflictError` (`lineage-exists`) if there is one, and `UnsupportedError` for storage that
    cannot create objects exclusively.
    """
    instance("schema", schema, Schema, "Schema.of(named_tensors) makes one")
    store = open_store(url, storage_options)
    create_root(store, schema)
    return Lineage(History(store))


def open(  # noqa: A001 (the word everybody expects)
    url: Url,
    *,
    storage_options: Mapping[str, Any] | None = None,
    trust: Sequence[Verifier] = (),
    sign_with: Signer | None = None,
) -> Lineage:
    """Open the lineage of a root; `NotFoundError` (`lineage-missing`) if there is none.

    With keys to `trust`, only manifests signed with one of them, or with `sign_with`, are taken. Ways that are
    added are signed with `sign_with`.
    """
    lineage = unopened(url, storage_options=storage_options, trust=trust, sign_with=sign_with)
    lineage.history.descriptor  # noqa: B018 (fails here rather than at the first use)
    return lineage


def unopened(
    url: Url,
    *,
    storage_options: Mapping[str, Any] | None = None,
    trust: Sequence[Verifier] = (),
    sign_with: Signer | None = None,
) -> Lineage:
    """A handle on whatever is at a root, a lineage whose descriptor is damaged or lost among it; see `open`."""
    check_verifiers(trust)
    if sign_with is not None:
        check_signer(sign_with)
        trust = (*trust, sign_with.verifier) if trust else ()
    return Lineage(History(open_store(url, storage_options), trust=trust), sign_with=sign_with)


class Lineage:
    """A live handle on a lineage: every call sees what has been committed by then."""

    def __init__(self, history: History, *, sign_with: Signer | None = None) -> None:
        self.history = history
        self.sign_with = sign_with

    def __repr__(self) -> str:
        return f"Lineage({self.url!r})"

    @property
    def url(self) -> str:
        """The root, without credentials."""
        return self.history.store.url

    def latest(self) -> int | None:
        """The newest version; None before the first."""
        return self.history.latest()

    def log(self) -> list[VersionInfo]:
        """All versions up to the newest, ascending; `FormatError` for a damaged manifest among them."""
        lines = list(self.lines())
        while lines and _is_cut(*lines[-1]):
            lines.pop()
        return [_whole(line) for _, line in lines]

    def lines(self, *, last: int | None = None) -> Iterator[tuple[int, VersionInfo | FormatError]]:
        """The log as it is read, ascending: each version with its line, or what is wrong with its manifest.

        `last`: only the newest so many.
        """
        for each in overview(self.history, last=last):
            first, floor = each.first, self.history.known_floor
            yield each.version, first if isinstance(first, FormatError) else _info(first, each.further, floor)

    def info(self, version: int | None = None) -> VersionInfo:
        """One line of the log (default: the newest version's); `NotFoundError` if there is no such version."""
        first, *further = self.history.ways(self._version(version))
        return _info(first, [way.manifest.base for way in further], self.history.known_floor)

    def manifest(self, version: int | None = None) -> Manifest:
        """The version's manifest (default: the newest version's)."""
        return self.history.first_way(self._version(version)).manifest

    def schema(self, version: int | None = None) -> Schema:
        """The version's schema (default: the newest version's, or the first schema before there is one)."""
        if version is None and self.latest() is None:
            return self.history.schema(self.history.descriptor.schema)
        return self.history.schema(self.manifest(version).schema)

    def files(self, version: int | None = None) -> dict[str, bytes]:
        """The version's side files (config.json, tokenizer) by name; `ChecksumError` for one that is damaged."""
        return side_files(self.history.store, self.manifest(version).files)

    def read(self, version: int | None = None, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        """Full canonical tensors of a version, by name, on the CPU; an alias is its owner's tensor again.

        Raises `NotFoundError` for a name or version that is not there, or where only an anchor without data
        leads to the version; `VersionGoneError` for a version that retention has removed.
        """
        number = self._version(version)
        schema = self.schema(number)
        wanted = _wanted(schema, names)
        with self._leased(sum(schema[name].nbytes for name in wanted)) as lease:
            return self._read(number, wanted, lease)

    def iter_read(
        self,
        version: int | None = None,
        names: Iterable[str] | None = None,
        *,
        batch_bytes: int = BATCH_BYTES,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Like `read`, tensor after tensor in the asked order, holding about `batch_bytes` at a time.

        A lease keeps the version from retention until the iterator ends or is closed.
        """
        with self._leased() as lease:
            yield from self._stream(self._version(version), names, batch_bytes, lease)

    def changes(self, version: int | None = None) -> pa.RecordBatchReader:
        """The elements whose bits differ from the version's base, as Arrow batches that stream.

        Columns: `tensor` (name, dictionary of int32), `index` (uint64: flat, canonical), `old` and `new` (uint64: bit
        patterns, zero-extended).
        Tensors that the base lacks, or has in another shape, come whole with `old` null. Raises
        `NotFoundError` (`base-none`) for a version that is an anchor.
        """
        manifest = self.manifest(version)
        if manifest.base is None:
            raise NotFoundError(
                "the version is an anchor and has no base; use diff(a, b)",
                kind="base-none",
                where=f"version {manifest.version}",
            )
        return self.diff(manifest.base, manifest.version)

    def diff(self, old: int, new: int) -> pa.RecordBatchReader:
        """Like `changes`, between any two versions; the older number need not come first."""
        old, new = version_number(old), version_number(new)
        before, after = self.schema(old), self.schema(new)
        names = [after.names[row] for row in after.owners]
        column = name_column(names)

        def batches() -> Iterator[pa.RecordBatch]:
            with self._leased() as lease:
                for batch in _batches(after, names, BATCH_BYTES):
                    same = [name for name in batch if _comparable(before, after, name)]
                    was = self._read(old, same, lease)
                    now = self._advanced(was, old, new, batch, lease)
                    for name in batch:
                        yield from tensor_changes(column, name, was.get(name), now[name])

        return pa.RecordBatchReader.from_batches(CHANGES, batches())

    def _advanced(
        self, was: Mapping[str, torch.Tensor], old: int, new: int, names: list[str], lease: Lease
    ) -> dict[str, torch.Tensor]:
        """Tensors at `new`, by one step from those at `old` where that is the version's own way."""
        stored = self.history.first_way(new)
        if stored.manifest.base != old or stored.manifest.schema != self.manifest(old).schema:
            return self._read(new, names, lease)
        now = {name: was[name].clone() for name in names}
        follow(self.history, stored, now)
        return now

    def verify(
        self,
        version: int | None = None,
        *,
        deep: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> Report:
        """Check every object that `version` (default: all versions) depends on.

        Damage is reported, not raised. `deep` also reads, decodes and digests every chunk, and replays every
        way in memory of the model's size; without it only metadata and sizes are checked. `progress` gets
        (bytes done, bytes in all).
        """
        with self._leased() as lease:
            return verify_lineage(lease, version, deep=deep, progress=progress)

    def export(
        self,
        version: int | None,
        directory: str | Path,
        *,
        file_bytes: int = FILE_BYTES,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Path]:
        """Write a version as safetensors files with their index and the side files; returns their paths.

        A file takes up to `file_bytes`; `progress` gets (bytes done, bytes in all). Raises `StoreError`:
        `export-exists` for a folder that is not empty, `store-failed` where it cannot be written.
        """
        number = self._version(version)
        with self._leased() as lease:
            return export_version(
                self.history.store,
                self.manifest(number),
                self.schema(number),
                lambda names: self._stream(number, names, BATCH_BYTES, lease),
                directory,
                file_bytes=file_bytes,
                progress=progress,
            )

    def add_anchor(self, version: int | None = None) -> Manifest:
        """Add an anchor way to a version, read from its chain; returns the way's manifest.

        One that exists already is no error. `UnsupportedError` (`key-missing`) where this handle demands
        signatures and has no key to sign with.
        """
        number = self._version(version)
        schema = self.schema(number)
        tensors = allocate(schema)
        self._check_key(number, None)
        with self._leased() as lease:
            materialize(self.history, number, tensors, lease=lease)
        return add_anchor_way(self.history, number, tensors, sign_with=self.sign_with)

    def squash(
        self,
        base: int,
        version: int | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> Manifest:
        """Add one way from `base` to `version` in place of the deltas between; returns the way's manifest.

        The deltas are composed chunk by chunk, in memory of some chunks, and without the base's weights
        unless schema or tiling change in between. A way that exists already is no error. Receivers take it
        where it saves bytes. `progress` gets (bytes done, bytes in all). Raises `NotFoundError` where the
        versions between are gone, `SchemaError` (`dtype-mismatch`) where a tensor's dtype changes.
        """
        base, number = version_number(base), self._version(version)
        with self._leased() as lease, lease.at_work():
            if not lease.cover(base):
                raise self.history.gone(base)
            self._check_key(number, base)
            way = add_squash_way(self.history, base, number, progress=progress, sign_with=self.sign_with)
        assert way is not None
        return way

    def gc(
        self,
        *,
        keep_last: int,
        grace_seconds: float,
        dry_run: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> GcPlan:
        """Find, and without `dry_run` remove, what is not needed to read the newest `keep_last` versions.

        More versions stay where readers' leases need them, or where the oldest of the kept ones has no anchor
        to start from. What may belong to work under way (attempts, further ways, contents not named yet) is
        left alone until it is `grace_seconds` old; nothing of a version to come is ever touched. Runs may be
        interrupted and repeated, and may overlap with writers, readers and each other. `progress` gets
        (objects removed, objects in all).
        """
        return collect(
            self.history, keep_last=keep_last, grace_seconds=grace_seconds, dry_run=dry_run, progress=progress
        )

    def _check_key(self, version: int, base: int | None) -> None:
        if (
            self.history.trust
            and self.sign_with is None
            and existing_way(self.history, version, base) is None
        ):
            raise UnsupportedError(
                "a way without a signature would be refused by this very handle: open with `sign_with`",
                kind="key-missing",
                where=self.url,
            )

    def _read(self, version: int, names: list[str], lease: Lease) -> dict[str, torch.Tensor]:
        schema = self.schema(version)
        owners = allocate(schema, names)
        materialize(self.history, version, owners, lease=lease)
        return {name: owners[schema.resolve(name).name] for name in names}

    def _stream(
        self, version: int, names: Iterable[str] | None, batch_bytes: int, lease: Lease
    ) -> Iterator[tuple[str, torch.Tensor]]:
        schema = self.schema(version)
        wanted = _wanted(schema, names)
        for batch in _batches(schema, wanted, batch_bytes):
            yield from self._read(version, batch, lease).items()

    @contextmanager
    def _leased(self, nbytes: int = LEASED_BYTES) -> Iterator[Lease]:
        """A lease for a read of so many bytes, if that takes long enough to be worth one."""
        lease = Lease(self.history, LEASE_SECONDS if nbytes >= LEASED_BYTES else None)
        try:
            yield lease
        finally:
            lease.release()

    def _version(self, version: int | None) -> int:
        if version is not None:
            return version_number(version)
        latest = self.latest()
        if latest is None:
            raise NotFoundError("no version has been published yet", kind="version-missing", where=self.url)
        return latest


def _wanted(schema: Schema, names: Iterable[str] | None) -> list[str]:
    if names is None:
        return list(schema.names)
    return [names] if isinstance(names, str) else list(names)


def _info(first: Stored, further: Iterable[int | None], floor: int) -> VersionInfo:
    manifest = first.manifest
    ways = (manifest.base, *further)
    return VersionInfo(
        version=manifest.version,
        base=manifest.base,
        step=manifest.meta.get("step"),
        created=manifest.created,
        changed=manifest.changed,
        listed=manifest.listed,
        stored_bytes=manifest.stored_bytes,
        ways=tuple(base for base in ways if base is None or base >= floor),
        meta=manifest.meta,
    )


def _is_cut(version: int, line: VersionInfo | FormatError) -> bool:
    return isinstance(line, FormatError) and is_cut(version, line)


def _whole(line: VersionInfo | FormatError) -> VersionInfo:
    if isinstance(line, FormatError):
        raise line
    return line


def _comparable(before: Schema, after: Schema, name: str) -> bool:
    if name not in before:
        return False
    was, now = before[name], after[name]
    return (was.dtype, was.shape) == (now.dtype, now.shape)


def _batches(schema: Schema, names: list[str], batch_bytes: int) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for name in names:
        nbytes = schema[name].nbytes
        if batch and size + nbytes > batch_bytes:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += nbytes
    if batch:
        yield batch
