"""Stored chunks onto this machine: in parallel, each checked as it arrives, a bad one read once more."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from deltafmt.errors import ChecksumError
from deltafmt.format.checksum import blake2b, crc32c
from deltafmt.format.chunk import ChunkHead, ColumnHead
from deltafmt.format.constants import COLUMNS
from deltafmt.read.plan import LinkPlan
from deltafmt.store import Range, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedChunk:
    """A chunk's stored bytes, their checksums verified."""

    head: ChunkHead
    columns: tuple[ColumnHead, ...]
    data: memoryview
    where: str


def fetch_chunks(store: Store, *plans: LinkPlan, digests: bool = False) -> Iterator[StagedChunk]:
    """The planned chunks in the plans' order, fetched a bounded amount ahead.

    Raises `ChecksumError` for bytes that still differ from their CRC32C when read again, or with `digests`
    from the BLAKE2b-256 that their signed manifest gives.
    """
    ranges = [wanted for plan in plans for wanted in plan.ranges]
    heads = (row for plan in plans for row in plan.heads())
    fetched = store.read_ranges(ranges)
    expected: Iterable[bytes | None] = itertools.repeat(None)
    if digests:
        expected = [digest for plan in plans for digest in plan.chunk_digests]
    for (head, columns), wanted, data, digest in zip(heads, ranges, fetched, expected, strict=False):
        where = f"{wanted.key}, domain {head.domain}"
        bad = _first_bad(columns, data)
        if bad is not None:
            data = next(iter(store.read_ranges([wanted])))
            bad = _first_bad(columns, data)
        if bad is not None:
            raise _mismatch(columns, bad, wanted, where)
        if digest is not None and blake2b(data) != digest:
            raise ChecksumError(
                "stored bytes are not those of the signed manifest",
                kind="digest-mismatch",
                where=where,
                expected=digest.hex(),
                found=blake2b(data).hex(),
            )
        yield StagedChunk(head=head, columns=columns, data=data, where=where)


def _first_bad(columns: tuple[ColumnHead, ...], data: memoryview) -> int | None:
    start = 0
    for number, column in enumerate(columns):
        if crc32c(data[start : start + column.stored]) != column.crc:
            return number
        start += column.stored
    return None


def _mismatch(columns: tuple[ColumnHead, ...], bad: int, wanted: Range, where: str) -> ChecksumError:
    start = wanted.start + sum(column.stored for column in columns[:bad])
    column = columns[bad]
    return ChecksumError(
        "stored bytes do not match their CRC32C, read twice",
        kind="crc-mismatch",
        where=f"{where}, column {COLUMNS.get(column.column)}, bytes [{start}, {start + column.stored})",
        expected=f"{column.crc:08x}",
    )
