"""What a lineage's objects say, fetched when needed and kept while useful."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from deltafmt.errors import FormatError, NotFoundError, VersionGoneError
from deltafmt.format import keys
from deltafmt.format.checksum import blake2b
from deltafmt.format.constants import MAX_OBJECT_BYTES
from deltafmt.format.links import check_further_way
from deltafmt.format.objects import parse_lineage, parse_manifest, parse_schema, parse_tiling
from deltafmt.format.records import LineageRecord, Manifest
from deltafmt.format.signing import Verifier, check_signature
from deltafmt.format.validate import check_manifest
from deltafmt.read.newest import find_newest, read_hint
from deltafmt.schema import Schema
from deltafmt.store import Store
from deltafmt.tiling import Tiling

_KEPT_MANIFESTS = 32
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A manifest as it is stored: its key, the digest of its bytes, and what they say."""

    key: str
    digest: bytes
    manifest: Manifest


def is_cut(version: int, error: FormatError) -> bool:
    """Whether a version's manifest is not whole, which above the newest version means not committed."""
    return error.kind == "truncated" and error.where == keys.version_key(version)


class History:
    """The objects of one root, read lazily, checked on reading; never written.

    With keys to `trust`, manifests must be signed with one of them. May be used from several threads.
    """

    def __init__(
        self, store: Store, *, object_bytes: int = MAX_OBJECT_BYTES, trust: Sequence[Verifier] = ()
    ) -> None:
        self.store = store
        self.trust = tuple(trust)
        self.object_bytes = object_bytes
        self._manifests: OrderedDict[str, Stored] = OrderedDict()
        self._lock = threading.Lock()
        self._schemas: dict[bytes, Schema] = {}
        self._tilings: dict[bytes, Tiling] = {}
        self._floor = 0
        self._newest: int | None = None

    @cached_property
    def descriptor(self) -> LineageRecord:
        """The lineage's descriptor; `NotFoundError` (`lineage-missing`) where there is none."""
        try:
            data = self.store.read(keys.LINEAGE, limit=self.object_bytes)
        except NotFoundError as error:
            if self.versions():
                raise FormatError(
                    "versions are here, but their descriptor is gone",
                    kind="lineage-missing",
                    where=f"{keys.LINEAGE} of {self.store.url}",
                ) from error
            raise NotFoundError(
                "no lineage here; create one or check the path", kind="lineage-missing", where=self.store.url
            ) from error
        return parse_lineage(data, where=keys.LINEAGE)

    def versions(self) -> list[int]:
        """Committed versions that retention keeps, ascending."""
        floor = self.floor()
        found = (keys.version_of(key) for key in self.store.list(keys.VERSIONS))
        return sorted(version for version in found if version is not None and version >= floor)

    def floor(self) -> int:
        """The oldest version that retention keeps, by what the storage says now; 0 where nothing was removed.

        It rises only, and never above the newest version.
        """
        named = (keys.floor_of(key) for key in self.store.list(keys.FLOORS))
        self._floor = max(self._floor, *(version for version in named if version is not None), 0)
        return self._floor

    @property
    def known_floor(self) -> int:
        """The floor when it was looked at last."""
        return self._floor

    def gone(self, version: int) -> VersionGoneError:
        """The error for a version below the floor."""
        return VersionGoneError(
            "retention removed the version; start from a newer one",
            kind="version-gone",
            where=f"version {version} in {self.store.url}",
            expected=f"version {self._floor} or newer",
        )

    def latest(self) -> int | None:
        """The newest committed version; None before the first.

        Two or three requests where this handle has asked before, or a writer has left a hint; else a few more,
        the logarithm of the number of versions. A manifest that is empty or cut is not committed: some stores
        show an object before all of it is there.
        """
        start = read_hint(self.store) if self._newest is None else self._newest
        for tries_left in reversed(range(_TRIES)):
            newest = find_newest(start=start, exists=self._exists, floor=self.floor, listed=self.versions)
            try:
                self._newest = self._whole(newest)
            except NotFoundError as error:
                # A schema or tiling that is gone is damage; a manifest was collected, and newer ones are there.
                if error.kind == "object-missing" or not tries_left:
                    raise
                start = None
            else:
                return self._newest
        raise AssertionError

    def _whole(self, version: int | None) -> int | None:
        """The newest version up to this one whose manifest is not cut."""
        while version is not None:
            try:
                self.first_way(version)
            except FormatError as error:
                if is_cut(version, error):
                    version = version - 1 if version else None
                    continue
            break
        return version

    def _exists(self, version: int) -> bool:
        return self.store.exists(keys.version_key(version))

    def first_way(self, version: int, data: bytes | memoryview | None = None) -> Stored:
        """The version's own manifest; `NotFoundError` (`version-missing`) if it does not exist.

        `VersionGoneError` (`version-gone`) if it did. `data` are the manifest's bytes where they have just been read.
        """
        return self.stored(keys.version_key(version), version, way=False, data=data)

    def further_ways(self, version: int) -> list[Stored]:
        """The ways that were added beside the first."""
        found = []
        for base in self.further_bases(version):
            # One that was listed may have been taken back since.
            with suppress(NotFoundError):
                found.append(self.further_way(version, base))
        return found

    def further_bases(self, version: int) -> list[int | None]:
        """Where the further ways start, by their names alone; ascending, an anchor (None) last."""
        named = (keys.way_of(key) for key in self.store.list(keys.ways_folder(version)))
        return [found[1] for found in named if found is not None and found[0] == version]

    def further_way(self, version: int, base: int | None) -> Stored:
        """One way that was added; `NotFoundError` (`version-missing`) if it does not exist."""
        key = keys.way_key(version, base)
        stored = self.stored(key, version, way=True)
        if stored.manifest.base != base:
            raise FormatError("way from another base than its name says", kind="version-mismatch", where=key)
        first = self.first_way(version)
        if stored.manifest.target_digest != first.digest:
            raise FormatError("way to another manifest of the version", kind="target-digest", where=key)
        check_further_way(stored.manifest, first.manifest, where=key)
        return stored

    def ways(self, version: int) -> list[Stored]:
        """All ways to the version, its first one first."""
        return [self.first_way(version), *self.further_ways(version)]

    def schema(self, digest: bytes) -> Schema:
        if digest not in self._schemas:
            key = keys.schema_key(digest)
            data = self.store.read(key, limit=self.object_bytes)
            self._schemas[digest] = parse_schema(data, where=key, digest=digest)
        return self._schemas[digest]

    def tiling(self, digest: bytes, schema: bytes) -> Tiling:
        if digest not in self._tilings:
            key = keys.tiling_key(digest)
            data = self.store.read(key, limit=self.object_bytes)
            self._tilings[digest] = parse_tiling(
                data, self.schema(schema), where=key, digest=digest, schema_digest=schema
            )
        return self._tilings[digest]

    def know(self, schemas: Mapping[bytes, Schema], tilings: Mapping[bytes, Tiling]) -> None:
        """Take in contents by their digests, so that they need not be read."""
        for digest, schema in schemas.items():
            self._schemas.setdefault(digest, schema)
        for digest, tiling in tilings.items():
            self._tilings.setdefault(digest, tiling)

    def remember(self, stored: Stored) -> None:
        """Take in a manifest that was just read or committed."""
        with self._lock:
            self._manifests[stored.key] = stored
            while len(self._manifests) > _KEPT_MANIFESTS:
                self._manifests.popitem(last=False)

    def stored(self, key: str, version: int, *, way: bool, data: bytes | memoryview | None = None) -> Stored:
        """A manifest by its key, checked against its schema and tiling; that of a further way if `way`."""
        with self._lock:
            if key in self._manifests:
                self._manifests.move_to_end(key)
                return self._manifests[key]
        try:
            data = self.store.read(key, limit=self.object_bytes) if data is None else data
        except NotFoundError as error:
            if 0 <= version < self.floor():
                raise self.gone(version) from error
            raise NotFoundError(
                "no such version", kind="version-missing", where=f"version {version} ({key})"
            ) from error
        manifest = parse_manifest(data, way=way, where=key, limit=self.object_bytes)
        if self.trust:
            check_signature(data, manifest.signature, self.trust, where=key)
        if manifest.version != version:
            raise FormatError(
                "manifest of another version than its name says",
                kind="version-mismatch",
                where=key,
                expected=version,
                found=manifest.version,
            )
        if manifest.lineage != self.descriptor.lineage:
            raise FormatError("manifest of another lineage", kind="lineage-mismatch", where=key)
        schema = self.schema(manifest.schema)
        check_manifest(manifest, schema, self.tiling(manifest.tiling, manifest.schema), where=key)
        stored = Stored(key=key, digest=blake2b(data), manifest=manifest)
        self.remember(stored)
        return stored
