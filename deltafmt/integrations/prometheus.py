"""What publishing costs, as metrics of prometheus_client (the extra `prometheus`)."""

from __future__ import annotations

from deltafmt.write.metrics import PublishMetrics

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
except ImportError as error:
    raise ImportError(
        "this integration needs prometheus_client: pip install 'deltafmt[prometheus]'"
    ) from error

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class PrometheusHook:
    """Hand it to a writer: `WriterOptions(on_publish=PrometheusHook())`.

    All metrics have the label `rank`:

        deltafmt_version                 newest version published
        deltafmt_changed_share           elements that changed in it, of those that the rank stores
        deltafmt_publish_seconds         histogram; label `stage`: all, detect, encode, upload, commit
        deltafmt_stored_bytes_total      bytes of shards
        deltafmt_listed_elements_total   elements in them

    A registry takes one such hook; several writers of a process may share it.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._version = Gauge("deltafmt_version", "Newest version published.", ["rank"], registry=registry)
        self._share = Gauge(
            "deltafmt_changed_share",
            "Elements that changed in the newest version.",
            ["rank"],
            registry=registry,
        )
        self._seconds = Histogram(
            "deltafmt_publish_seconds",
            "Time spent on a version; detection and encoding as sums over threads.",
            ["rank", "stage"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._bytes = Counter(
            "deltafmt_stored_bytes", "Bytes of the shards stored.", ["rank"], registry=registry
        )
        self._listed = Counter(
            "deltafmt_listed_elements", "Elements in the shards stored.", ["rank"], registry=registry
        )

    def __call__(self, metrics: PublishMetrics) -> None:
        rank = str(metrics.rank)
        self._version.labels(rank).set(metrics.version)
        if metrics.changed_share is not None:
            self._share.labels(rank).set(metrics.changed_share)
        for stage, seconds in metrics.stages.items():
            self._seconds.labels(rank, stage).observe(seconds)
        self._bytes.labels(rank).inc(metrics.stored_bytes)
        self._listed.labels(rank).inc(metrics.listed)
