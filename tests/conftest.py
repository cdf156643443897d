"""What all tests share: how hard hypothesis tries, and the S3 servers, started when a test asks for one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from deltafmt.testing.servers import JuiceServer, MotoServer, SeaweedServer

# Kernels compile inside the first example, so the time of one example says nothing.
_COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("default", max_examples=40, derandomize=True, database=None, **_COMMON)
settings.register_profile("search", max_examples=1000, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session")
def seaweed() -> Iterator[SeaweedServer]:
    """A real S3 server. Tests that kill it start it again."""
    with SeaweedServer() as server:
        yield server


@pytest.fixture(scope="session")
def moto() -> Iterator[MotoServer]:
    """An S3 emulator."""
    with MotoServer() as server:
        yield server


@pytest.fixture(scope="session")
def juice() -> Iterator[JuiceServer]:
    """An S3 server that ignores conditions."""
    with JuiceServer() as server:
        yield server
