"""The envelope of every metadata object: magic, version, length, CRC32C and one msgpack map."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, cast

import msgpack

from deltafmt.errors import ChecksumError, FormatError, UnsupportedError
from deltafmt.format.checksum import crc32c
from deltafmt.format.constants import (
    ENVELOPE_BYTES,
    FEATURES,
    FORMAT_VERSION,
    MAX_ITEMS,
    MAX_OBJECT_BYTES,
    OBJECT_MAGIC,
)
from deltafmt.format.signing import SIGNATURE, Signer, signed

_HEADER = struct.Struct("<8sIQI")

# msgpack marks: of bin and str with the bytes of their length; of numbers, arrays and maps with the bytes that
# follow; and those that no body may hold: extension types, and the one that msgpack never uses.
_PAYLOAD = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_FIXED = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_ARRAYS, _MAPS = {0xDC: 2, 0xDD: 4}, {0xDE: 2, 0xDF: 4}
_REFUSED = frozenset({0xC1, 0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8})


def pack_map(body: dict[str, Any]) -> bytes:
    """One msgpack map with its keys, at every depth, in the order of their UTF-8 bytes; a signature is last."""
    return cast("bytes", msgpack.packb(_body_ordered(body), use_bin_type=True))


def stored_bytes(value: dict[str, Any]) -> int:
    """Bytes of a map inside a body; `FormatError` (`msgpack-invalid`) for what no reader would take there."""
    try:
        # Two maps around it, as a body and a field have.
        packed = pack_map({"": {"": value}})
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise FormatError("not storable", kind="msgpack-invalid", found=str(error)) from error
    _unpack(memoryview(packed), None)
    return len(packed)


def seal(body: dict[str, Any], signer: Signer | None = None) -> bytes:
    """The whole object around a body, signed if there is somebody to do so.

    Raises `FormatError` for a body of more items than readers take.
    """
    packed = pack_map(body) if signer is None else signed(_body_ordered(body), signer)
    _count_items(memoryview(packed), "new object")
    checksum = crc32c(packed, crc32c(struct.pack("<IQ", FORMAT_VERSION, len(packed))))
    return _HEADER.pack(OBJECT_MAGIC, FORMAT_VERSION, len(packed), checksum) + packed


def unseal(
    data: bytes | memoryview, *, kind: str | None, where: object, limit: int = MAX_OBJECT_BYTES
) -> dict[str, Any]:
    """The body of an object, its envelope and shape checked; `kind` None takes any kind.

    Raises `FormatError`, `ChecksumError`, or `UnsupportedError` for a newer version or a required feature
    that this build does not know.
    """
    view = memoryview(data)
    if len(view) > limit:
        raise FormatError(
            "object is larger than the limit",
            kind="object-too-large",
            where=where,
            expected=limit,
            found=len(view),
        )
    if len(view) < ENVELOPE_BYTES:
        raise FormatError(
            "object is cut",
            kind="truncated",
            where=where,
            expected=f"{ENVELOPE_BYTES} bytes",
            found=len(view),
        )
    magic, version, length, checksum = _HEADER.unpack_from(view)
    if magic != OBJECT_MAGIC:
        raise FormatError("not a deltafmt object", kind="magic-wrong", where=where, found=magic.hex())
    if version != FORMAT_VERSION:
        raise UnsupportedError(
            "format version", kind="version-unsupported", where=where, expected=FORMAT_VERSION, found=version
        )
    body = view[ENVELOPE_BYTES:]
    if len(body) != length:
        kind_of_length = "truncated" if len(body) < length else "trailing-bytes"
        raise FormatError(
            "object has another length", kind=kind_of_length, where=where, expected=length, found=len(body)
        )
    found = crc32c(body, crc32c(view[8:20]))
    if found != checksum:
        raise ChecksumError(
            "metadata does not match its CRC32C",
            kind="crc-mismatch",
            where=where,
            expected=f"{checksum:08x}",
            found=f"{found:08x}",
        )
    return _checked_body(_unpack(body, where), kind, where)


def _unpack(body: memoryview, where: object) -> object:
    items = _count_items(body, where)
    try:
        return msgpack.unpackb(
            body,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_unique,
            max_str_len=len(body),
            max_bin_len=len(body),
            max_array_len=items,
            max_map_len=items,
            max_ext_len=0,
        )
    except FormatError as error:
        raise FormatError(error.message, kind=error.kind, where=where, found=error.found) from None
    except (ValueError, TypeError, RecursionError, UnicodeDecodeError, msgpack.UnpackException) as error:
        raise FormatError(f"body is not msgpack ({error})", kind="msgpack-invalid", where=where) from error


def _count_items(body: memoryview, where: object) -> int:
    """Number of msgpack items, at most `MAX_ITEMS`, found by walking their headers.

    An item of one byte becomes an object of 60, and an array is allocated at its announced length: a body of
    many items, or one whose arrays and maps announce others than are there, is refused before any is made.
    """
    start = items = announced = 0
    while start < len(body):
        items += 1
        if items > MAX_ITEMS:
            raise FormatError(
                "body has too many items", kind="msgpack-invalid", where=where, expected=MAX_ITEMS
            )
        if body[start] in _REFUSED:
            raise FormatError(
                "body holds an item of a type that is not allowed",
                kind="msgpack-invalid",
                where=where,
                found=f"mark {body[start]:#04x}",
            )
        size, members = _item(body, start)
        start += size
        announced += members
    if announced + 1 != items:
        raise FormatError(
            "body is not one whole msgpack item",
            kind="msgpack-invalid",
            where=where,
            expected=f"{announced + 1} items",
            found=items,
        )
    return items


def _item(body: memoryview, start: int) -> tuple[int, int]:
    """Bytes of one item's header with what is no items of its own, and the number of its members."""
    mark = body[start]
    if 0x80 <= mark <= 0x8F:
        return 1, 2 * (mark & 15)
    if 0x90 <= mark <= 0x9F:
        return 1, mark & 15
    if 0xA0 <= mark <= 0xBF:
        return 1 + (mark & 31), 0
    if mark in _PAYLOAD:
        return 1 + _PAYLOAD[mark] + _length(body, start, _PAYLOAD[mark]), 0
    if mark in _ARRAYS:
        return 1 + _ARRAYS[mark], _length(body, start, _ARRAYS[mark])
    if mark in _MAPS:
        return 1 + _MAPS[mark], 2 * _length(body, start, _MAPS[mark])
    return 1 + _FIXED.get(mark, 0), 0


def _length(body: memoryview, start: int, size: int) -> int:
    return int.from_bytes(body[start + 1 : start + 1 + size], "big")


def _unique(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    for key, value in pairs:
        if not isinstance(key, str):
            raise FormatError("map key is no string", kind="msgpack-invalid", found=shown(key))
        if key in result:
            raise FormatError("key stands twice in a map", kind="key-twice", found=shown(key))
        result[key] = value
    return result


def shown(value: object) -> str:
    """A value of a body for an error: short, and never built from more than a few bytes of it."""
    if isinstance(value, str | bytes):
        return repr(value[:64])
    if isinstance(value, list | dict):
        return f"{type(value).__name__} of {len(value)}"
    return repr(value)


def _checked_body(body: object, kind: str | None, where: object) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise FormatError("body is not a map", kind="field-type", where=where, found=type(body).__name__)
    required = body.get("required")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise FormatError(
            "`required` is not a list of feature names",
            kind="field-type",
            where=where,
            found=shown(required),
        )
    for name in required:
        if name not in FEATURES:
            raise UnsupportedError(
                "object needs a feature that this build does not know",
                kind="feature-unknown",
                where=where,
                found=shown(name),
            )
    if not isinstance(body.get("kind"), str) or (kind is not None and body["kind"] != kind):
        raise FormatError(
            "object of another kind",
            kind="kind-wrong",
            where=where,
            expected=kind,
            found=shown(body.get("kind")),
        )
    return body


def _body_ordered(body: dict[str, Any]) -> dict[str, Any]:
    ordered: dict[str, Any] = _ordered(body)
    if SIGNATURE in ordered:
        ordered[SIGNATURE] = ordered.pop(SIGNATURE)
    return ordered


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _ordered(value[key]) for key in sorted(value, key=_utf8)}
    if isinstance(value, list | tuple):
        return [_ordered(item) for item in value]
    return value


def _utf8(key: Any) -> bytes:
    return key.encode() if isinstance(key, str) else repr(key).encode()
