"""Layouts found by running somebody's own loader or converter."""

from deltafmt.tracing.trace import trace_layout

__all__ = ["trace_layout"]
