"""What one rank spent on a version, and how much of each tensor changed."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from deltafmt.write.cut import Cut
from deltafmt.write.pack import DomainResult, WayParts

_LOG = logging.getLogger("deltafmt")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMetrics:
    """Elements of a tensor that this rank stores, and how many of them changed (of an anchor: all).

    `changed` is None where only the sum over several small tensors is known. A detector that does not know
    old bits counts what it lists.
    """

    elements: int
    changed: int | None

    @property
    def density(self) -> float | None:
        return None if self.changed is None else self.changed / self.elements


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishMetrics:
    """One rank's part of a version that is published.

    `seconds` is from the call to the commit, as a clock on the wall tells them. Detection and encoding go on in
    several threads, whose seconds are summed up; a detector that does both at once has all in
    `detect_seconds`. `upload_seconds` are spent handing the shard to storage, `commit_seconds` on waiting for
    other ranks, and on the manifest. `stored_bytes` is the size of this rank's shard, `listed` the elements in
    it, `changed` those whose bits differ (None where old bits are not known).
    """

    version: int
    base: int | None
    step: int | None
    rank: int
    seconds: float
    detect_seconds: float
    encode_seconds: float
    upload_seconds: float
    commit_seconds: float
    stored_bytes: int
    changed: int | None
    listed: int
    tensors: Mapping[str, TensorMetrics]

    @property
    def elements(self) -> int:
        """Elements that this rank stores."""
        return sum(tensor.elements for tensor in self.tensors.values())

    @property
    def changed_share(self) -> float | None:
        """Elements that changed, of those that this rank stores; None where it is not known, or stores none."""
        elements = self.elements
        return None if self.changed is None or not elements else self.changed / elements

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by what they were spent on; `all` of them by the clock on the wall."""
        return {
            "all": self.seconds,
            "detect": self.detect_seconds,
            "encode": self.encode_seconds,
            "upload": self.upload_seconds,
            "commit": self.commit_seconds,
        }


OnPublish = Callable[[PublishMetrics], None]


@dataclass(kw_only=True)
class Gauge:
    """Takes the measurements while one version is made."""

    started: float = field(default_factory=time.monotonic)
    waited: float = 0.0
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _changed: dict[int, int | None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time that passes inside to a stage; from any thread."""
        before = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self.spent[name] += time.monotonic() - before

    def watch(self, cut: Cut, results: Iterable[DomainResult]) -> Iterator[DomainResult]:
        """The results as they are; what changed is counted, and the time until each is there."""
        results = iter(results)
        while True:
            before = time.monotonic()
            result = next(results, None)
            self.waited += time.monotonic() - before
            if result is None:
                return
            self._count(cut, result)
            yield result

    def record(
        self, cut: Cut, parts: WayParts, *, version: int, base: int | None, step: int | None, rank: int
    ) -> PublishMetrics:
        """All measurements, once the version is committed."""
        split = self.spent["detect"] + self.spent["encode"] > 0
        return PublishMetrics(
            version=version,
            base=base,
            step=step,
            rank=rank,
            seconds=time.monotonic() - self.started,
            detect_seconds=self.spent["detect"] if split else self.waited,
            encode_seconds=self.spent["encode"],
            upload_seconds=self.spent["upload"],
            commit_seconds=self.spent["commit"],
            stored_bytes=parts.size,
            changed=None if base is None else parts.changed,
            listed=parts.listed,
            tensors=self._tensors(cut),
        )

    def _count(self, cut: Cut, result: DomainResult) -> None:
        rows = cut.tensors_of(result.domain)
        total = result.changed
        if total is None:
            total = sum(chunk.head.listed for chunk in result.chunks)
        if len(rows) == 1 or total == 0:
            for row in rows:
                self._add(row, total)
            return
        if result.changes is None:
            for row in rows:
                self._changed[row] = None
            return
        positions = result.changes[0]
        for piece in cut.pieces(result.domain):
            low, high = np.searchsorted(positions, (piece.position, piece.position + piece.volume))
            self._add(piece.tensor, int(high - low))

    def _add(self, row: int, changed: int) -> None:
        before = self._changed.get(row, 0)
        self._changed[row] = None if before is None else before + changed

    def _tensors(self, cut: Cut) -> dict[str, TensorMetrics]:
        found = {}
        for row, changed in sorted(self._changed.items()):
            spec = cut.schema.tensors[row]
            elements = int(np.prod(cut.copy_shape(row), dtype=np.int64))
            found[spec.name] = TensorMetrics(elements=elements, changed=changed)
        return found


def tell(metrics: PublishMetrics, hook: OnPublish | None) -> None:
    """Log a record and give it to the hook, which cannot undo the version: what it raises is logged."""
    _LOG.info(
        "version %d: %s of %d elements changed, %d bytes; %.3f s (detect %.3f, encode %.3f, upload %.3f, commit %.3f)",
        metrics.version,
        "all" if metrics.changed is None else metrics.changed,
        metrics.elements,
        metrics.stored_bytes,
        metrics.seconds,
        metrics.detect_seconds,
        metrics.encode_seconds,
        metrics.upload_seconds,
        metrics.commit_seconds,
    )
    if hook is not None:
        try:
            hook(metrics)
        except Exception:  # noqa: BLE001 (the version is published all the same)
            _LOG.exception("on_publish failed for version %d, which is published", metrics.version)
