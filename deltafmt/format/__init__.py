"""Bytes of format v1 to records and back: strict, bounded, without I/O. The authority is `spec/`."""
