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

_HEADER = struct.Struct("<8sIQI")

# msgpack marks: of bin and str with the bytes of their length, and of numbers, arrays and maps with the
# bytes that follow. Extension types get no entry: the decoder refuses them.
_PAYLOAD = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_FIXED = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_FIXED |= {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}


def pack_map(body: dict[str, Any]) -> bytes:
    """One msgpack map with its keys, at every depth, in the order of their UTF-8 bytes."""
    return cast("bytes", msgpack.packb(_ordered(body), use_bin_type=True))


def seal(body: dict[str, Any]) -> bytes:
    """The whole object around a body."""
    packed = pack_map(body)
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
            # A list is allocated at its announced length, hence no length beyond the items that are there.
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

    An item of one byte becomes an object of 60; a body of many items is refused before any is made.
    """
    start = items = 0
    while start < len(body):
        items += 1
        if items > MAX_ITEMS:
            raise FormatError(
                "body has too many items", kind="msgpack-invalid", where=where, expected=MAX_ITEMS
            )
        start += _item_bytes(body, start)
    return items


def _item_bytes(body: memoryview, start: int) -> int:
    """Bytes of one item's header and of its payload, where that is no items of its own."""
    mark = body[start]
    if 0xA0 <= mark <= 0xBF:
        return 1 + (mark & 31)
    if mark in _PAYLOAD:
        length_bytes = _PAYLOAD[mark]
        return 1 + length_bytes + int.from_bytes(body[start + 1 : start + 1 + length_bytes], "big")
    return 1 + _FIXED.get(mark, 0)


def _unique(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    items = list(pairs)
    result = dict(items)
    if len(result) != len(items):
        keys = [key for key, _ in items]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise FormatError("key stands twice in a map", kind="key-twice", found=repr(twice))
    return result


def _checked_body(body: object, kind: str | None, where: object) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise FormatError("body is not a map", kind="field-type", where=where, found=type(body).__name__)
    required = body.get("required")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise FormatError(
            "`required` is not a list of feature names",
            kind="field-type",
            where=where,
            found=repr(required)[:80],
        )
    for name in required:
        if name not in FEATURES:
            raise UnsupportedError(
                "object needs a feature that this build does not know",
                kind="feature-unknown",
                where=where,
                found=name[:80],
            )
    if not isinstance(body.get("kind"), str) or (kind is not None and body["kind"] != kind):
        raise FormatError(
            "object of another kind",
            kind="kind-wrong",
            where=where,
            expected=kind,
            found=repr(body.get("kind"))[:80],
        )
    return body


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _ordered(value[key]) for key in sorted(value, key=_utf8)}
    if isinstance(value, list | tuple):
        return [_ordered(item) for item in value]
    return value


def _utf8(key: Any) -> bytes:
    return key.encode() if isinstance(key, str) else repr(key).encode()
