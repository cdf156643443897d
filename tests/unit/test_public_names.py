from __future__ import annotations

import subprocess
import sys

import deltafmt


def test_every_public_name_resolves() -> None:
    assert set(deltafmt.__all__) == set(deltafmt._HOME_OF)
    for name in deltafmt.__all__:
        assert getattr(deltafmt, name) is not None
        assert name in dir(deltafmt)


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, deltafmt; print([m for m in ('torch', 'numba', 'pyarrow', 'numpy') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(deltafmt, "no_such_name")
