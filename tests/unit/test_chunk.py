from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafmt.errors import ChecksumError, FormatError
from deltafmt.format.chunk import ChunkHead, ColumnHead, check_columns, pack_chunk, unpack_chunk
from deltafmt.format.column_rules import check_columns_fit, count_blocks_of
from deltafmt.format.constants import (
    BLOCK,
    CODE,
    COLUMNS,
    DENSE,
    ESCAPE,
    GAP,
    LOW,
    MAGNITUDE,
    PLANE,
    RAW,
    SET,
    STEP,
    ZSTD,
)
from deltafmt.format.records import ChunkTable, ColumnTable
from tests.formats import TILING, kind_of

VOLUME, BLOCKS = 1000, 3
HEAD = ChunkHead(domain=0, operation=STEP, order=1, width=2, shift=1, block=9, listed=10)
SIZES = {GAP: 11, LOW: 2, BLOCK: 48, CODE: 3, MAGNITUDE: 4, ESCAPE: 2}
RAW_COLUMNS = {column: np.arange(size, dtype=np.uint8) for column, size in SIZES.items()}


def unpacked(head: ChunkHead, columns: tuple[ColumnHead, ...], data: bytes) -> dict[int, Any]:
    return unpack_chunk(head, columns, memoryview(data), volume=VOLUME, blocks=BLOCKS, where="chunk")


def test_columns_come_back_in_order_and_back_to_back() -> None:
    packed = pack_chunk(HEAD, dict(reversed(RAW_COLUMNS.items())) | {PLANE: np.empty(0, np.uint8)})
    assert [row[0] for row in packed.columns] == sorted(SIZES)
    assert [row[2] for row in packed.columns] == [len(buffer) for buffer in packed.buffers]
    assert packed.nbytes == sum(row[2] for row in packed.columns)
    assert [row[1] for row in packed.columns] == [RAW, RAW, RAW, RAW, RAW, RAW]
    heads = tuple(ColumnHead(*row) for row in packed.columns)
    found = unpacked(HEAD, heads, b"".join(packed.buffers))
    assert {column: raw.tolist() for column, raw in found.items()} == {
        column: raw.tolist() for column, raw in RAW_COLUMNS.items()
    }


def test_what_compresses_is_compressed() -> None:
    head = replace(HEAD, operation=DENSE, shift=0, block=0, listed=VOLUME)
    packed = pack_chunk(head, {PLANE: np.zeros(VOLUME, np.uint8), PLANE + 1: np.zeros(VOLUME, np.uint8)})
    assert [row[1] for row in packed.columns] == [ZSTD, ZSTD]
    found = unpacked(head, tuple(ColumnHead(*row) for row in packed.columns), b"".join(packed.buffers))
    assert all(len(raw) == VOLUME for raw in found.values())


def test_checksums_come_before_decoding() -> None:
    packed = pack_chunk(HEAD, RAW_COLUMNS)
    heads = tuple(ColumnHead(*row) for row in packed.columns)
    data = bytearray(b"".join(packed.buffers))
    data[-1] ^= 1
    with pytest.raises(ChecksumError, match="escape") as caught:
        unpacked(HEAD, heads, bytes(data))
    assert caught.value.kind == "crc-mismatch"
    assert kind_of(lambda: unpacked(HEAD, heads, bytes(data[:-1]))) == "truncated"
    assert kind_of(lambda: unpacked(HEAD, heads, bytes(data) + b"\0")) == "truncated"


def heads_of(sizes: dict[int, int]) -> tuple[ColumnHead, ...]:
    return tuple(
        ColumnHead(column=column, codec=RAW, stored=size, raw=size, crc=0) for column, size in sizes.items()
    )


SPOILED: dict[str, tuple[str, dict[int, int]]] = {
    "too few gaps": ("column-length", SIZES | {GAP: 9}),
    "more gaps than the volume allows": ("column-length", SIZES | {GAP: 13}),
    "low too long": ("column-length", SIZES | {LOW: 3}),
    "no low": ("column-length", {k: v for k, v in SIZES.items() if k != LOW}),
    "a block less": ("column-length", SIZES | {BLOCK: 32}),
    "code too short": ("column-length", SIZES | {CODE: 2}),
    "more magnitudes than elements": ("column-length", SIZES | {MAGNITUDE: 11}),
    "half an escape": ("column-length", SIZES | {ESCAPE: 3}),
    "more escapes than elements": ("column-length", SIZES | {ESCAPE: 22}),
    "a plane in a step": ("column-unexpected", SIZES | {PLANE: 10}),
    "a column that nobody knows": ("column-unexpected", SIZES | {9: 1}),
    "out of order": ("column-order", dict(reversed(SIZES.items()))),
}


@pytest.mark.parametrize("case", SPOILED)
def test_spoiled_column_tables(case: str) -> None:
    kind, sizes = SPOILED[case]
    check_columns(HEAD, heads_of(SIZES), volume=VOLUME, blocks=BLOCKS, where="chunk")
    found = kind_of(lambda: check_columns(HEAD, heads_of(sizes), volume=VOLUME, blocks=BLOCKS, where="chunk"))
    assert found == kind


def test_a_column_twice() -> None:
    heads = (*heads_of(SIZES), *heads_of({ESCAPE: 2}))
    assert (
        kind_of(lambda: check_columns(HEAD, heads, volume=VOLUME, blocks=BLOCKS, where="x")) == "column-order"
    )


def test_nothing_is_allocated_for_a_column_that_the_domain_cannot_have() -> None:
    heads = heads_of(SIZES | {GAP: 2**39})
    assert kind_of(lambda: unpacked(HEAD, heads, b"")) == "column-length"


def tables(heads: list[ChunkHead], columns: list[dict[int, int]]) -> tuple[ChunkTable, ColumnTable]:
    rows = [
        (
            0,
            head.domain,
            head.operation,
            head.order,
            head.width,
            head.shift,
            head.block,
            head.listed,
            8,
            len(own),
        )
        for head, own in zip(heads, columns, strict=True)
    ]
    column_rows = [(column, RAW, size, size, 0) for own in columns for column, size in own.items()]
    return ChunkTable.of_rows(rows), ColumnTable.of_rows(column_rows)


def plain_kind(head: ChunkHead, sizes: dict[int, int]) -> str | None:
    """What the check of one chunk says."""
    blocks = 0
    if head.operation != DENSE:
        rows = slice(TILING.box_rows(head.domain).start, TILING.box_rows(head.domain).stop)
        blocks = sum(-(-volume // 2**head.block) for volume in TILING.box_volume[rows].tolist())
    volume = int(TILING.volume[head.domain])
    try:
        check_columns(head, heads_of(sizes), volume=volume, blocks=blocks, where="chunk")
    except FormatError as error:
        return error.kind
    return None


def fitting_sizes(head: ChunkHead, magnitudes: int, escapes: int) -> dict[int, int]:
    """Lengths of the columns that a chunk with this head may have."""
    n = head.listed
    if head.operation == DENSE:
        return {PLANE + j: n for j in range(head.width)}
    blocks = int(count_blocks_of(tables([head], [{}])[0], TILING)[0])
    sizes = {GAP: n, LOW: (n * head.shift + 7) // 8, BLOCK: 16 * blocks}
    if head.operation == SET:
        sizes |= {PLANE + j: n for j in range(head.width)}
    else:
        sizes |= {CODE: (n + 3) // 4, MAGNITUDE: min(magnitudes, n), ESCAPE: min(escapes, n) * head.width}
    return {column: size for column, size in sizes.items() if size}


@st.composite
def chunk_columns(draw: st.DrawFn) -> tuple[ChunkHead, dict[int, int]]:
    domain = draw(st.integers(0, len(TILING) - 1))
    operation, volume = draw(st.sampled_from([SET, STEP, DENSE])), int(TILING.volume[domain])
    dense = operation == DENSE
    head = ChunkHead(
        domain=domain,
        operation=operation,
        order=1,
        width=int(TILING.widths[domain]),
        shift=0 if dense else draw(st.integers(0, 16)),
        block=0 if dense else draw(st.integers(6, 24)),
        listed=volume if dense else draw(st.integers(1, volume)),
    )
    sizes = fitting_sizes(head, draw(st.integers(0, 20)), draw(st.integers(0, 20)))
    for _ in range(draw(st.integers(0, 2))):
        column = draw(st.sampled_from([*COLUMNS, 6, 24, 255]))
        change = draw(st.sampled_from([-1000, -8, -1, 0, 1, 2, 8, 400]))
        size = sizes.get(column, 0) + change
        sizes.pop(column, None)
        if size > 0:
            sizes[column] = size
    if draw(st.booleans()):
        sizes = dict(sorted(sizes.items()))
    return head, sizes


@given(st.lists(chunk_columns(), min_size=1, max_size=4))
def test_the_check_of_whole_tables_says_what_the_check_of_each_chunk_says(
    chunks: list[tuple[ChunkHead, dict[int, int]]],
) -> None:
    wanted = {plain_kind(head, sizes) for head, sizes in chunks}
    chunk_table, column_table = tables([head for head, _ in chunks], [sizes for _, sizes in chunks])
    if wanted == {None}:
        check_columns_fit(chunk_table, column_table, TILING, where="columns")
        return
    found = kind_of(lambda: check_columns_fit(chunk_table, column_table, TILING, where="columns"))
    # Several rules may be broken at once; which is named first is free.
    assert found in {"column-order", "column-unexpected", "column-length"}
    assert len(chunks) > 1 or found in wanted or "column-length" in {*wanted, found}


def test_blocks_of_domains_begin_anew_with_every_box() -> None:
    heads = [replace(HEAD, domain=d, block=b) for d, b in ((0, 6), (0, 7), (0, 24), (1, 6), (2, 6))]
    chunks, _ = tables(heads, [{}] * len(heads))
    assert count_blocks_of(chunks, TILING).tolist() == [4 + 2, 2 + 1, 2, 4, 1]
