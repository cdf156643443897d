"""The receiver: live tensors that go from version to version, bit for bit or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from deltafmt.errors import BaseMismatchError, ChecksumError, LayoutError, NotFoundError, UnsupportedError
from deltafmt.layout import Layout
from deltafmt.read.chain import cheapest_chain
from deltafmt.read.history import History, Stored
from deltafmt.read.replica import Replica, StagedLink, Undo, result_digest
from deltafmt.store import open_store
from deltafmt.tensors import NamedTensors, named

UNDO_BYTES = 4 << 30
"""Default budget of the undo log; a step that needs more makes the version unknown before it writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What a check of live bits showed: tensors proven whole, and elements that only other ranks can prove."""

    version: int
    proven_tensors: int
    proven_domains: int
    unproven_domains: tuple[int, ...]

    @property
    def complete(self) -> bool:
        """Whether every local element is proven."""
        return not self.unproven_domains


class Receiver:
    """Moves live tensors from version to version of a lineage.

    `named_tensors` (CPU torch tensors, or numpy arrays) are written in place and must stay alive and where
    they are; without a `layout` each is filled by the stored tensor of its name. A receiver trusts no live
    bits until `adopt` or a first `advance`. Not for use from several threads at once.

    Raises `LayoutError` where tensors and layout do not fit the lineage, before anything is written.
    """

    def __init__(
        self,
        url: str,
        named_tensors: NamedTensors,
        *,
        layout: Layout | None = None,
        group: Any = None,
        storage_options: Mapping[str, Any] | None = None,
        threads: int | None = None,
        undo_bytes: int = UNDO_BYTES,
    ) -> None:
        if group is not None:
            raise UnsupportedError("receivers do not work in groups yet", kind="feature-unknown", where="group")
        self.history = History(open_store(url, storage_options))
        self._replica = Replica(self.history, _writable(named_tensors), layout, threads=threads)
        self._undo_bytes = undo_bytes
        self._held: Stored | None = None
        self._staged: Prepared | None = None
        self._closed = False

    @property
    def version(self) -> int | None:
        """The version that the live tensors hold; None while that is not known."""
        return None if self._held is None else self._held.manifest.version

    def adopt(self, version: int) -> int:
        """Take the live bits for `version` if they are: every digest is computed, no weights are read.

        Raises `BaseMismatchError` if they are not; what was held before is then unknown.
        """
        self._open()
        stored = self.history.first_way(version)
        self.invalidate()
        try:
            self._prove(stored)
        except ChecksumError as error:
            raise BaseMismatchError(error.message, kind=error.kind, where=error.where) from error
        self._held = stored
        return version

    def prefetch(self, version: int | None = None) -> int:
        """Fetch and check what `advance` will need; live tensors are not touched. Returns the version."""
        self._staged = self.prepare(version)
        return self._staged.version

    def advance(self, version: int | None = None, *, streaming: bool = False) -> int:
        """Bring the live tensors to `version`: by default to what was prefetched, else to the newest.

        From a known version every byte is on this machine and checked before the first write, and a failure
        restores all bits. `streaming` instead gives up the old version and writes what arrives, for an
        engine that is paused anyway. If the live bits turn out not to be the base they were taken for, one
        repair from an anchor is tried.
        """
        self._open()
        prepared = self._staged
        self._staged = None
        if prepared is None or (version is not None and prepared.version != version):
            prepared = self.prepare(version)
        if streaming:
            prepared.forget_old()
        try:
            prepared.apply()
        except ChecksumError as error:
            if error.kind != "content-mismatch" or prepared.cold:
                raise
            self._repair(prepared.version, error)
            return prepared.version
        prepared.keep()
        return prepared.version

    def prepare(self, version: int | None = None) -> Prepared:
        """`advance` in steps, for engines with many ranks: `apply`, then `keep` or `rollback`."""
        self._open()
        self._staged = None
        wanted = self.history.latest() if version is None else version
        if wanted is None:
            raise NotFoundError("no version has been published yet", kind="version-missing", where=self.history.store.url)
        held = self.version
        if held is not None and self._held is not None and wanted == held:
            return Prepared(self, self._held, [], cold=False)
        path = cheapest_chain(self.history.ways, held, wanted)
        return self._prepared(path)

    def verify(self) -> Proof:
        """Digest every live element against the held version; `ChecksumError` if one differs.

        Elements of domains that are held only in part are reported, not proven.
        """
        self._open()
        if self._held is None:
            raise BaseMismatchError("no version is held; advance or adopt first", kind="receiver-state")
        return self._prove(self._held)

    def invalidate(self) -> None:
        """Say that the live bits are no longer known; the next `advance` starts from an anchor."""
        self._held = None
        self._staged = None

    def close(self) -> None:
        """Drop what is staged; live tensors stay as they are."""
        self._staged = None
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        if self._closed:
            raise BaseMismatchError("the receiver is closed", kind="receiver-state")

    def _prepared(self, path: list[Stored]) -> Prepared:
        cold = path[0].manifest.base is None
        if not cold and self._held is not None and path[0].manifest.base_digest != self._held.digest:
            raise BaseMismatchError(
                "the way starts from another manifest than the one held",
                kind="base-digest",
                where=f"version {path[0].manifest.version}",
            )
        for stored in path:
            self._replica.mapped(stored.manifest)
        target = self.history.first_way(path[-1].manifest.version)
        return Prepared(self, target, [] if cold else self._replica.stage(path), cold=cold, path=path)

    def _repair(self, version: int, cause: ChecksumError) -> None:
        self.invalidate()
        try:
            path = cheapest_chain(self.history.ways, None, version)
        except NotFoundError:
            raise cause from None
        prepared = self._prepared(path)
        prepared.apply()
        prepared.keep()

    def _prove(self, stored: Stored) -> Proof:
        manifest = stored.manifest
        sums, whole, parts = self._replica.scan_tensors(manifest)
        mapped = self._replica.mapped(manifest)
        expected = np.stack((manifest.tensors.digest0, manifest.tensors.digest1), axis=1)
        wrong = whole & (sums != expected).any(axis=1)
        wrong[[row for row, spec in enumerate(mapped.schema) if spec.alias_of is not None]] = False
        if wrong.any():
            raise ChecksumError(
                "live weights are not those of the version",
                kind="content-mismatch",
                where=f"version {manifest.version}, {mapped.schema.tensors[int(wrong.argmax())].name!r}",
            )
        known = self._domain_digests(stored, set(parts))
        for domain, digest in parts.items():
            if (digest != known[domain]).any():
                raise ChecksumError(
                    "live weights are not those of the version",
                    kind="content-mismatch",
                    where=f"version {manifest.version}, domain {domain}",
                )
        table = mapped.table
        unproven = [
            domain
            for domain in np.flatnonzero(table.touched & ~table.full).tolist()
            if not whole[table.source[list(table.segment_rows(domain))]].all()
        ]
        return Proof(
            version=manifest.version,
            proven_tensors=int(whole.sum()),
            proven_domains=len(parts),
            unproven_domains=tuple(unproven),
        )

    def _domain_digests(self, stored: Stored, domains: set[int]) -> dict[int, Any]:
        """Digests of domains at a version, from the newest manifests that list them."""
        known: dict[int, Any] = {}
        tiling = stored.manifest.tiling
        while domains - known.keys():
            for domain in domains - known.keys():
                digest = result_digest(stored.manifest, domain)
                if digest is not None:
                    known[domain] = digest
            base = stored.manifest.base
            if base is None or stored.manifest.tiling != tiling:
                break
            stored = self.history.first_way(base)
        return known


class Prepared:
    """A version on its way in: `apply` writes it, then `keep` it or `rollback`."""

    def __init__(
        self, receiver: Receiver, target: Stored, staged: list[StagedLink], *, cold: bool, path: list[Stored] | None = None
    ) -> None:
        self._receiver, self._target, self._links = receiver, target, staged
        self._old, self._path = receiver._held, path or []
        self._undo: Undo | None = None if cold else Undo()
        self._state = "prepared"
        self.cold = cold
        if sum(link.undo_bytes for link in staged) > receiver._undo_bytes:
            self._undo = None

    @property
    def version(self) -> int:
        """The version that it leads to."""
        return self._target.manifest.version

    @property
    def nbytes(self) -> int:
        """Stored bytes that were fetched, or from an anchor will be."""
        if self.cold:
            return sum(self._receiver._replica.plan(stored).nbytes for stored in self._path)
        return sum(len(chunk.data) for link in self._links for chunk in link.chunks)

    def forget_old(self) -> None:
        """Do without an undo log: the version is unknown from the first write to the last."""
        self._undo = None

    def apply(self) -> None:
        """Write; after a failure the old bits are back, or without an undo log the version is unknown."""
        receiver = self._receiver
        if self._state != "prepared" or receiver._held is not self._old:
            raise BaseMismatchError("what was prepared is stale; prepare again", kind="receiver-state")
        self._state = "failed"
        if self._undo is None:
            receiver.invalidate()
        if self.cold:
            receiver._replica.load(self._path)
        else:
            receiver._replica.apply(self._links, self._undo)
        receiver._held = self._target
        self._state = "applied"

    def keep(self) -> None:
        """Settle on the new version; the undo log is dropped."""
        self._expect("applied")
        self._undo, self._links, self._state = None, [], "kept"

    def rollback(self) -> None:
        """Go back to the old bits; without an undo log the version becomes unknown."""
        self._expect("applied")
        self._state = "rolled back"
        self._receiver.invalidate()
        if self._undo is not None:
            self._undo.run()
            self._receiver._held = self._old

    def _expect(self, state: str) -> None:
        if self._state != state:
            raise BaseMismatchError(
                "call out of order", kind="receiver-state", expected=f"a version that is {state}", found=self._state
            )


def _writable(named_tensors: NamedTensors) -> dict[str, Any]:
    pairs = dict(named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors)
    for name, tensor in pairs.items():
        if isinstance(tensor, np.ndarray) and not tensor.flags.writeable:
            raise LayoutError("a read-only array cannot be a target", kind="target-strides", where=repr(name))
    return named(pairs)
