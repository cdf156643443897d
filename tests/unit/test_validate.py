from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from deltafmt.format.constants import DENSE, MAX_VERSION, MAX_WRITERS
from deltafmt.format.records import ChunkTable, ColumnTable, DomainTable, Manifest, ShardTable
from deltafmt.format.validate import check_manifest, chunk_bytes
from deltafmt.schema import Schema, TensorSpec
from deltafmt.tiling import make_tiling
from tests.formats import SCHEMA, TILING, anchor, delta, kind_of, with_cells

EMPTY = {"chunks": ChunkTable.empty(), "columns": ColumnTable.empty(), "listed": 0}


def check(manifest: Manifest) -> None:
    check_manifest(manifest, SCHEMA, TILING, where="manifest")


@pytest.mark.parametrize(
    "manifest",
    [
        delta(),
        delta(changed=None),
        delta(changed=0),
        delta(**EMPTY, domains=DomainTable.of_rows([(0, 3, 4, 3, 4, 1), (2, 5, 6, 0, 0, 0)])),
        delta(**EMPTY, shards=ShardTable.empty(), domains=DomainTable.empty()),
        delta(target_digest=b"t" * 32),
        delta(version=MAX_VERSION - 1, base=0, writers=MAX_WRITERS),
        anchor(),
        anchor(version=0),
        anchor(data=False, **EMPTY, shards=ShardTable.empty()),
        anchor(data=False, **EMPTY),
    ],
    ids=lambda manifest: f"{manifest.version} {manifest.base} {len(manifest.chunks)}",
)
def test_manifests_that_make_sense(manifest: Manifest) -> None:
    check(manifest)


def test_the_bytes_of_each_chunk() -> None:
    manifest = delta()
    assert chunk_bytes(manifest.chunks, manifest.columns).tolist() == [78, 104, 100]


def chunk(row: int, **cells: int) -> Callable[[Manifest], Manifest]:
    return lambda manifest: with_cells(manifest, "chunks", row, **cells)


def column(row: int, **cells: int) -> Callable[[Manifest], Manifest]:
    return lambda manifest: with_cells(manifest, "columns", row, **cells)


def domain(row: int, **cells: int) -> Callable[[Manifest], Manifest]:
    return lambda manifest: with_cells(manifest, "domains", row, **cells)


def shard(row: int, **cells: int) -> Callable[[Manifest], Manifest]:
    return lambda manifest: with_cells(manifest, "shards", row, **cells)


def fields(**changes: object) -> Callable[[Manifest], Manifest]:
    return lambda manifest: replace(manifest, **changes)  # type: ignore[arg-type]


def both_steps(manifest: Manifest) -> Manifest:
    """Two step chunks of one domain, a step made of the set chunk's rows."""
    return with_cells(manifest, "chunks", 0, operation=2)


DELTAS: dict[str, tuple[str, Callable[[Manifest], Manifest]]] = {
    "its own base": ("base-order", fields(base=5)),
    "a later base": ("base-order", fields(base=6)),
    "a base without digest": ("base-digest", fields(base_digest=None)),
    "a digest without base": ("base-digest", fields(base=None)),
    "a version too large": ("index-range", fields(version=MAX_VERSION)),
    "no writers": ("index-range", fields(writers=0)),
    "too many writers": ("index-range", fields(writers=MAX_WRITERS + 1)),
    "a shard of nobody": ("index-range", shard(0, writer=2)),
    "a shard of 2^63 bytes": ("index-range", shard(0, size=2**63)),
    "shards out of order": ("shard-order", fields(shards=ShardTable.of_rows([(1, 10**6), (0, 10**6)]))),
    "a shard twice": ("shard-order", fields(shards=ShardTable.of_rows([(1, 10**6), (1, 10**6)]))),
    "no shards": ("index-range", fields(shards=ShardTable.empty())),
    "a chunk of no domain": ("index-range", chunk(2, domain=3)),
    "a chunk of domain 2^32 - 1": ("index-range", chunk(2, domain=2**32 - 1)),
    "a chunk in no shard": ("index-range", chunk(0, shard=1)),
    "operation 0": ("operation-unknown", chunk(0, operation=0)),
    "operation 4": ("operation-unknown", chunk(2, operation=4)),
    "order 2": ("order-unknown", chunk(0, order=2)),
    "width 4 in a domain of 2": ("width-mismatch", chunk(0, width=4)),
    "width 0": ("width-mismatch", chunk(0, width=0)),
    "domains out of order": ("chunk-order", chunk(0, domain=1)),
    "step before set": ("chunk-order", lambda m: with_cells(chunk(0, operation=2)(m), "chunks", 1, operation=1)),
    "two steps": ("chunk-order", both_steps),
    "set and dense": ("chunk-overlap", chunk(1, operation=3, shift=0, block=0, listed=300)),
    "step and dense": ("chunk-overlap", lambda m: chunk(1, operation=3, shift=0, block=0, listed=300)(both_steps(m))),
    "nothing listed": ("chunk-listed", chunk(0, listed=0)),
    "more listed than there is": ("chunk-listed", chunk(0, listed=301)),
    "more listed together than there is": ("chunk-listed", chunk(0, listed=297)),
    "dense in part": ("chunk-listed", chunk(2, listed=24)),
    "a shift of 17": ("chunk-coding", chunk(0, shift=17)),
    "blocks of 2^5": ("chunk-coding", chunk(0, block=5)),
    "blocks of 2^25": ("chunk-coding", chunk(0, block=25)),
    "dense with a shift": ("chunk-coding", chunk(2, shift=1)),
    "dense with blocks": ("chunk-coding", chunk(2, block=6)),
    "a chunk without columns": ("column-count", lambda m: chunk(0, columns=0)(chunk(1, columns=9)(m))),
    "more columns than rows": ("column-count", chunk(2, columns=5)),
    "fewer columns than rows": ("column-count", chunk(2, columns=3)),
    "codec 2": ("codec-unknown", column(0, codec=2)),
    "nothing stored": ("column-length", column(0, stored=0)),
    "nothing decoded": ("column-length", column(0, raw=0)),
    "raw of another length": ("column-length", column(0, stored=8)),
    "stored beyond measure": ("column-length", column(0, codec=1, stored=2**48)),
    "decoded beyond measure": ("column-length", column(0, codec=1, raw=2**40)),
    "much more stored than decoded": ("column-length", column(0, codec=1, stored=9 + 1025)),
    "a plane too long": ("column-length", column(12, raw=26, codec=1)),
    "blocks that are not there": ("column-length", column(2, raw=64, codec=1)),
    "columns out of order": ("column-order", column(1, column=0)),
    "a column that does not belong": ("column-unexpected", column(8, column=30)),
    "a chunk over the magic": ("chunk-place", chunk(0, offset=7)),
    "a chunk behind its shard": ("chunk-place", chunk(2, offset=10**6)),
    "a chunk at 2^64 - 1": ("chunk-place", chunk(2, offset=2**64 - 1)),
    "chunks that share a byte": ("chunk-place", chunk(1, offset=85)),
    "chunks at one place": ("chunk-place", chunk(1, offset=8)),
    "a digest of no domain": ("index-range", domain(1, domain=3)),
    "digests out of order": ("digest-rows", domain(0, domain=2)),
    "digests missing": ("digest-rows", fields(domains=DomainTable.of_rows([(0, 1, 2, 3, 4, 1)]))),
    "base known by half": ("digest-rows", domain(0, base_known=2)),
    "base unknown but given": ("digest-rows", domain(0, base_known=0)),
    "a tensor's digest too few": ("digest-rows", lambda m: replace(m, tensors=m.tensors.take(slice(0, 4)))),
    "a delta without data": ("anchor-incomplete", fields(data=False)),
    "a wrong sum": ("statistics", fields(listed=39)),
    "more changed than there is": ("statistics", fields(changed=526)),
}  # fmt: skip


@pytest.mark.parametrize("case", DELTAS)
def test_a_delta_that_makes_no_sense(case: str) -> None:
    kind, spoil = DELTAS[case]
    assert kind_of(lambda: check(spoil(delta()))) == kind


def without_last(manifest: Manifest) -> Manifest:
    count = len(manifest.chunks) - 1
    columns = int(manifest.chunks.columns[:count].sum())
    return replace(
        manifest,
        chunks=manifest.chunks.take(slice(0, count)),
        columns=manifest.columns.take(slice(0, columns)),
        listed=int(manifest.chunks.listed[:count].sum()),
    )


ANCHORS: dict[str, tuple[str, Callable[[Manifest], Manifest]]] = {
    "a step chunk": ("anchor-chunk", chunk(0, operation=2, block=6)),
    "a domain missing": ("anchor-incomplete", without_last),
    "chunks without data": ("anchor-incomplete", fields(data=False)),
    "no chunks with data": ("anchor-incomplete", fields(**EMPTY)),
    "a digest missing": ("digest-rows", lambda m: without_last(replace(m, domains=m.domains.take(slice(0, 2))))),
    "a known base": ("digest-rows", domain(0, base_known=1)),
}  # fmt: skip


@pytest.mark.parametrize("case", ANCHORS)
def test_an_anchor_that_makes_no_sense(case: str) -> None:
    kind, spoil = ANCHORS[case]
    assert kind_of(lambda: check(spoil(anchor()))) == kind


def test_errors_tell_the_row() -> None:
    with pytest.raises(Exception, match="manifest, row 1") as caught:
        check(chunk(1, operation=0)(delta()))
    assert "operation" in str(caught.value)


def test_a_model_without_elements() -> None:
    schema = Schema((TensorSpec("none", "int8", (0,)),))
    manifest = anchor(
        **EMPTY,
        shards=ShardTable.empty(),
        domains=DomainTable.empty(),
        tensors=anchor().tensors.take([0]),
    )
    check_manifest(manifest, schema, make_tiling(schema), where="manifest")


def test_places_are_checked_shard_by_shard() -> None:
    """The same offsets in two shards are no clash; chunks need not lie in the order of the table."""
    manifest = anchor(shards=ShardTable.of_rows([(0, 5000), (1, 5000)]))
    offsets = np.array([8, 8, 700], "<u8")
    spread = manifest.chunks.replaced(shard=np.array([0, 1, 0], "<u4"), offset=offsets)
    check(replace(manifest, chunks=spread))
    turned = spread.replaced(offset=np.array([700, 8, 8], "<u8"))
    check(replace(manifest, chunks=turned))
    assert {int(op) for op in turned.operation} == {DENSE}
