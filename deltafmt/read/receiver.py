"""The receiver: live tensors that go from version to version, bit for bit or not at all."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

from deltafmt.errors import BaseMismatchError, ChecksumError, IncompleteError, NotFoundError
from deltafmt.given import instance, version_number
from deltafmt.layout import Layout
from deltafmt.read.apply import Undo
from deltafmt.read.claim import claimed_chain, has_vanished, unless_gone
from deltafmt.read.follow import Follower, OnVersion
from deltafmt.read.group import Group
from deltafmt.read.history import History, Stored
from deltafmt.read.lease import Lease
from deltafmt.read.options import ReadOptions
from deltafmt.read.prepared import Prepared, Step
from deltafmt.read.proof import Proof, audit, prove
from deltafmt.read.replica import Replica, StagedLink
from deltafmt.read.targets import Targets
from deltafmt.store import Url, open_store
from deltafmt.tensors import NamedTensors

_LOG = logging.getLogger("deltafmt")
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _one_at_a_time(
    method: Callable[Concatenate[Receiver, _P], _R],
) -> Callable[Concatenate[Receiver, _P], _R]:
    """Serve calls from several threads one after another."""

    @wraps(method)
    def locked(self: Receiver, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


class Receiver:
    """Moves live tensors from version to version of a lineage.

    `named_tensors` (torch tensors or numpy arrays) are written in place and must stay alive and where they
    are; without a `layout` each is filled by the stored tensor of its name. A receiver trusts no live bits
    until `adopt` or a first `advance`. Calls from several threads are served one after another.

    With a `group`, a `torch.distributed` group or anything with an `all_gather_object(value)` that returns the
    values of all ranks, `advance` is a collective call: all ranks end at the version, or none of them does.
    Everything else is each rank's own.

    Raises `LayoutError` where tensors and layout do not fit the newest version, before anything is written, and
    `NotFoundError` (`lineage-missing`) where the root holds no lineage.
    """

    def __init__(
        self,
        url: Url,
        named_tensors: NamedTensors,
        *,
        layout: Layout | None = None,
        group: Any = None,
        storage_options: Mapping[str, Any] | None = None,
        options: ReadOptions | None = None,
    ) -> None:
        instance("layout", layout, Layout)
        instance("options", options, ReadOptions)
        self._group = None if group is None else Group(group)
        self.held: Stored | None = None
        self._lock = threading.RLock()
        self._follower: Follower | None = None
        self._options = options or ReadOptions()
        self._history = History(open_store(url, storage_options), trust=self._options.trust)
        self._lease = Lease(self._history, self._options.lease_seconds)
        self._replica = Replica(self._history, Targets(named_tensors), layout, options=self._options)
        self._staged: Prepared | None = None
        self._closed = False
        self._audits = 0
        newest = self._history.latest()
        schema = (
            self._history.descriptor.schema
            if newest is None
            else self._history.first_way(newest).manifest.schema
        )
        self._replica.views.check(schema)

    def __repr__(self) -> str:
        return f"Receiver({self._history.store.url!r}, version {self.version})"

    @property
    def version(self) -> int | None:
        """The version that the live tensors hold; None while that is not known."""
        return None if self.held is None else self.held.manifest.version

    @_one_at_a_time
    def adopt(self, version: int) -> int:
        """Take the live bits for `version` if they are: they are digested, and no weights are read.

        What this receiver holds in part is taken on trust; `verify` tells what that is. Raises
        `BaseMismatchError` if the bits are others; the version is then unknown.
        """
        self._check_open()
        stored = self._history.first_way(version_number(version))
        self.invalidate()
        try:
            prove(self._replica, stored)
        except ChecksumError as error:
            raise BaseMismatchError(error.message, kind=error.kind, where=error.where) from error
        self.held = stored
        self._lease.cover(version)
        return version

    @_one_at_a_time
    def prefetch(self, version: int | None = None) -> int:
        """Fetch and check what `advance` will need; live tensors are not touched. Returns the version.

        Where no version is held yet, bytes go straight into the tensors later, and only the plan is made.
        """
        self._staged = None
        self._staged = self.prepare(version)
        return self._staged.version

    @_one_at_a_time
    def advance(self, version: int | None = None, *, streaming: bool = False) -> int:
        """Bring the live tensors to `version`: by default to what was prefetched, else to the newest.

        From a known version every byte is on this machine and checked before the first write, and a failure
        restores all bits. With `streaming`, for an engine that is paused anyway, each chunk is written as
        it arrives; a failure restores all bits, too.

        If the outcome is not the version's and the live bits prove not to be those of the version held, or if
        the audit of a few changed domains (`ReadOptions.audit_domains`) finds bits that drifted, they are
        repaired from an anchor, once. Where retention has removed the version held, or what leads on from it,
        the newest anchor takes its place; `VersionGoneError` says that it has removed `version`.

        Raises `NotFoundError` (`version-missing`) where there is no such version, or none yet.

        In a group, each rank fetches and checks, then writes, then keeps, and goes on only when all have done
        so; where one has not, all go back to what they held (or to no known version, if the old bits were not
        kept). That rank raises what went wrong, and the others `IncompleteError`.
        """
        self._check_open()
        if self._group is not None:
            version = self._common(self._group, version)
        prepared = self._voted(lambda: self._ready(version, streaming=streaming))
        applied = self._voted(
            lambda: self._applied(prepared, version, streaming=streaming), Prepared.rollback
        )
        applied.keep()
        self._replica.views.forget(applied.schema)
        return self._audited(applied.version)

    def _ready(self, version: int | None, *, streaming: bool) -> Prepared:
        """What leads to the version: what was prefetched where that is still good."""
        prepared, self._staged = self._staged, None
        if prepared is None or prepared.stale or version not in (None, prepared.version):
            prepared = self._prepare(version, streaming=streaming)
        return prepared

    def _applied(self, prepared: Prepared, version: int | None, *, streaming: bool) -> Prepared:
        """What was written in the end: the step prepared, or where the base had drifted one from an anchor."""
        try:
            prepared = self._written(prepared, version, streaming=streaming)
        except ChecksumError as error:
            if error.kind != "content-mismatch" or self.held is None or self._is_proven(self.held):
                raise
            return self._from_anchor(prepared.version, error)
        except BaseMismatchError as error:
            if error.kind == "cast-inexact":
                self.held = None
            raise
        return prepared

    def _common(self, group: Group, version: int | None) -> int | None:
        """The version that all ranks go to: the one asked for, else the first rank's staged or newest one."""
        if not group.same(version):
            raise IncompleteError(
                "ranks of the group asked for different versions", kind="rank-disagrees", found=version
            )
        if version is not None:
            return version
        staged = self._staged
        ours = self._voted(
            lambda: self._history.latest() if staged is None or staged.stale else staged.version
        )
        return cast("int | None", group.first(ours))

    def _voted(self, work: Callable[[], _R], undo: Callable[[_R], None] | None = None) -> _R:
        """What `work` returns, if it succeeds on every rank of the group; where it does not, `undo` follows."""
        if self._group is None:
            return work()
        results: list[_R] = []
        error: Exception | None = None
        try:
            results.append(work())
        except Exception as caught:  # noqa: BLE001 (raised again by the vote)
            error = caught
        try:
            self._group.settle(error)
        except BaseException:
            if results and undo is not None:
                undo(results[0])
            raise
        return results[0]

    @_one_at_a_time
    def prepare(self, version: int | None = None) -> Prepared:
        """`advance` in parts, for engines with many ranks: `apply`, then `keep` or `rollback`.

        Apply nothing on any rank before all have prepared, and keep nothing before all have applied.
        """
        self._check_open()
        self._staged = None
        return self._prepare(version, streaming=False)

    @_one_at_a_time
    def verify(self) -> Proof:
        """Digest every live element; `ChecksumError` if one is not the held version's, which is then unknown.

        Elements of domains that are held only in part are not proven; the result names them.
        """
        self._check_open()
        if self.held is None:
            raise BaseMismatchError("no version is held; advance or adopt first", kind="receiver-state")
        try:
            return prove(self._replica, self.held)
        except ChecksumError:
            self.invalidate()
            raise

    @_one_at_a_time
    def invalidate(self) -> None:
        """Say that the live bits are no longer known; the next `advance` starts from an anchor."""
        self.held = None
        self._staged = None

    @_one_at_a_time
    def follow(self, *, poll_seconds: float = 1.0, on_version: OnVersion | None = None) -> Follower:
        """Look for new versions every `poll_seconds` and stage each in the background, until stopped.

        `on_version(version)` is called from the background thread when a version is staged; it may call
        `advance`, or tell the engine to pause and do so. Without it `advance` takes what is staged by then.
        The pauses vary, and grow while storage fails; `Follower.error` tells why. Closing the receiver
        stops it.
        """
        self._check_open()
        if self._follower is not None and self._follower.running:
            raise BaseMismatchError(
                "the receiver is following already; stop that first", kind="receiver-state"
            )
        self._follower = Follower(self, poll_seconds, on_version)
        return self._follower

    def newest(self) -> int | None:
        """The newest version in storage; None before the first. Keeps the lease on the version held alive."""
        self._lease.renew(self.version)
        return self._history.latest()

    def stage_behind(self, version: int, had: Sequence[StagedLink]) -> Prepared:
        """`prefetch` while other calls are served: they wait for metadata, but not for weights.

        What is in `had` is not fetched again. The result is stale, and not what `advance` takes, if the
        version held changed meanwhile.
        """
        with self._lock:
            self._check_open()
            step = self._planned(version, streaming=False)
            prepared = Prepared(self, self._replica, step)
        with self._lease.at_work():
            step.stage(self._replica, had)
        with self._lock:
            if not prepared.stale and not self._closed:
                self._staged = prepared
        return prepared

    def close(self) -> None:
        """Drop what is staged and stop following; live tensors stay as they are."""
        follower = self._follower
        with self._lock:
            self._staged = None
            self._closed = True
        if follower is not None:
            follower.stop()
        self._lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise BaseMismatchError("the receiver is closed", kind="receiver-state")

    def _prepare(self, version: int | None, *, streaming: bool) -> Prepared:
        def prepare() -> Prepared:
            step = self._planned(version, streaming=streaming)
            with self._lease.at_work():
                step.stage(self._replica)
            return Prepared(self, self._replica, step)

        return unless_gone(self._lease, version, prepare)

    def _written(self, prepared: Prepared, version: int | None, *, streaming: bool) -> Prepared:
        """Apply; if what is read only now has been removed since it was looked up, once more from the start."""
        try:
            with self._lease.at_work():
                prepared.apply()
        except NotFoundError as error:
            if not has_vanished(error, version):
                raise
            self._lease.void()
            self._history.floor()
            _LOG.info("what led to version %d was removed; looking for another way", prepared.version)
            prepared = self._prepare(version, streaming=streaming)
            with self._lease.at_work():
                prepared.apply()
        return prepared

    def _planned(self, version: int | None, *, streaming: bool) -> Step:
        wanted = self._history.latest() if version is None else version_number(version)
        if wanted is None:
            raise NotFoundError(
                "no version has been published yet", kind="version-missing", where=self._history.store.url
            )
        held = self.held
        if held is not None and held.manifest.version == wanted:
            self._lease.renew(wanted)
            return Step(target=held, links=[], direct=False, undo=Undo())
        path = self._path(wanted)
        target = self._history.first_way(wanted)
        links = self._replica.links(path, held)
        reversible = (
            held is not None and sum(link.plan.undo_bytes for link in links) <= self._options.undo_bytes
        )
        # An anchor that cannot be undone leaves nothing to lose by not waiting for the last byte.
        direct = streaming or (not reversible and path[0].manifest.base is None)
        return Step(target=target, links=links, direct=direct, undo=Undo() if reversible else None)

    def _path(self, wanted: int) -> list[Stored]:
        held = self.held
        if held is not None:
            path = claimed_chain(self._lease, wanted, held)
            if held.manifest.version < self._lease.lowest:
                _LOG.info(
                    "version %d, which is held, was removed; going to version %d from the anchor of version %d",
                    held.manifest.version,
                    wanted,
                    path[0].manifest.version,
                )
            if self._replica.views.carried(held.manifest.schema, [stored.manifest.schema for stored in path]):
                return path
        return claimed_chain(self._lease, wanted)

    def _audited(self, version: int) -> int:
        """Digest some of what has changed; live bits that drifted before are repaired from an anchor."""
        assert self.held is not None
        try:
            audit(self._replica, self.held, self._audits)
        except ChecksumError as error:
            return self._repaired(version, error)
        self._audits += 1
        return version

    def _is_proven(self, stored: Stored) -> bool:
        try:
            prove(self._replica, stored)
        except ChecksumError:
            return False
        return True

    def _repaired(self, version: int, cause: ChecksumError) -> int:
        self._from_anchor(version, cause).keep()
        return version

    def _from_anchor(self, version: int, cause: ChecksumError) -> Prepared:
        """The version written from an anchor, whatever was there; `cause` if there is none."""
        self.held = None
        try:
            prepared = self._prepare(version, streaming=False)
        except NotFoundError:
            raise cause from None
        prepared.apply()
        return prepared
