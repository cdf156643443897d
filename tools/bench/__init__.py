"""Measurements: `python -m tools.bench --help`."""
