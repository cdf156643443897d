"""Signatures of manifests: who published a version, for readers that ask.

A signed manifest carries the BLAKE2b-256 of each of its chunks, and ends with its signature. It names its base
by the digest of its manifest, and schema, tiling and side files by theirs: a reader that trusts the signature
of one version trusts all the bytes that make it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgpack

from deltafmt.errors import ChecksumError, FormatError, UnsupportedError
from deltafmt.format.constants import ENVELOPE_BYTES

if TYPE_CHECKING:
    import os

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE = "signature"
"""Key of a body's last entry, a list of algorithm, key id and signature."""
_CONTEXT = b"deltafmt manifest 1\0"
_KEY_ID_BYTES = 8
_MIN_SECRET_BYTES = 32

Entry = tuple[str, bytes, bytes]
"""(algorithm, key id, signature)."""


class Verifier(Protocol):
    """A key that tells whether a signature was made with it, or with its private half."""

    algorithm: str
    key_id: bytes

    def verifies(self, message: bytes, signature: bytes) -> bool: ...


class Signer(Protocol):
    """A key that signs; `verifier` is what readers of its signatures need."""

    algorithm: str
    key_id: bytes
    signature_bytes: int

    def sign(self, message: bytes) -> bytes: ...

    @property
    def verifier(self) -> Verifier: ...


class HmacKey:
    """A shared secret of at least 32 random bytes, for HMAC-SHA256: whoever can verify can sign, too."""

    algorithm = "hmac-sha256"
    signature_bytes = 32

    def __init__(self, secret: bytes) -> None:
        if len(secret) < _MIN_SECRET_BYTES:
            raise ValueError(
                f"a secret of {len(secret)} bytes is too short; take {_MIN_SECRET_BYTES} or more"
            )
        self._secret = secret
        self.key_id = _key_id(self.algorithm, hmac.digest(secret, b"deltafmt key id", "sha256"))

    def __repr__(self) -> str:
        return f"HmacKey(id {self.key_id.hex()})"

    def sign(self, message: bytes) -> bytes:
        return hmac.digest(self._secret, message, "sha256")

    def verifies(self, message: bytes, signature: bytes) -> bool:
        return hmac.compare_digest(self.sign(message), signature)

    @property
    def verifier(self) -> HmacKey:
        return self


class SigningKey:
    """An Ed25519 private key, of 32 bytes. Needs the package `cryptography` (`deltafmt[sign]`)."""

    algorithm = "ed25519"
    signature_bytes = 64

    def __init__(self, private_bytes: bytes) -> None:
        with _extra():
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._key: Ed25519PrivateKey = Ed25519PrivateKey.from_private_bytes(private_bytes)
        self.verifier = VerifyKey(self._key.public_key().public_bytes_raw())
        self.key_id = self.verifier.key_id

    def __repr__(self) -> str:
        return f"SigningKey(id {self.key_id.hex()})"

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)


class VerifyKey:
    """An Ed25519 public key, of 32 bytes. Needs the package `cryptography` (`deltafmt[sign]`)."""

    algorithm = "ed25519"

    def __init__(self, public_bytes: bytes) -> None:
        with _extra():
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        self._key: Ed25519PublicKey = Ed25519PublicKey.from_public_bytes(public_bytes)
        self.key_id = _key_id(self.algorithm, public_bytes)

    def __repr__(self) -> str:
        return f"VerifyKey(id {self.key_id.hex()})"

    def verifies(self, message: bytes, signature: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, message)
        except InvalidSignature:
            return False
        return True


def load_key(path: str | os.PathLike[str]) -> HmacKey | SigningKey | VerifyKey:
    """The key in a file: an Ed25519 key, private or public, as PEM, or a shared secret in hex digits.

    `openssl genpkey -algorithm ed25519` makes a private key, `openssl pkey -pubout` its public half, and
    `openssl rand -hex 32` a secret. Raises `ValueError` for what is no key, `OSError` for a file that cannot be read, and
    `UnsupportedError` (`extra-missing`) for an Ed25519 key where `cryptography` is not installed.
    """
    text = Path(path).read_bytes()
    if b"-----BEGIN" not in text:
        try:
            return HmacKey(bytes.fromhex(text.decode("ascii").strip()))
        except ValueError as error:
            # The text is a secret, and stays out of the message.
            raise ValueError(f"{path} holds no PEM, nor 64 or more hex digits") from error.__cause__
    with _extra():
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    if b"PRIVATE" in text:
        private = serialization.load_pem_private_key(text, None)
        if isinstance(private, Ed25519PrivateKey):
            return SigningKey(private.private_bytes_raw())
    else:
        public = serialization.load_pem_public_key(text)
        if isinstance(public, Ed25519PublicKey):
            return VerifyKey(public.public_bytes_raw())
    raise ValueError(f"{path} holds a key of another kind than Ed25519")


def signed(body: dict[str, object], signer: Signer) -> bytes:
    """A packed map of an ordered body, with a signature as its last entry."""
    blank = bytes(signer.signature_bytes)
    entry = {SIGNATURE: [signer.algorithm, signer.key_id, blank]}
    packed: bytes = msgpack.packb(body | entry, use_bin_type=True)
    message = packed[: -signer.signature_bytes]
    return message + signer.sign(_CONTEXT + message)


def check_signature(
    data: bytes | memoryview, entry: Entry | None, trusted: Sequence[Verifier], *, where: object
) -> None:
    """Raise `ChecksumError` unless an object, whose `signature` is `entry`, is signed with a trusted key."""
    if entry is None:
        raise ChecksumError(
            "a signature is demanded, and the object has none", kind="signature-missing", where=where
        )
    algorithm, key_id, signature = entry
    candidates = [key for key in trusted if (key.algorithm, key.key_id) == (algorithm, key_id)]
    if not candidates:
        raise ChecksumError(
            "signed with a key that is not trusted",
            kind="signature-untrusted",
            where=where,
            expected=" or ".join(f"{key.algorithm} {key.key_id.hex()}" for key in trusted),
            found=f"{algorithm[:32]!r} {key_id[:16].hex()}",
        )
    body = bytes(data[ENVELOPE_BYTES:])
    tail = msgpack.packb(SIGNATURE) + msgpack.packb(list(entry))
    if not body.endswith(tail):
        raise FormatError(
            "the signature is not the last entry of the body", kind="signature-place", where=where
        )
    message = _CONTEXT + body[: -len(signature)]
    if not any(key.verifies(message, signature) for key in candidates):
        raise ChecksumError("the signature is wrong", kind="signature-wrong", where=where)


def check_signer(key: object) -> None:
    """Raise `UnsupportedError` (`key-unfit`) for a key that cannot sign, and for what is no key."""
    if not hasattr(key, "verifies") and not hasattr(key, "sign"):
        raise _no_key(key)
    if not hasattr(key, "sign"):
        raise UnsupportedError(
            "a public key verifies, but cannot sign; give its private half", kind="key-unfit", where=repr(key)
        )


def check_verifiers(keys: object) -> None:
    """Raise `UnsupportedError` (`key-unfit`) unless all are keys that can verify."""
    if not isinstance(keys, Sequence) or isinstance(keys, str | bytes):
        raise UnsupportedError(
            "keys to trust are given as a list: trust=[key]", kind="key-unfit", found=type(keys).__name__
        )
    for key in keys:
        if not hasattr(key, "verifies"):
            if hasattr(key, "verifier"):
                raise UnsupportedError(
                    "a private key is not what readers trust; give its public half, key.verifier",
                    kind="key-unfit",
                    where=repr(key),
                )
            raise _no_key(key)


def _no_key(value: object) -> UnsupportedError:
    # It may be a secret itself, and stays out of the message.
    return UnsupportedError(
        "this is no key; load_key(path) reads one from a file", kind="key-unfit", found=type(value).__name__
    )


@contextmanager
def _extra() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise UnsupportedError(
            "Ed25519 keys need the package cryptography: pip install 'deltafmt[sign]'", kind="extra-missing"
        ) from error


def _key_id(algorithm: str, material: bytes) -> bytes:
    message = algorithm.encode() + b"\0" + material
    return hashlib.blake2b(message, digest_size=_KEY_ID_BYTES).digest()
