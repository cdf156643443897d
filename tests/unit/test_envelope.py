from __future__ import annotations

import struct
from collections.abc import Callable

import msgpack
import pytest

from deltafmt.errors import ChecksumError, FormatError, UnsupportedError
from deltafmt.format.checksum import crc32c
from deltafmt.format.constants import MAX_ITEMS, OBJECT_MAGIC
from deltafmt.format.envelope import pack_map, seal, shown, stored_bytes, unseal
from tests.formats import enveloped, kind_of

BODY = {"kind": "demo", "required": [], "x": 1}
DATA = seal(BODY)


def test_the_bytes_of_an_envelope() -> None:
    packed = pack_map(BODY)
    assert DATA[:8] == b"\x89DFM\r\n\x1a\n" == OBJECT_MAGIC
    assert struct.unpack_from("<IQ", DATA, 8) == (1, len(packed))
    assert DATA[20:24] == crc32c(DATA[8:20] + packed).to_bytes(4, "little")
    assert DATA[24:] == packed


def test_crc32c_is_castagnolis() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def test_keys_are_written_in_byte_order_at_every_depth() -> None:
    packed = pack_map({"é": 0, "z": {"b": 0, "a": [{"d": 0, "c": 0}]}, "a": 0})
    assert packed == msgpack.packb({"a": 0, "z": {"a": [{"c": 0, "d": 0}], "b": 0}, "é": 0})


def test_a_body_comes_back_with_keys_that_nobody_knows() -> None:
    assert unseal(DATA, kind="demo", where="x") == BODY
    assert unseal(memoryview(DATA), kind=None, where="x") == BODY


SPOILED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "nothing": ("truncated", lambda d: d[:0]),
    "cut in the header": ("truncated", lambda d: d[:23]),
    "cut in the body": ("truncated", lambda d: d[:-1]),
    "one byte more": ("trailing-bytes", lambda d: d + b"\0"),
    "another magic": ("magic-wrong", lambda d: b"\x88" + d[1:]),
    "another version": ("version-unsupported", lambda d: enveloped(d[24:], version=2)),
    "a flipped bit": ("crc-mismatch", lambda d: d[:-1] + bytes([d[-1] ^ 1])),
    "a flipped checksum": ("crc-mismatch", lambda d: d[:20] + bytes([d[20] ^ 1]) + d[21:]),
    "no map": ("field-type", lambda d: enveloped(b"\x01")),
    "no required": ("field-type", lambda d: seal({"kind": "demo"})),
    "required no list": ("field-type", lambda d: seal({**BODY, "required": "x"})),
    "required numbers": ("field-type", lambda d: seal({**BODY, "required": [1]})),
    "a new feature": ("feature-unknown", lambda d: seal({**BODY, "required": ["x" * 500]})),
    "no kind": ("kind-wrong", lambda d: seal({"required": []})),
    "another kind": ("kind-wrong", lambda d: seal({**BODY, "kind": "other"})),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_envelope_is_refused(case: str) -> None:
    kind, spoil = SPOILED[case]
    assert kind_of(lambda: unseal(spoil(DATA), kind="demo", where="x")) == kind


def test_errors_are_of_the_class_that_callers_act_on() -> None:
    with pytest.raises(ChecksumError):
        unseal(SPOILED["a flipped bit"][1](DATA), kind="demo", where="x")
    for case in ("another version", "a new feature"):
        with pytest.raises(UnsupportedError, match="x"):
            unseal(SPOILED[case][1](DATA), kind="demo", where="x")


def test_an_object_beyond_the_limit_is_refused_before_it_is_looked_at() -> None:
    assert kind_of(lambda: unseal(bytes(100), kind="demo", where="x", limit=99)) == "object-too-large"


BODIES = {
    "cut inside": pack_map(BODY)[:-1],
    "two items": pack_map(BODY) + b"\xc0",
    "nothing": b"",
    "array of 2^31 - 1": bytes.fromhex("dd7fffffff"),
    "map of 2^31 - 1": bytes.fromhex("df7fffffff"),
    "bin of 2^31 - 1": bytes.fromhex("c67fffffff"),
    "text of 2^31 - 1": bytes.fromhex("db7fffffff"),
    "100,000 deep": b"\x91" * 100_000,
    "60,000 deep": b"\x91" * 60_000 + b"\xc0",
    "arrays in arrays that announce all": b"\x81\xa1a" + bytes.fromhex("dd0000ea60") * 400 + b"\xc0" * 60_000,
    "too many items": bytes.fromhex("dd00010000") + b"\xc0" * 65_536,
    "extension": b"\x81\xa1a\xd4\x01\x00",
    "extension of no bytes": b"\x81\xa1a\xc7\x00\x05",
    "timestamp": b"\x81\xa1a\xd6\xff\x00\x00\x00\x00",
    "the mark that is never used": b"\x81\xa1a\xc1",
    "key of bytes": b"\x81\xc4\x01a\x00",
    "key of bytes inside": b"\x81\xa1a\x81\xc4\x01a\x00",
    "number as key": b"\x81\x01\x00",
    "list as key": b"\x81\x90\x00",
    "text that is not UTF-8": b"\x81\xa1a\xa1\xff",
    "key that is not UTF-8": b"\x81\xa1\xff\x00",
}


@pytest.mark.parametrize("case", BODIES)
def test_what_is_no_msgpack_map_within_the_limits_is_refused(case: str) -> None:
    assert kind_of(lambda: unseal(enveloped(BODIES[case]), kind=None, where="x")) == "msgpack-invalid"


def test_a_key_that_stands_twice_is_refused_at_every_depth() -> None:
    twice = b"\x82\xa1a\x01\xa1a\x02"
    assert kind_of(lambda: unseal(enveloped(twice), kind=None, where="x")) == "key-twice"
    assert kind_of(lambda: unseal(enveloped(b"\x81\xa1m" + twice), kind=None, where="x")) == "key-twice"


def test_the_last_of_very_many_keys_twice() -> None:
    keys = [msgpack.packb(f"{k:05d}") + b"\xc0" for k in [*range(32_000), 31_999]]
    body = b"\xde" + struct.pack(">H", len(keys)) + b"".join(keys)
    assert kind_of(lambda: unseal(enveloped(body), kind=None, where="x")) == "key-twice"


def test_an_object_of_too_many_items_is_not_made() -> None:
    assert kind_of(lambda: seal({**BODY, "meta": [0] * MAX_ITEMS})) == "msgpack-invalid"


@pytest.mark.parametrize(
    "value",
    [
        {1: 2},
        {"a": {b"k": 1}},
        {"a": msgpack.Timestamp(1)},
        {"a": {1, 2}},
        {"a": 2**64},
        {"a": "\ud800"},
        {"a": [0] * MAX_ITEMS},
    ],
    ids=str,
)
def test_labels_that_no_reader_would_take(value: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        stored_bytes(value)


def test_labels_nested_too_deep() -> None:
    value: dict[str, object] = {}
    for _ in range(5000):
        value = {"a": value}
    assert kind_of(lambda: stored_bytes(value)) == "msgpack-invalid"


def test_labels_that_readers_take() -> None:
    value = {"step": 3, "loss": float("nan"), "x": [None, True, {"y": b"z"}], "t": (1, 2)}
    assert stored_bytes(value) == len(pack_map({"": {"": value}}))


@pytest.mark.parametrize(
    "value", ["x" * 10**6, b"x" * 10**6, ["x"] * 10**5, {"x": "y" * 10**6}, None, 1.5, 2**63]
)
def test_values_are_shown_short(value: object) -> None:
    assert len(shown(value)) < 100
