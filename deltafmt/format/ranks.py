"""Attempts, answers, receipts and verdicts as objects: what ranks tell one another about one version."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast

import numpy as np

from deltafmt.errors import FormatError
from deltafmt.format.body import content_digest, emit, parse
from deltafmt.format.checksum import DIGEST_BYTES
from deltafmt.format.envelope import unseal
from deltafmt.format.objects import Data, schema_of, schema_record
from deltafmt.format.records import Answer, Attempt, BoxTable, Receipt, SchemaRecord, TensorTable, Verdict
from deltafmt.format.signing import Signer
from deltafmt.geometry import Box
from deltafmt.schema import Schema

HOLDING_BYTES = 16
DONE, CONFLICT, AGAIN, FAILED, UNKNOWN = range(5)
"""Outcomes in a verdict."""
WRITE, PROVE, ANCHOR = 0, 1, 2
"""Purposes of an attempt."""

Parts = tuple[tuple[str, Box], ...]
"""(name of an owner, box) of each part that a rank holds."""


def emit_attempt(record: Attempt) -> bytes:
    return emit(record, "attempt")


def emit_verdict(record: Verdict) -> bytes:
    return emit(record, "verdict")


def emit_receipt(record: Receipt, signer: Signer | None = None) -> bytes:
    """The receipt as an object; a `signer` puts its signature in place of what the receipt has."""
    return emit(record, "receipt", signer=signer)


def emit_answer(record: Answer) -> bytes:
    return emit(record, "answer")


def parse_call(data: Data, *, where: object) -> Attempt | Verdict:
    """What a coordinator says."""
    kind = _kind(data, where)
    if kind == "verdict":
        verdict = cast("Verdict", parse(data, "verdict", where=where))
        _require_index(verdict.outcome <= UNKNOWN, "outcome", where)
        return verdict
    record = cast("Attempt", parse(data, "attempt", where=where))
    if len(record.holdings) != HOLDING_BYTES * record.writers or len(record.owner) != len(record.holders):
        raise FormatError("columns disagree with the writers or domains", kind="column-length", where=where)
    _require_index(record.purpose <= ANCHOR, "purpose", where)
    _require_index(bool((record.owner < record.writers).all()), "owner", where)
    _require_index((record.schema is None) == (record.tiling is None), "digest of schema or tiling", where)
    return record


def parse_reply(data: Data, *, where: object) -> Answer | Receipt:
    """What a rank says."""
    if _kind(data, where) == "answer":
        answer = cast("Answer", parse(data, "answer", where=where))
        if not answer.failure:
            holding_of(answer, where=where)
        return answer
    receipt = cast("Receipt", parse(data, "receipt", where=where))
    _require_index(receipt.writer < receipt.writers, "writer", where)
    if int(receipt.chunks.columns.astype(np.int64).sum()) != len(receipt.columns):
        raise FormatError("chunks disagree with their columns", kind="column-count", where=where)
    if len(receipt.chunk_digests or b"") not in (0, DIGEST_BYTES * len(receipt.chunks)):
        raise FormatError("chunks disagree with their digests", kind="column-length", where=where)
    return receipt


def answer_of(schema: Schema, parts: Parts, *, attempt: bytes, writer: int) -> Answer:
    """The answer of a rank that holds the given parts of the tensors of its schema."""
    return Answer(
        attempt=attempt,
        writer=writer,
        failure={},
        **_columns(schema_record(schema)),
        boxes=BoxTable(tensor=np.array([schema.index(name) for name, _ in parts], "<u4")),
        starts=np.array([at for _, box in parts for at in box.start], "<u8"),
        stops=np.array([at for _, box in parts for at in box.stop], "<u8"),
    )


def refusal(failure: dict[str, Any], *, attempt: bytes, writer: int) -> Answer:
    """The answer of a rank that cannot take part."""
    empty = np.empty(0, "<u8")
    return Answer(
        attempt=attempt,
        writer=writer,
        failure=failure,
        dtypes=[],
        tensors=TensorTable.empty(),
        names=np.empty(0, np.uint8),
        shapes=empty,
        boxes=BoxTable.empty(),
        starts=empty,
        stops=empty,
    )


def holding_of(answer: Answer, *, where: object) -> tuple[Schema, Parts]:
    """The schema and the parts that an answer tells of, checked."""
    record = SchemaRecord(**{f.name: getattr(answer, f.name) for f in fields(SchemaRecord)})
    schema = schema_of(record, where=where)
    rows = answer.boxes.tensor.tolist()
    if any(row >= len(schema) for row in rows):
        raise FormatError("part of a tensor that the rank does not know", kind="index-range", where=where)
    ranks = [len(schema.tensors[row].shape) for row in rows]
    if not sum(ranks) == len(answer.starts) == len(answer.stops):
        raise FormatError("corners of parts disagree with their tensors", kind="column-length", where=where)
    if (answer.starts > answer.stops).any() or (answer.stops >= 2**63).any():
        raise FormatError("part is out of range", kind="box-outside", where=where)
    starts, stops = answer.starts.tolist(), answer.stops.tolist()
    ends = np.cumsum(ranks).tolist()
    corners = zip(rows, [0, *ends], ends, strict=False)
    return schema, tuple(
        (schema.tensors[row].name, Box(tuple(starts[a:b]), tuple(stops[a:b]))) for row, a, b in corners
    )


def holding_digest(answer: Answer) -> bytes:
    """What names a holding: the same whoever compressed the answer, and for every attempt."""
    record = {f.name: getattr(answer, f.name) for f in fields(Answer)} | {"attempt": bytes(16), "writer": 0}
    return content_digest(Answer(**record), "answer")[:HOLDING_BYTES]


def _columns(record: SchemaRecord) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in fields(SchemaRecord)}


def _require_index(rule: bool, what: str, where: object) -> None:
    if not rule:
        raise FormatError(f"{what} is out of range", kind="index-range", where=where)


def _kind(data: Data, where: object) -> str:
    return str(unseal(data, kind=None, where=where)["kind"])
