"""Signed lineages that several ranks write, and what is added to and removed from signed ones."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import deltafmt
from deltafmt import ChecksumError, HmacKey, IncompleteError, ReadOptions, SigningKey, UnsupportedError
from deltafmt.format import keys
from deltafmt.format.checksum import blake2b
from deltafmt.format.ranks import DONE, emit_receipt, emit_verdict, parse_call, parse_reply
from deltafmt.format.records import Attempt, Receipt, Verdict
from deltafmt.store import MemoryStore, register_protocol
from deltafmt.testing.faulty import FaultyStore, altered
from tests.ranks import Tensors, anchor, changed, memory_root, model, publish, staged_parts, together

RANK_KEYS = [SigningKey(bytes([k]) * 32) for k in range(1, 4)]
SHARED = HmacKey(bytes(range(32)))
STATES = [changed(model(), seed) for seed in range(8)]
NAMES = ("embed", "norm", "scale", "up", "down")


def signing(
    root: str, signers: Sequence[Any], trust: Sequence[Any] = (), **settings: Any
) -> list[deltafmt.Writer]:
    """One writer per signer; rank 0 trusts those given besides its own."""
    return [
        deltafmt.Writer(
            root,
            rank=rank,
            world_size=len(signers),
            options=deltafmt.WriterOptions(
                sign_with=signer,
                trust=trust,
                threads=1,
                rank_timeout_seconds=20.0,
                **settings,
            ),
        )
        for rank, signer in enumerate(signers)
    ]


def begun(
    root: str, signers: Sequence[Any], versions: int, trust: Sequence[Any] = (), **settings: Any
) -> Any:
    ranks = signing(root, signers, trust, **settings)
    assert anchor(ranks, staged_parts(STATES[0])) == [0] * 3
    for version in range(1, versions + 1):
        assert publish(ranks, staged_parts(STATES[version])) == [version] * 3
    return ranks


def assert_trusted(root: str, version: int, *trust: Any) -> None:
    """Who demands these keys gets the version, from nothing and exactly."""
    live = {name: torch.zeros_like(STATES[0][name]) for name in NAMES}
    receiver = deltafmt.Receiver(root, live, options=ReadOptions(trust=trust))
    assert receiver.advance() == version
    for name in NAMES:
        assert torch.equal(live[name], STATES[version][name])


@pytest.mark.parametrize(
    ("signers", "trust"),
    [([SHARED] * 3, []), (RANK_KEYS[:1] * 3, []), (RANK_KEYS, [key.verifier for key in RANK_KEYS])],
    ids=["one-secret", "one-key", "a-key-each"],
)
def test_rank_0_signs_what_all_ranks_vouch_for(signers: Sequence[Any], trust: Sequence[Any]) -> None:
    root = memory_root()
    begun(root, signers, 2, trust, anchor_every=2)
    assert_trusted(root, 2, signers[0].verifier)
    lineage = deltafmt.open(root, trust=[signers[0].verifier])
    assert lineage.verify().ok
    for stored in (lineage.history.first_way(2), lineage.history.further_way(2, None)):
        manifest = stored.manifest
        assert manifest.chunk_digests is not None
        assert len(set(manifest.chunks.shard.tolist())) == 3
        for row in range(len(manifest.chunks)):
            key = manifest.shard_keys[int(manifest.chunks.shard[row])]
            first = int(manifest.chunks.columns[:row].sum())
            size = int(manifest.columns.stored[first : first + int(manifest.chunks.columns[row])].sum())
            start = int(manifest.chunks.offset[row])
            data = lineage.history.store.read(key)[start : start + size]
            assert blake2b(data) == manifest.chunk_digests[32 * row : 32 * row + 32]


def test_receipts_that_come_by_storage_must_be_signed() -> None:
    root = memory_root()
    strangers = [SHARED, None, HmacKey(bytes(32))]
    first, *others = anchor(signing(root, strangers), staged_parts(STATES[0]))
    assert isinstance(first, IncompleteError)
    assert (first.kind, first.where) == ("rank-failed", "rank 1, rank 2")
    assert "rank 1: ChecksumError: a signature is demanded" in str(first.found)
    assert "rank 2: ChecksumError: signed with a key that is not trusted" in str(first.found)
    assert [error.kind for error in others] == ["rank-failed", "rank-failed"]
    assert deltafmt.open(root).latest() is None
    begun(root, [SHARED] * 3, 0)
    assert_trusted(root, 0, SHARED)


def test_a_receipt_that_somebody_exchanges_makes_no_version() -> None:
    """Whoever can write to the root puts other bytes in a shard, and their digest in the rank's receipt."""
    name = secrets.token_hex(8)
    stores: list[FaultyStore] = []

    def opened(path: str, _: object) -> FaultyStore:
        stores.append(FaultyStore(MemoryStore.named(path)))
        return stores[-1]

    register_protocol("forged", opened)
    ranks = begun(f"forged://{name}", [SHARED] * 3, 1)

    def forge(data: bytes) -> bytes:
        receipt = parse_reply(data, where="reply")
        if not isinstance(receipt, Receipt) or receipt.chunk_digests is None:
            return data
        return emit_receipt(replace(receipt, chunk_digests=bytes(len(receipt.chunk_digests))))

    stores[0].inject(altered(forge), verb="read_all", key="/00001.dfm", times=100)
    errors = publish(ranks, staged_parts(STATES[2]))
    assert "rank 1: ChecksumError: the signature is wrong" in str(errors[0].found)
    assert deltafmt.open(f"memory://{name}").latest() == 1
    stores[0].heal()
    assert publish(ranks, staged_parts(STATES[2])) == [2] * 3
    assert_trusted(f"memory://{name}", 2, SHARED)


class _Forger(FaultyStore):
    """Beside each call, before a rank can see it, somebody puts the verdict that it is done."""

    def put_if_absent(self, key: str, data: Any) -> None:
        if key.startswith(keys.ATTEMPTS) and key.count("/") == 2:
            call = parse_call(bytes(data), where=key)
            assert isinstance(call, Attempt)
            done = Verdict(attempt=call.attempt, outcome=DONE, failure={})
            if call.schema is not None:
                self.put(keys.verdict_key(call.version, call.attempt), emit_verdict(done))
        super().put_if_absent(key, data)


def test_a_forged_verdict_makes_no_rank_believe_in_a_version() -> None:
    name = secrets.token_hex(8)
    register_protocol("forging", lambda path, _: _Forger(MemoryStore.named(path)))
    ranks = begun(f"forging://{name}", [SHARED] * 3, 1)
    parts = staged_parts(STATES[2])
    # Two ranks hold it, and must agree.
    parts[1] = {**parts[1], "norm": parts[1]["norm"] + 1}
    errors = publish(ranks, parts)
    assert [error.kind for error in errors] == ["replicas-differ"] * 3
    assert deltafmt.open(f"memory://{name}").latest() == 1
    assert publish(ranks, staged_parts(STATES[3])) == [2] * 3
    live = {name_: torch.zeros_like(STATES[0][name_]) for name_ in NAMES}
    receiver = deltafmt.Receiver(f"memory://{name}", live, options=ReadOptions(trust=[SHARED]))
    assert receiver.advance() == 2
    assert all(torch.equal(live[name_], STATES[3][name_]) for name_ in NAMES)


def test_a_rank_that_does_not_trust_rank_0_leaves_the_version_whole() -> None:
    root = memory_root()
    ranks = [
        signing(root, RANK_KEYS, [key.verifier for key in RANK_KEYS])[0],
        *signing(root, RANK_KEYS)[1:],
    ]
    first, *others = anchor(ranks, staged_parts(STATES[0]))
    assert first == 0
    assert [error.kind for error in others] == ["signature-untrusted"] * 2
    assert_trusted(root, 0, RANK_KEYS[0].verifier)
    assert deltafmt.open(root).verify().ok


def test_ranks_resume_a_signed_lineage() -> None:
    root = memory_root()
    begun(root, [SHARED] * 3, 2)
    strangers = signing(root, [RANK_KEYS[0]] * 3, job="strangers")
    errors = publish(strangers, staged_parts(STATES[3]))
    assert [error.kind for error in errors] == ["signature-untrusted", "rank-failed", "rank-failed"] or {
        type(error) for error in errors
    } == {ChecksumError}
    again = signing(root, [SHARED] * 3, job="again")
    parts = staged_parts(STATES[2])
    assert together([partial(w.resume, None, p) for w, p in zip(again, parts, strict=True)]) == [2] * 3
    assert publish(again, staged_parts(STATES[3])) == [3] * 3
    assert_trusted(root, 3, SHARED)
    rotated = signing(root, [RANK_KEYS[0]] * 3, [SHARED], job="rotated")
    assert publish(rotated, staged_parts(STATES[4])) == [4] * 3
    assert_trusted(root, 4, SHARED, RANK_KEYS[0].verifier)


def test_what_is_added_is_signed_by_whoever_adds_it() -> None:
    root = memory_root()
    begun(root, [SHARED] * 3, 4)
    demanding = deltafmt.open(root, trust=[SHARED])
    for add in (demanding.add_anchor, partial(demanding.squash, 0, 4)):
        with pytest.raises(UnsupportedError) as caught:
            add()
        assert caught.value.kind == "key-missing"
    assert demanding.history.further_bases(4) == []
    operator = deltafmt.open(root, trust=[SHARED], sign_with=RANK_KEYS[0])
    operator.squash(0, 4)
    operator.add_anchor(4)
    assert operator.verify().ok
    trusted: list[Any] = [SHARED, RANK_KEYS[0].verifier]
    ways = [stored.manifest.signature for stored in deltafmt.open(root, trust=trusted).history.ways(4)]
    assert [entry[1] for entry in ways if entry is not None] == [
        SHARED.key_id,
        RANK_KEYS[0].key_id,
        RANK_KEYS[0].key_id,
    ]
    # Who trusts the trainer only goes by the deltas that it signed.
    assert_trusted(root, 4, SHARED)
    assert_trusted(root, 4, *trusted)


def test_a_writer_that_demands_signatures_signs() -> None:
    root = memory_root()
    with pytest.raises(UnsupportedError) as caught:
        deltafmt.Writer(root, options=deltafmt.WriterOptions(trust=[SHARED]))
    assert caught.value.kind == "key-missing"


def test_retention_of_a_signed_lineage_counts_on_no_stranger() -> None:
    root = memory_root()
    begun(root, [SHARED] * 3, 5, anchor_every=3)
    deltafmt.open(root).add_anchor(5)
    signed = deltafmt.open(root, trust=[SHARED])
    plan = signed.gc(keep_last=1, grace_seconds=0.0, dry_run=False)
    assert plan.floor == 3, "the anchor of version 5 is not signed"
    assert plan.blocked is not None
    assert_trusted(root, 5, SHARED)
    assert {problem.key for problem in signed.verify(5).problems} == {keys.way_key(5, None)}
    again = signing(root, [SHARED] * 3, job="again")
    assert publish(again, staged_parts(STATES[6])) == [6] * 3
    assert_trusted(root, 6, SHARED)
    assert not [key for key in signed.history.store.list(keys.VERSIONS) if key < keys.version_key(3)]


def test_ways_by_strangers_stand_in_nobodys_way() -> None:
    root = memory_root()
    begun(root, [SHARED] * 3, 4, squash=4)
    stranger = deltafmt.open(root)
    stranger.squash(1, 4)
    stranger.add_anchor(4)
    assert_trusted(root, 4, SHARED)
    live: Tensors = {name: STATES[1][name].clone() for name in NAMES}
    receiver = deltafmt.Receiver(root, live, options=ReadOptions(trust=[SHARED]))
    receiver.adopt(1)
    assert receiver.advance() == 4
    assert torch.equal(live["down"], STATES[4]["down"])
