"""What publishing costs, told to Prometheus and OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest

import deltafmt
from deltafmt.integrations.opentelemetry import OpenTelemetryHook
from deltafmt.integrations.prometheus import PrometheusHook
from deltafmt.write.metrics import PublishMetrics
from tests.reading import new_root

STAGES = {"all", "detect", "encode", "upload", "commit"}


def published(hook: Callable[[PublishMetrics], None]) -> list[PublishMetrics]:
    """An anchor of 400 elements and two deltas, the last of which changes 100 of them."""
    seen: list[PublishMetrics] = []

    def both(metrics: PublishMetrics) -> None:
        seen.append(metrics)
        hook(metrics)

    tensors = {"w": torch.zeros(400, dtype=torch.bfloat16)}
    with deltafmt.Writer(new_root(), options=deltafmt.WriterOptions(on_publish=both)) as writer:
        writer.publish_anchor(tensors)
        for count in (50, 100):
            tensors["w"][:count] += 1
            writer.publish(tensors)
    return seen


def test_prometheus_is_told() -> None:
    registry = CollectorRegistry()
    seen = published(PrometheusHook(registry))
    value = registry.get_sample_value
    assert value("deltafmt_version", {"rank": "0"}) == 2
    assert value("deltafmt_changed_share", {"rank": "0"}) == 0.25
    assert value("deltafmt_stored_bytes_total", {"rank": "0"}) == sum(m.stored_bytes for m in seen) > 0
    assert value("deltafmt_listed_elements_total", {"rank": "0"}) == 550
    for stage in STAGES:
        labels = {"rank": "0", "stage": stage}
        assert value("deltafmt_publish_seconds_count", labels) == 3
        assert value("deltafmt_publish_seconds_sum", labels) == pytest.approx(
            sum(m.stages[stage] for m in seen)
        )
    assert b"deltafmt_publish_seconds_bucket" in generate_latest(registry)


def test_opentelemetry_is_told() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    seen = published(OpenTelemetryHook(provider.get_meter("tests")))
    data = reader.get_metrics_data()
    assert data is not None
    found: dict[str, list[Any]] = {
        metric.name: list(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    value = {name: points[0].value for name, points in found.items() if hasattr(points[0], "value")}
    assert value == {
        "deltafmt.version": 2,
        "deltafmt.changed_share": 0.25,
        "deltafmt.stored": sum(m.stored_bytes for m in seen),
        "deltafmt.listed": 550,
    }
    stages = {point.attributes["stage"]: point.count for point in found["deltafmt.publish.duration"]}
    assert stages == dict.fromkeys(STAGES, 3)
    provider.shutdown()
