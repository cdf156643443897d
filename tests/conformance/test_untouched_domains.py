"""A digest that moves without a chunk is refused before anything is read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deltafmt.errors import FormatError
from deltafmt.format.objects import parse_manifest, parse_schema, parse_tiling
from deltafmt.format.validate import check_manifest
from tests.conformance.reference import ROOT

LINEAGE = ROOT / "spec" / "vectors" / "good" / "recut"


def test_untouched_domains_keep_their_digests() -> None:
    data = (LINEAGE / "versions" / f"{3:020d}.dfm").read_bytes()
    manifest = parse_manifest(data, way=False, where="version")
    schema = parse_schema((LINEAGE / "schemas" / f"{manifest.schema.hex()}.dfm").read_bytes(), where="schema")
    stored = (LINEAGE / "tilings" / f"{manifest.tiling.hex()}.dfm").read_bytes()
    tiling = parse_tiling(stored, schema, where="tiling")
    check_manifest(manifest, schema, tiling, where="version")
    touched = set(manifest.chunks.domain.tolist())
    row = next(row for row, domain in enumerate(manifest.domains.domain.tolist()) if domain not in touched)
    changed = manifest.domains.digest1.copy()
    changed[row] += 1
    lying = replace(manifest, domains=manifest.domains.replaced(digest1=changed))
    with pytest.raises(FormatError) as caught:
        check_manifest(lying, schema, tiling, where="version")
    assert caught.value.kind == "content-mismatch"
