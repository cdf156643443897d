"""Signed manifests: taken by readers that trust the key, refused where signature, key or bytes are others."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

import deltafmt
from deltafmt import (
    ChecksumError,
    FormatError,
    HmacKey,
    ReadOptions,
    Receiver,
    SigningKey,
    UnsupportedError,
    VerifyKey,
    Writer,
    WriterOptions,
)
from deltafmt.format import keys
from deltafmt.format.checksum import blake2b
from deltafmt.format.constants import ENVELOPE_BYTES
from deltafmt.format.envelope import seal, unseal
from deltafmt.format.objects import emit_manifest, parse_manifest
from deltafmt.format.signing import check_signature
from deltafmt.store import open_store
from tests.cli_help import changed, checkpoint, run, run_json, weights
from tests.reading import Course, blank, same

SECRET, OTHER_SECRET = bytes(range(32)), bytes(range(1, 33))
KEYS: list[Any] = [HmacKey(SECRET), SigningKey(SECRET)]


def course(**options: Any) -> Course:
    torch.manual_seed(1)
    made = Course({"a": torch.randn(40, 9).bfloat16(), "b": torch.randn(77)}, **options)
    made.anchor()
    made.step(seed=1)
    return made


def receive(made: Course, *trust: Any) -> dict[str, torch.Tensor]:
    tensors = blank(made.tensors)
    Receiver(made.root, tensors, options=ReadOptions(trust=trust)).advance()
    return tensors


def refusal(made: Course, *trust: Any) -> str:
    with pytest.raises((ChecksumError, FormatError)) as caught:
        receive(made, *trust)
    return caught.value.kind


def refused_publish(made: Course, **options: Any) -> str:
    """Why a writer does not go on from what is there."""
    with (
        Writer(made.root, options=WriterOptions(**options)) as writer,
        pytest.raises(ChecksumError) as caught,
    ):
        writer.publish(made.tensors)
    return caught.value.kind


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.algorithm)
def test_who_trusts_the_key_reads_and_who_does_not_refuses(key: Any) -> None:
    made = course(sign_with=key)
    assert same(receive(made, key.verifier), made.versions[1])
    assert same(receive(made), made.versions[1]), "whoever demands nothing reads all the same"
    assert same(receive(made, HmacKey(OTHER_SECRET), key.verifier), made.versions[1]), "one of them is enough"
    assert refusal(made, HmacKey(OTHER_SECRET)) == "signature-untrusted"
    assert refusal(made, SigningKey(OTHER_SECRET).verifier) == "signature-untrusted"
    lineage = deltafmt.open(made.root, trust=[key.verifier])
    assert same(lineage.read(0), made.versions[0])
    assert lineage.verify().ok


def test_unsigned_versions_are_refused_where_signatures_are_demanded() -> None:
    made = course()
    assert refusal(made, KEYS[0]) == "signature-missing"
    assert refused_publish(made, sign_with=KEYS[0]) == "signature-missing"


def test_ways_that_are_added_are_signed_too() -> None:
    key = KEYS[0]
    made = course(sign_with=key, anchor_every=1)
    store = open_store(made.root, None)
    for version, base in ((1, None),):
        data = store.read(keys.way_key(version, base))
        check_signature(data, parse_manifest(data, way=True, where="x").signature, [key], where="x")
    made.step(seed=2)
    deltafmt.open(made.root, trust=[key], sign_with=key).add_anchor(2)
    assert same(receive(made, key), made.versions[2])


def test_a_resumed_writer_signs_on_and_checks_what_it_goes_on_from() -> None:
    key = KEYS[1]
    made = course(sign_with=key)
    with Writer(made.root, options=WriterOptions(sign_with=key)) as writer:
        made.tensors["b"][3] += 1
        assert writer.publish(made.tensors) == 2
    assert torch.equal(receive(made, key.verifier)["b"], made.tensors["b"])
    assert refused_publish(made, sign_with=HmacKey(OTHER_SECRET)) == "signature-untrusted"
    rotated = WriterOptions(sign_with=HmacKey(OTHER_SECRET), trust=[key.verifier])
    with Writer(made.root, options=rotated) as writer:
        made.tensors["b"][4] += 1
        assert writer.publish(made.tensors) == 3
    assert torch.equal(receive(made, key.verifier, HmacKey(OTHER_SECRET))["b"], made.tensors["b"])


def test_a_changed_manifest_is_refused_whatever_its_checksum_says() -> None:
    """Every change of the body, sealed anew with a right CRC, as somebody would who can write to the root."""
    key = KEYS[0]
    made = course(sign_with=key)
    store = open_store(made.root, None)
    name = keys.version_key(1)
    data = store.read(name)
    body = unseal(data, kind="version", where=name)
    spoiled = {
        "meta": {**body["meta"], "step": 666},
        "attempt": bytes(16),
        "chunk_digests": bytes(len(body["chunk_digests"])),
        "files": {"x": [bytes(32), 1]},
    }
    for field, value in spoiled.items():
        store.put(name, seal({**body, field: value}))
        assert refusal(made, key) == "signature-wrong", field
    algorithm, key_id, signature = body["signature"]
    store.put(name, seal({**body, "signature": [algorithm, key_id, bytes(len(signature))]}))
    assert refusal(made, key) == "signature-wrong"
    store.put(name, seal({**body, "signature": ["none", key_id, b"\0"]}))
    assert refusal(made, key) == "signature-untrusted"
    del body["signature"]
    store.put(name, seal(body))
    assert refusal(made, key) == "signature-missing"
    store.put(name, data)
    assert same(receive(made, key), made.versions[1])


def test_nothing_stands_behind_a_signature() -> None:
    key = KEYS[0]
    data = emit_manifest(parse_manifest(signed_manifest(key), way=False, where="x"), key)
    body = unseal(data, kind="version", where="x")
    moved = {"signature": body.pop("signature"), **body}
    packed = msgpack.packb(moved)
    entry = tuple(moved["signature"])
    with pytest.raises(FormatError) as caught:
        check_signature(bytes(ENVELOPE_BYTES) + packed, entry, [key], where="x")
    assert caught.value.kind == "signature-place"


def signed_manifest(key: Any) -> bytes:
    return open_store(course(sign_with=key).root, None).read(keys.version_key(1))


def test_a_signature_is_replaced_when_signed_anew() -> None:
    first, second = HmacKey(SECRET), HmacKey(OTHER_SECRET)
    manifest = parse_manifest(signed_manifest(first), way=False, where="x")
    again = emit_manifest(replace(manifest, meta={"note": "new"}), second)
    parsed = parse_manifest(again, way=False, where="x")
    check_signature(again, parsed.signature, [second], where="x")
    assert emit_manifest(parsed) == again, "without a signer the record is emitted as it is"


def test_chunks_are_those_of_the_signed_manifest() -> None:
    """Bytes exchanged together with their CRC32C: the digest in the signed manifest tells."""
    key = KEYS[0]
    made = course(sign_with=key)
    twin = course(sign_with=key)
    store, other = open_store(made.root, None), open_store(twin.root, None)
    for version in (0, 1):
        manifest = parse_manifest(store.read(keys.version_key(version)), way=False, where="x")
        assert manifest.chunk_digests is not None
        assert len(manifest.chunk_digests) == 32 * len(manifest.chunks)
        (shard,) = manifest.shard_keys
        data = store.read(shard)
        ends = manifest.chunks.offset.tolist()
        start = ends[0]
        stored = int(manifest.columns.stored[: int(manifest.chunks.columns[0])].sum())
        assert blake2b(data[start : start + stored]) == manifest.chunk_digests[:32]
        # A collision of checksums is not at hand; so the digest is made to differ instead of the chunk.
        forged = replace(manifest, chunk_digests=bytes(32) + manifest.chunk_digests[32:])
        store.put(keys.version_key(version), emit_manifest(forged, key))
        assert refusal_of_version(made, version, key) == "digest-mismatch"
        missing = replace(manifest, chunk_digests=None)
        store.put(keys.version_key(version), emit_manifest(missing, key))
        assert refusal_of_version(made, version, key) == "signature-missing"
        short = replace(manifest, chunk_digests=manifest.chunk_digests[:-1])
        store.put(keys.version_key(version), emit_manifest(short, key))
        assert refusal_of_version(made, version, key) == "column-length"
        store.put(keys.version_key(version), emit_manifest(manifest, key))
    assert other.url != store.url


def refusal_of_version(made: Course, version: int, key: Any) -> str:
    """Only what leads to the version from nothing is read."""
    with pytest.raises((ChecksumError, FormatError)) as caught:
        deltafmt.open(made.root, trust=[key]).read(version)
    return caught.value.kind


def test_live_tensors_are_untouched_by_what_is_refused() -> None:
    key = KEYS[0]
    made = course(sign_with=key)
    tensors = blank(made.tensors)
    receiver = Receiver(made.root, tensors, options=ReadOptions(trust=[key]))
    receiver.advance()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with Writer(made.root) as stranger:
        made.tensors["b"][0] += 1
        stranger.publish(made.tensors)
    with pytest.raises(ChecksumError) as caught:
        receiver.advance()
    assert caught.value.kind == "signature-missing"
    assert receiver.version == 1
    assert same(tensors, before)


def test_keys_do_not_show_their_secrets(tmp_path: Path) -> None:
    for key in KEYS:
        shown = repr(key) + repr(WriterOptions(sign_with=key)) + repr(ReadOptions(trust=[key.verifier]))
        assert SECRET.hex() not in shown
        assert repr(SECRET) not in shown
        assert key.key_id.hex() in shown
    file = tmp_path / "key"
    file.write_text("zz" + SECRET.hex())
    with pytest.raises(ValueError, match="hex digits") as caught:
        deltafmt.load_key(file)
    assert SECRET.hex() not in str(caught.value)
    assert caught.value.__cause__ is None
    made = course(sign_with=KEYS[0])
    store = open_store(made.root, None)
    for version in (0, 1):
        assert SECRET not in store.read(keys.version_key(version))


def test_keys_that_cannot_do_what_they_are_given_for() -> None:
    public = SigningKey(SECRET).verifier
    with pytest.raises(UnsupportedError) as caught:
        WriterOptions(sign_with=public)  # type: ignore[arg-type]
    assert caught.value.kind == "key-unfit"
    with pytest.raises(ValueError, match="too short"):
        HmacKey(bytes(31))


def test_key_files_as_openssl_makes_them(tmp_path: Path) -> None:
    private, public, secret = tmp_path / "key.pem", tmp_path / "key.pub", tmp_path / "secret"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    secret.write_bytes(subprocess.check_output(["openssl", "rand", "-hex", "32"]))
    signing, verify, shared = map(deltafmt.load_key, (private, public, secret))
    assert isinstance(signing, SigningKey)
    assert isinstance(verify, VerifyKey)
    assert isinstance(shared, HmacKey)
    assert signing.key_id == verify.key_id
    assert verify.verifies(b"x", signing.sign(b"x"))
    assert not verify.verifies(b"y", signing.sign(b"x"))
    rsa = tmp_path / "rsa.pem"
    subprocess.run(
        ["openssl", "genpkey", "-algorithm", "rsa", "-out", rsa], check=True, stderr=subprocess.DEVNULL
    )
    with pytest.raises(ValueError, match="another kind"):
        deltafmt.load_key(rsa)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret, other = tmp_path / "secret", tmp_path / "other"
    secret.write_text(SECRET.hex() + "\n")
    other.write_text(OTHER_SECRET.hex())
    root = tmp_path / "run"
    first = checkpoint(tmp_path / "first", weights())
    second = checkpoint(tmp_path / "second", changed(weights()))
    run(capsys, "create", root, "--from", first, "--sign-with", secret)
    run(capsys, "publish", root, second, "--sign-with", secret)
    shown = run_json(capsys, "show", root)
    assert shown["signature"] == {"algorithm": "hmac-sha256", "key_id": HmacKey(SECRET).key_id.hex()}
    assert run_json(capsys, "verify", root, "--trust", secret)["ok"]
    refused = run_json(capsys, "log", root, "--trust", other, code=1)
    assert {row["damage"] for row in refused} == {"signature-untrusted"}
    assert "hmac-sha256" in run(capsys, "dump", root, keys.version_key(1))
    assert run_json(capsys, "squash", root, 0, 1, "--trust", secret)["existed"]
    third = checkpoint(tmp_path / "third", changed(changed(weights())))
    run(capsys, "publish", root, third, "--sign-with", secret)
    refused = run_json(capsys, "squash", root, 0, 2, "--trust", secret, code=2)
    assert refused["kind"] == "key-missing"
    assert run_json(capsys, "squash", root, 0, 2, "--trust", secret, "--sign-with", secret)["stored_bytes"]
    assert run_json(capsys, "verify", root, "--trust", secret)["ok"]
    run(capsys, "publish", root, first, "--trust", secret, code=2)
    run(capsys, "publish", root, first)
    assert run_json(capsys, "verify", root, "--trust", secret, code=1)["problems"]
    second.rename(tmp_path / "key")
    run(capsys, "log", root, "--trust", tmp_path / "key", code=2)
    other.write_text("no key at all")
    run(capsys, "log", root, "--trust", other, code=2)
