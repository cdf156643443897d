"""The writer: publishes versions of live tensors, each a delta from the one before, or an anchor."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Self

from deltafmt.given import instance, sort_of
from deltafmt.layout import Layout
from deltafmt.read.history import History
from deltafmt.schema import Schema
from deltafmt.shards import Shards
from deltafmt.store import Url, open_store
from deltafmt.tensors import NamedTensors
from deltafmt.write.commit import Files, prove_exclusive
from deltafmt.write.detector import Detector
from deltafmt.write.engine import Engine
from deltafmt.write.labels import labels_of
from deltafmt.write.local import Local
from deltafmt.write.metrics import PublishMetrics
from deltafmt.write.options import WriterOptions
from deltafmt.write.pending import Background, PendingVersion
from deltafmt.write.publish_dtype import PublishDtype
from deltafmt.write.snapshot import SnapshotDetector
from deltafmt.write.team import make_team


class Writer:
    """Publishes one policy to a root, from one process or, as one of several ranks, together with them.

    Tensors are named torch tensors (any device) or numpy arrays, given anew at each call; they must not
    change until the call returns. `publish_dtype` publishes FP32 masters as their cast: "bfloat16" for all
    of them, or a mapping from name patterns to dtypes. A writer opened on an existing root goes on from the
    version that was newest then. Calls from several threads are served one after another.

    Of `world_size` ranks each gives the parts that it holds: distributed tensors (`DTensor`) or `Shards` as
    they are, parts of its own making through `layout` (where parts of canonical tensors stand in its local
    ones; needs `schema`, unless the root has one), or whole tensors by name. Nothing is gathered. All ranks
    make the same calls. They talk by `group` (or torch.distributed's default group, if it has just
    these ranks), else through the root. Of parts that several ranks hold the lowest rank stores one, and the
    others' must be equal.

    Whatever a call raises, no version has come to exist, and the next call tries again; `CommitUnknownError` alone
    leaves that open, and the next call finds out. `SchemaError` and `LayoutError` tell of tensors that cannot be
    published as they are, `IncompleteError` of other ranks, `StoreError` of storage, and `UnsupportedError` of
    storage on which two writers could both win.
    """

    def __init__(
        self,
        url: Url,
        *,
        schema: Schema | None = None,
        rank: int = 0,
        world_size: int = 1,
        group: Any = None,
        layout: Layout | None = None,
        detector: Detector | None = None,
        publish_dtype: PublishDtype = None,
        options: WriterOptions | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        instance("schema", schema, Schema, "Schema.of(named_tensors) makes one")
        instance("layout", layout, Layout)
        instance("options", options, WriterOptions)
        if isinstance(detector, type):
            raise TypeError(
                f"detector must be an object, such as SnapshotDetector(), not {sort_of(detector)}"
            )
        options = options or WriterOptions()
        self._history = History(open_store(url, storage_options), trust=options.trusted)
        prove_exclusive(self._history.store)
        team = make_team(self._history, rank=rank, world_size=world_size, group=group, options=options)
        local = Local(schema, layout, publish_dtype, alone=team.world == 1)
        self._engine = Engine(self._history, team, local, detector or SnapshotDetector(), options)
        self._background = Background()
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"Writer({self._history.store.url!r}, version {self.version})"

    @property
    def version(self) -> int | None:
        """The version that the writer published or resumed last; None before the first."""
        return self._engine.version

    @property
    def next_version(self) -> int:
        """The number that the next version gets; 0 on a root that has none yet."""
        return self._engine.next_version

    @property
    def last_publish(self) -> PublishMetrics | None:
        """What this rank spent on the version that it published last, and how much of each tensor changed."""
        return self._engine.last_publish

    def publish_anchor(
        self,
        named_tensors: NamedTensors | Shards,
        *,
        step: int | None = None,
        meta: Mapping[str, Any] | None = None,
        store_data: bool = True,
        files: Files | None = None,
    ) -> int:
        """Publish all elements as the next version; makes the root if there is none. Returns the version.

        Without `store_data` only digests are stored: say in `meta` (as `hint`) where the bytes are, and
        receivers that hold them `adopt` the version. `files` (name -> bytes or path) are kept beside it;
        `NotFoundError` (`file-unreadable`) for a path that cannot be read.
        """
        with self._lock:
            self._background.finish()
            labels = labels_of(step, meta)
            return self._engine.publish(named_tensors, labels, files, anchor=True, data=store_data)

    def publish(
        self,
        named_tensors: NamedTensors | Shards,
        *,
        step: int | None = None,
        meta: Mapping[str, Any] | None = None,
        files: Files | None = None,
    ) -> int:
        """Publish what changed as the next version, also when nothing did. Returns the version.

        `files` None keeps the base's side files. New or reshaped tensors are stored whole, missing ones
        leave the schema. Raises `NotFoundError` (`version-missing`) before the first anchor, `SchemaError`
        (`dtype-mismatch`) where a dtype changes, and `CommitConflictError` if another writer took the number:
        nothing is changed then, and `resume` starts anew from its version.
        """
        with self._lock:
            self._background.finish()
            return self._engine.publish(named_tensors, labels_of(step, meta), files, anchor=False)

    def publish_async(
        self,
        named_tensors: NamedTensors | Shards,
        *,
        step: int | None = None,
        meta: Mapping[str, Any] | None = None,
        files: Files | None = None,
    ) -> PendingVersion:
        """`publish` that returns once all it needs is detected and encoded; the rest goes on by itself.

        The tensors may change as soon as this returns. A later call waits for the one before.
        """
        with self._lock:
            self._background.finish()
            task = self._engine.encoded(named_tensors, labels_of(step, meta), files)
            return self._background.start(task)

    def resume(self, version: int | None = None, named_tensors: NamedTensors | Shards | None = None) -> int:
        """Go on from the newest version: its bits are read, or proved to be those of the tensors given.

        Raises `CommitConflictError` for another version than the newest, `BaseMismatchError` for tensors
        that do not hold it.
        """
        with self._lock:
            self._background.finish()
            return self._engine.resume(version, named_tensors)

    def close(self) -> None:
        """Wait for what is under way; the copy of the tensors is dropped."""
        with self._lock:
            try:
                self._background.finish()
            finally:
                self._background.close()
                self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
