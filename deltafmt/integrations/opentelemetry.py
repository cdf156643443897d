"""What publishing costs, as metrics of OpenTelemetry (the extra `opentelemetry`)."""

from __future__ import annotations

from deltafmt.write.metrics import PublishMetrics

try:
    from opentelemetry.metrics import Meter, get_meter
except ImportError as error:
    raise ImportError(
        "this integration needs opentelemetry-api: pip install 'deltafmt[opentelemetry]'"
    ) from error


class OpenTelemetryHook:
    """Hand it to a writer: `WriterOptions(on_publish=OpenTelemetryHook())`.

    Instruments, all with the attribute `rank`: gauges `deltafmt.version` (the newest published) and
    `deltafmt.changed_share` (elements that changed in it, of those that the rank stores), histogram
    `deltafmt.publish.duration` in seconds (attribute `stage`: all, detect, encode, upload, commit), counters
    `deltafmt.stored` in bytes and `deltafmt.listed` in elements. `meter` is by default one of the global
    provider's, named `deltafmt`.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        meter = meter or get_meter("deltafmt")
        self._version = meter.create_gauge("deltafmt.version", description="Newest version published")
        self._share = meter.create_gauge(
            "deltafmt.changed_share", unit="1", description="Elements that changed in the newest version"
        )
        self._seconds = meter.create_histogram(
            "deltafmt.publish.duration", unit="s", description="Time spent on a version, by stage"
        )
        self._bytes = meter.create_counter("deltafmt.stored", unit="By", description="Bytes of shards stored")
        self._listed = meter.create_counter(
            "deltafmt.listed", unit="{element}", description="Elements in the shards stored"
        )

    def __call__(self, metrics: PublishMetrics) -> None:
        rank = {"rank": metrics.rank}
        self._version.set(metrics.version, rank)
        if metrics.changed_share is not None:
            self._share.set(metrics.changed_share, rank)
        for stage, seconds in metrics.stages.items():
            self._seconds.record(seconds, {**rank, "stage": stage})
        self._bytes.add(metrics.stored_bytes, rank)
        self._listed.add(metrics.listed, rank)
