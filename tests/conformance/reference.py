"""The second reader, `tools/refdump.py`, as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def load_refdump() -> ModuleType:
    """Import the script from where it lies; it belongs to no package."""
    if "refdump" not in sys.modules:
        spec = importlib.util.spec_from_file_location("refdump", ROOT / "tools" / "refdump.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["refdump"] = module
        spec.loader.exec_module(module)
    return sys.modules["refdump"]
