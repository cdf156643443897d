"""Looking at every object of a lineage and telling what is damaged and what that takes down."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from deltafmt.errors import DeltafmtError, FormatError, NotFoundError, StoreError
from deltafmt.export import read_side_file
from deltafmt.format import keys
from deltafmt.format.constants import TRAILER_BYTES
from deltafmt.format.links import check_further_way, check_recut
from deltafmt.format.objects import parse_footer
from deltafmt.format.records import Footer, Manifest
from deltafmt.format.shard import footer_offset
from deltafmt.read.history import History, Stored
from deltafmt.read.lease import Lease
from deltafmt.read.materialize import allocate, follow, materialize, tensor_digests
from deltafmt.read.sums import check_sums
from deltafmt.store import Range


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A damaged or missing object.

    Its key, the reason code, the error's text, and the versions that cannot be read because of it.
    """

    key: str
    kind: str
    message: str
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of `Lineage.verify`: versions looked at, bytes of shards read, and what is wrong."""

    versions: tuple[int, ...]
    checked_bytes: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(slots=True)
class _Finding:
    key: str
    error: DeltafmtError
    ways: set[str]
    """Keys of the manifests of the ways that need the object."""


@dataclass(slots=True)
class _Survey:
    history: History
    progress: Callable[[int, int], None] | None
    ways: dict[str, Stored] = field(default_factory=dict)
    broken: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    """(version, base) of ways whose manifest cannot be read, by key; base -1 where unknown."""
    findings: list[_Finding] = field(default_factory=list)
    done: int = 0
    total: int = 0

    @property
    def stored(self) -> dict[str, Stored]:
        """The ways whose shards must be there: not those from versions that retention has removed."""
        floor = self.history.known_floor
        return {key: way for key, way in self.ways.items() if not _starts_below(way.manifest.base, floor)}

    def advance(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)


def verify_lineage(
    lease: Lease,
    version: int | None,
    *,
    deep: bool,
    progress: Callable[[int, int], None] | None,
) -> Report:
    """See `Lineage.verify`."""
    history = lease.history
    survey = _Survey(history, progress)
    try:
        history.descriptor  # noqa: B018 (read for its checks)
    except NotFoundError:
        raise
    except FormatError as error:
        survey.findings.append(_Finding(keys.LINEAGE, error, set()))
        everything = tuple(history.versions())
        return Report(versions=everything, checked_bytes=0, problems=tuple(_problems(survey, everything)))
    versions = history.versions()
    if versions and not lease.cover(versions[0]):
        versions = [number for number in versions if number >= history.known_floor]
    if version is not None and version not in versions:
        if 0 <= version < history.known_floor:
            raise history.gone(version)
        raise NotFoundError("no such version", kind="version-missing", where=f"version {version}")
    for number in versions:
        _read_ways(survey, number)
    _find_missing(survey, versions)
    if version is not None:
        _keep_needed(survey, version)
    _check_links(survey)
    survey.total = sum(way.manifest.stored_bytes for way in survey.stored.values()) * (2 if deep else 1)
    for key, way in survey.stored.items():
        _check_shards(survey, key, way.manifest)
    _check_files(survey)
    if deep:
        _replay(survey)
    looked_at = sorted(
        {way.manifest.version for way in survey.ways.values()} | {v for v, _ in survey.broken.values()}
    )
    return Report(
        versions=tuple(looked_at), checked_bytes=survey.done, problems=tuple(_problems(survey, versions))
    )


def _starts_below(base: int | None, floor: int) -> bool:
    return base is not None and base < floor


def _read_ways(survey: _Survey, version: int) -> None:
    """Parse the manifests of a version one by one, so that each is blamed for itself only."""
    history = survey.history
    found = [keys.version_key(version), *history.store.list(keys.ways_folder(version))]
    for key in found:
        named = keys.way_of(key)
        if named is None and key != keys.version_key(version):
            continue
        if named is not None and _starts_below(named[1], history.known_floor):
            continue
        try:
            survey.ways[key] = history.stored(key, version, way=named is not None)
        except StoreError:
            raise
        except DeltafmtError as error:
            survey.broken[key] = (version, -1 if named is None else named[1])
            # A damaged schema or tiling is named itself; the manifest that led to it is whole.
            culprit = str(error.where).split(",")[0]
            shared = culprit.startswith((keys.SCHEMAS, keys.TILINGS))
            survey.findings.append(_Finding(culprit if shared else key, error, {key}))


def _find_missing(survey: _Survey, versions: list[int]) -> None:
    """Name the manifests that others build on, or that stand between others, and that are gone."""
    bases = {way.manifest.base for way in survey.ways.values()}
    between = range(versions[0], versions[-1]) if versions else ()
    floor = survey.history.known_floor
    named = {base for base in bases if base is not None and not _starts_below(base, floor)}
    for number in sorted(named.union(between).difference(versions)):
        key = keys.version_key(number)
        survey.broken[key] = (number, -1)
        error = NotFoundError("manifest is gone", kind="version-missing", where=key)
        survey.findings.append(_Finding(key, error, {key}))


def _check_links(survey: _Survey) -> None:
    """Base and target digests against the manifests that they name."""
    for key, way in survey.ways.items():
        try:
            _check_link(survey, key, way.manifest)
        except FormatError as error:
            survey.findings.append(_Finding(key, error, {key}))


def _check_link(survey: _Survey, key: str, manifest: Manifest) -> None:
    base = None if manifest.base is None else survey.ways.get(keys.version_key(manifest.base))
    if base is not None:
        if base.digest != manifest.base_digest:
            raise FormatError(
                "link to another manifest", kind="base-differs", where=key, found=base.digest.hex()
            )
        tiling = survey.history.tiling(manifest.tiling, manifest.schema)
        check_recut(manifest, base.manifest, len(tiling), where=key)
    version = survey.ways.get(keys.version_key(manifest.version))
    if manifest.is_way and version is not None:
        if version.digest != manifest.target_digest:
            raise FormatError(
                "link to another manifest", kind="target-digest", where=key, found=version.digest.hex()
            )
        check_further_way(manifest, version.manifest, where=key)


def _keep_needed(survey: _Survey, version: int) -> None:
    """Drop the ways that no chain to `version` can use."""
    needed, queue = set(), [version]
    while queue:
        number = queue.pop()
        if number in needed:
            continue
        needed.add(number)
        queue += [
            way.manifest.base
            for way in survey.ways.values()
            if way.manifest.version == number and way.manifest.base is not None
        ]
    survey.ways = {key: way for key, way in survey.ways.items() if way.manifest.version in needed}
    kept = {key for key, (number, _) in survey.broken.items() if number in needed}
    survey.broken = {key: value for key, value in survey.broken.items() if key in kept}
    survey.findings = [f for f in survey.findings if not f.ways or f.ways & (kept | survey.ways.keys())]


def _check_shards(survey: _Survey, key: str, manifest: Manifest) -> None:
    store = survey.history.store
    sizes = zip(manifest.shard_keys, manifest.shards.size.tolist(), strict=True)
    for row, (shard, size) in enumerate(sizes):
        writer = int(manifest.shards.writer[row])
        try:
            found = store.size(shard)
            if found != size:
                raise FormatError(
                    "shard of another size", kind="truncated", where=shard, expected=size, found=found
                )
            _check_footer(store_footer(survey.history, shard, size), manifest, row, writer, shard)
        except DeltafmtError as error:
            if error.kind == "store-unreachable":
                raise
            survey.findings.append(_Finding(shard, error, {key}))
        survey.advance(size)


def store_footer(history: History, shard: str, size: int) -> Footer:
    """The footer of a stored shard."""
    store = history.store
    trailer = next(iter(store.read_ranges([Range(shard, max(0, size - TRAILER_BYTES), size)])))
    offset = footer_offset(trailer, size, where=shard)
    data = next(iter(store.read_ranges([Range(shard, offset, size - TRAILER_BYTES)])))
    return parse_footer(data, where=f"{shard}, footer")


def _check_footer(footer: Footer, manifest: Manifest, row: int, writer: int, where: str) -> None:
    chunks = manifest.chunks.take(manifest.chunks.shard == row)
    same = (footer.lineage, footer.version, footer.base, footer.attempt, footer.writer) == (
        manifest.lineage,
        manifest.version,
        manifest.base,
        manifest.attempt,
        writer,
    )
    own = [
        (name, getattr(footer.chunks, name)) for name, _ in footer.chunks.column_types() if name != "shard"
    ]
    same = same and len(footer.chunks) == len(chunks)
    if not same or any((values != getattr(chunks, name)).any() for name, values in own):
        raise FormatError("footer disagrees with the manifest", kind="footer-mismatch", where=where)


def _check_files(survey: _Survey) -> None:
    """Read each side file once, however many versions have it."""
    named: dict[bytes, dict[str, set[int]]] = {}
    for way in survey.ways.values():
        for name, (digest, _) in way.manifest.files.items():
            named.setdefault(digest, {}).setdefault(name, set()).add(way.manifest.version)
    for digest, uses in named.items():
        try:
            read_side_file(survey.history.store, digest)
        except DeltafmtError as error:
            places = "; ".join(f"{name!r} of {_span(versions)}" for name, versions in uses.items())
            error.message = f"side file {places}: {error.message}"
            # Weights can be read without it, so that no version is lost.
            survey.findings.append(_Finding(keys.file_key(digest), error, set()))


def _span(versions: set[int]) -> str:
    first, last = min(versions), max(versions)
    return f"version {first}" if first == last else f"{len(versions)} versions from {first} to {last}"


def _replay(survey: _Survey) -> None:
    """Decode every way and prove its result by digest, in memory of the model's size.

    Versions are taken in order, so that a delta from the version before is applied to what is at hand.
    """
    stored = survey.stored
    owners = {shard: key for key, way in stored.items() for shard in way.manifest.shard_keys}
    current: _Current | None = None
    for key, way in sorted(stored.items(), key=lambda item: (item[1].manifest.version, item[0])):
        if not way.manifest.data:
            continue
        try:
            current = _replay_way(survey.history, way, current)
        except DeltafmtError as error:
            current = None
            _blame(survey, owners, key, error)
            _decode_alone(survey, owners, key, way)
        survey.advance(way.manifest.stored_bytes)


def _blame(survey: _Survey, owners: dict[str, str], key: str, error: DeltafmtError) -> None:
    """Find the object that an error of the replay is about; one that is missing has been named already."""
    if error.kind == "store-unreachable":
        raise error
    culprit = str(error.where).split(",")[0]
    blamed = culprit if culprit in owners else key
    known = any(finding.key == blamed for finding in survey.findings)
    if not known and not isinstance(error, NotFoundError):
        survey.findings.append(_Finding(blamed, error, {owners.get(blamed, key)}))


def _decode_alone(survey: _Survey, owners: dict[str, str], key: str, way: Stored) -> None:
    """Look for damage in a way's own chunks, where the replay got no further than its base."""
    history = survey.history
    try:
        follow(history, way, allocate(history.schema(way.manifest.schema)))
    except DeltafmtError as error:
        # That the content is wrong is no news: it is built on nothing.
        if error.kind != "content-mismatch":
            _blame(survey, owners, key, error)


@dataclass(frozen=True, slots=True)
class _Current:
    """Tensors that hold a version."""

    version: int
    schema: bytes
    tensors: dict[str, torch.Tensor]


def _replay_way(history: History, way: Stored, current: _Current | None) -> _Current:
    manifest = way.manifest
    at_hand = current is not None and (current.version, current.schema) == (manifest.base, manifest.schema)
    tensors = (
        current.tensors if current is not None and at_hand else allocate(history.schema(manifest.schema))
    )
    if manifest.base is not None and not at_hand:
        _base_into(history, manifest, tensors)
    follow(history, way, tensors)
    sums = tensor_digests(history, way, tensors)
    schema = history.schema(manifest.schema)
    check_sums(schema, sums, way, schema.owner_rows == np.arange(len(schema)))
    return _Current(manifest.version, manifest.schema, tensors)


def _base_into(history: History, manifest: Manifest, tensors: dict[str, torch.Tensor]) -> None:
    """Read the base's tensors into those of the result, as far as both have them alike."""
    assert manifest.base is not None
    before = history.schema(history.first_way(manifest.base).manifest.schema)
    after = history.schema(manifest.schema)
    common = {
        name: tensor
        for name, tensor in tensors.items()
        if name in before
        and (before[name].dtype, before[name].shape) == (after[name].dtype, after[name].shape)
    }
    materialize(history, manifest.base, common, check_tensors=False)


def _problems(survey: _Survey, versions: Iterable[int]) -> list[Problem]:
    whole = _readable(survey, set())
    everything = set(versions)
    problems = []
    for finding in _by_object(survey.findings):
        lost = everything if finding.key == keys.LINEAGE else whole - _readable(survey, finding.ways)
        problems.append(
            Problem(
                key=finding.key,
                kind=finding.error.kind,
                message=str(finding.error),
                versions=tuple(sorted(lost)),
            )
        )
    return problems


def _by_object(findings: list[_Finding]) -> list[_Finding]:
    """One finding per object: what was found first, and all ways that need it."""
    merged: dict[str, _Finding] = {}
    for finding in findings:
        merged.setdefault(finding.key, _Finding(finding.key, finding.error, set())).ways |= finding.ways
    return list(merged.values())


def _readable(survey: _Survey, without: set[str]) -> set[int]:
    """Versions that could be read if only the ways `without` were lost, all other damage being undone.

    A version whose first way has lost its chunks can still be had by another one, as long as its manifest
    can be read.
    """
    unreadable = without & survey.broken.keys()
    ways = {
        key: (way.manifest.version, way.manifest.base, way.manifest.data) for key, way in survey.ways.items()
    }
    ways |= {key: (version, base, True) for key, (version, base) in survey.broken.items()}
    exists = {
        version
        for key, (version, _, _) in ways.items()
        if key == keys.version_key(version) and key not in unreadable
    }
    readable: set[int] = set()
    grown = True
    while grown:
        grown = False
        for key, (version, base, data) in ways.items():
            start = base in readable or (base is None and data) or base == -1
            if key not in without and version in exists and version not in readable and start:
                readable.add(version)
                grown = True
    return readable
