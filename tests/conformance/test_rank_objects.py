"""What ranks put beside an attempt, read by the second reader."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

import deltafmt
from deltafmt.format.ranks import (
    AGAIN,
    FAILED,
    emit_answer,
    emit_attempt,
    emit_receipt,
    emit_verdict,
    holding_digest,
    holding_of,
    parse_call,
    parse_reply,
)
from deltafmt.format.records import Answer, Attempt, Receipt, Verdict
from deltafmt.store import LocalStore, register_protocol
from tests.conformance.reference import load_refdump
from tests.ranks import anchor, publish, writers

refdump = load_refdump()


def written(root: Path) -> dict[str, list[Path]]:
    """Objects under attempts/ by their kind, as the second reader names it."""
    found: dict[str, list[Path]] = {}
    for path in sorted((root / "attempts").rglob("*.dfm")):
        found.setdefault(refdump.dump(path)["kind"], []).append(path)
    return found


class Keeping(LocalStore):
    """Removes nothing, so that what is past can be looked at."""

    def delete(self, keys: Iterable[str]) -> None:
        """Keep them."""


def test_every_kind_says_the_same_to_both_readers(tmp_path: Path) -> None:
    register_protocol("keeping", lambda path, _: Keeping(path))
    root = tmp_path / "run"
    parts = [{"a": torch.ones(5, 3), "b": torch.zeros(7)}, {"b": torch.zeros(7), "c": torch.ones(2)}]
    ranks = writers(f"keeping://{root}", 2)
    assert anchor(ranks, parts) == [0, 0]
    wrong = [parts[0], {**parts[1], "b": torch.ones(7)}]
    assert {error.kind for error in publish(ranks, wrong)} == {"replicas-differ"}
    last = [parts[0], {**parts[1], "d": torch.ones(1)}]
    assert publish(ranks, last) == [1, 1]
    found = written(root)
    assert found.keys() == {"attempt", "answer", "receipt", "verdict"}
    for path in found["attempt"]:
        call = parse_call(path.read_bytes(), where=path)
        assert isinstance(call, Attempt)
        told = refdump.dump(path)
        assert (told["attempt"], told["writers"]) == (call.attempt.hex(), 2)
        assert told["owner"] == call.owner.tolist()
        assert path.stem == told["attempt"]
        assert emit_attempt(call) == path.read_bytes()
    for path in found["receipt"]:
        receipt = parse_reply(path.read_bytes(), where=path)
        assert isinstance(receipt, Receipt)
        assert refdump.dump(path)["replicas"]["domain"] == receipt.replicas.domain.tolist()
        assert emit_receipt(receipt) == path.read_bytes()
    for path in found["answer"]:
        answer = parse_reply(path.read_bytes(), where=path)
        assert isinstance(answer, Answer)
        schema, held = holding_of(answer, where=path)
        assert {name for name, _ in held} <= set(schema.names)
        assert emit_answer(answer) == path.read_bytes()
    verdicts = [parse_call(path.read_bytes(), where=path) for path in found["verdict"]]
    assert len(verdicts) == 2
    assert [emit_verdict(v) for v in verdicts] == [p.read_bytes() for p in found["verdict"]]  # type: ignore[arg-type]
    assert {verdict.outcome for verdict in verdicts if isinstance(verdict, Verdict)} == {AGAIN, FAILED}


def test_a_holding_has_one_digest_whoever_tells_it(tmp_path: Path) -> None:
    root = tmp_path / "run"
    ranks = writers(str(root), 2)
    parts = [{"a": torch.ones(5, 3)}, {"b": torch.zeros(7, 2)}]
    anchor(ranks, parts)
    attempts = [parse_call(path.read_bytes(), where=path) for path in written(root)["attempt"]]
    call = max((a for a in attempts if isinstance(a, Attempt)), key=lambda a: a.round)
    assert call.schema is not None
    del ranks
    again = writers(str(root), 2, options={"job": "other"})
    assert publish(again, parts) == [1, 1]
    calls = [parse_call(p.read_bytes(), where=p) for p in written(root)["attempt"]]
    full = [c for c in calls if isinstance(c, Attempt) and c.schema is not None]
    assert {c.holdings.tobytes() for c in full} == {call.holdings.tobytes()}
    for path in written(root).get("answer", []):
        answer = parse_reply(path.read_bytes(), where=path)
        assert isinstance(answer, Answer)
        assert holding_digest(answer) == call.holdings[16:].tobytes()
    assert deltafmt.open(str(root)).latest() == 1
