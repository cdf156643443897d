"""What all tests share: how hard hypothesis tries."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings

# Kernels compile inside the first example, so the time of one example says nothing.
_COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("default", max_examples=40, derandomize=True, database=None, **_COMMON)
settings.register_profile("search", max_examples=1000, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
