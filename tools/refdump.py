#!/usr/bin/env python3
"""A second reader of deltafmt, written from spec/ alone: it dumps any object and rebuilds any version.

    refdump.py OBJECT                               one object (.dfm or .dfs) as JSON
    refdump.py ROOT --version N                     names, dtypes, shapes and BLAKE2b-256 of all tensors
    refdump.py ROOT --version N --way anchor        the same by one given way: a base's number, or "anchor"
    refdump.py ROOT --version N --out FILE          tensors into a safetensors file

ROOT is a local folder. Every checksum, digest and rule is checked. A bad object prints
{"error": reason code, "where": ...} and the exit code is 1. It is made to be read, not to be fast.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import itertools
import json
import math
import re
import struct
import sys
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zstandard

OBJECT, SHARD, END = (b"\x89DF" + letter + b"\r\n\x1a\n" for letter in (b"M", b"S", b"E"))
SET, STEP, DENSE = 1, 2, 3
OPERATIONS = {SET: "set", STEP: "step", DENSE: "dense"}
GAP, LOW, BLOCK, CODE, MAGNITUDE, ESCAPE, PLANE = 0, 1, 2, 3, 4, 5, 16
COLUMNS = {0: "gap", 1: "low", 2: "block", 3: "code", 4: "magnitude", 5: "escape"} | {
    16 + j: f"b{j}" for j in range(8)
}
MAX_OBJECT, MAX_ITEMS, MAX_TENSORS = 64 << 20, 65536, 1 << 20
MAX_DOMAIN = 2**31 - 1
MAX_VERSION, MAX_LEASE = 10**18, 86400
M64 = 2**64 - 1

# torch's name -> (safetensors' name, bytes per element)
DTYPES = {
    "bool": ("BOOL", 1), "uint8": ("U8", 1), "int8": ("I8", 1), "uint16": ("U16", 2), "int16": ("I16", 2),
    "uint32": ("U32", 4), "int32": ("I32", 4), "uint64": ("U64", 8), "int64": ("I64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1), "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1), "float8_e8m0fnu": ("F8_E8M0", 1), "bfloat16": ("BF16", 2),
    "float16": ("F16", 2), "float32": ("F32", 4), "float64": ("F64", 8), "complex64": ("C64", 8),
}  # fmt: skip

# Tables: column -> numpy type
TABLES = {
    "TensorTable": {"name_length": "<u4", "dtype": "<u1", "rank": "<u1", "alias": "<u4"},
    "DomainShapeTable": {"width": "<u1", "boxes": "<u4"},
    "BoxTable": {"tensor": "<u4"},
    "ShardTable": {"writer": "<u4", "size": "<u8"},
    "ChunkTable": {
        "shard": "<u4", "domain": "<u4", "operation": "<u1", "order": "<u1", "width": "<u1", "shift": "<u1",
        "block": "<u1", "listed": "<u4", "offset": "<u8", "columns": "<u1",
    },
    "ColumnTable": {"column": "<u1", "codec": "<u1", "stored": "<u8", "raw": "<u8", "crc": "<u4"},
    "DomainTable": {
        "domain": "<u4", "digest0": "<u8", "digest1": "<u8", "base0": "<u8", "base1": "<u8", "base_known": "<u1"
    },
    "DigestTable": {"digest0": "<u8", "digest1": "<u8"},
    "MovedTable": {"tensor": "<u4", "digest0": "<u8", "digest1": "<u8"},
    "ReplicaTable": {"domain": "<u4", "digest0": "<u8", "digest1": "<u8"},
}  # fmt: skip

_WAY = {
    "lineage": "bin16", "version": "int", "base": "int?", "base_digest": "bin32?", "target_digest": "bin32?",
    "schema": "bin32", "tiling": "bin32", "attempt": "bin16", "writers": "int", "created": "int", "data": "bool",
    "meta": "map", "files": "files", "changed": "int?", "listed": "int", "shards": "ShardTable",
    "chunks": "ChunkTable", "columns": "ColumnTable", "domains": "DomainTable", "tensors": "DigestTable",
}  # fmt: skip
OBJECTS = {
    "lineage": {"lineage": "bin16", "created": "int", "schema": "bin32"},
    "schema": {"dtypes": "texts", "tensors": "TensorTable", "names": "column u1", "shapes": "column u8"},
    "tiling": {
        "schema": "bin32", "domains": "DomainShapeTable", "boxes": "BoxTable", "starts": "column u8", "stops": "column u8"
    },
    "version": _WAY,
    "way": _WAY,
    "footer": {
        "lineage": "bin16", "version": "int", "base": "int?", "schema": "bin32", "tiling": "bin32", "attempt": "bin16",
        "writer": "int", "writers": "int", "changed": "int?", "listed": "int", "chunks": "ChunkTable",
        "columns": "ColumnTable", "domains": "DomainTable",
    },
    "latest": {"lineage": "bin16", "version": "int"},
    "attempt": {
        "lineage": "bin16", "version": "int", "base": "int?", "base_digest": "bin32?", "attempt": "bin16", "job": "bin16",
        "coordinator": "bin16", "round": "int", "purpose": "int", "writers": "int", "created": "int", "data": "bool",
        "beside": "bool", "signed": "bool", "meta": "map", "schema": "bin32?", "tiling": "bin32?", "holdings": "column u1",
        "owner": "column u4", "holders": "column u4",
    },
    "answer": {
        "attempt": "bin16", "writer": "int", "failure": "map", "dtypes": "texts", "tensors": "TensorTable",
        "names": "column u1", "shapes": "column u8", "boxes": "BoxTable", "starts": "column u8", "stops": "column u8",
    },
    "receipt": {
        "lineage": "bin16", "version": "int", "base": "int?", "base_digest": "bin32?", "schema": "bin32",
        "tiling": "bin32", "attempt": "bin16", "writer": "int", "writers": "int", "size": "int", "changed": "int?",
        "listed": "int", "chunks": "ChunkTable", "columns": "ColumnTable", "domains": "DomainTable",
        "moved": "MovedTable", "replicas": "ReplicaTable",
    },
    "verdict": {"attempt": "bin16", "outcome": "int", "failure": "map"},
    "floor": {"lineage": "bin16", "version": "int", "created": "int"},
    "lease": {"lineage": "bin16", "reader": "bin16", "start": "int", "seconds": "int", "created": "int"},
}  # fmt: skip
# Fields that a body may lack
_SIGNED = {"chunk_digests": "bin", "signature": "signature"}
OPTIONAL = {"version": _SIGNED, "way": _SIGNED, "receipt": _SIGNED}


class BadObjectError(Exception):
    """An object breaks a rule; `code` is the spec's reason code."""

    def __init__(self, code: str, where: str) -> None:
        super().__init__(f"{code}: {where}")
        self.code, self.where = code, where


def require(rule: Any, code: str, where: str) -> None:
    if not rule:
        raise BadObjectError(code, where)


# --- checksums ------------------------------------------------------------------------------------------


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


CRC_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC_TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def blake2b(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def mix(x: int) -> int:
    for _ in range(2):
        x = (x ^ x >> 32) * 0xD6E8FEB86659FD93 & M64
    return x ^ x >> 32


GOLDEN = 0x9E3779B97F4A7C15
A = [[mix(GOLDEN * (2 * t + lane + 1) & M64) >> 32 | 1 for t in range(512)] for lane in (0, 1)]


class TensorDigest:
    """Digest of some elements of one tensor: two sums over its 32-bit words."""

    def __init__(self, name: str, width: int) -> None:
        salt = hashlib.blake2b(name.encode(), digest_size=16).digest()
        self.salts, self.width = struct.unpack("<QQ", salt), width
        self.multipliers: dict[tuple[int, int], int] = {}

    def multiplier(self, lane: int, word: int) -> int:
        block = word // 512
        if (lane, block) not in self.multipliers:
            self.multipliers[lane, block] = mix(self.salts[lane] + GOLDEN * (block + 1) & M64) | 1
        return A[lane][word % 512] * self.multipliers[lane, block]

    def of(self, index: Any, bits: Any) -> tuple[int, int]:
        """Digest of elements at canonical flat indices."""
        sums = [0, 0]
        for i, value in zip(index.tolist(), bits.tolist(), strict=True):
            byte = i * self.width
            parts = [(byte // 4, (value << 8 * (byte % 4)) & 0xFFFFFFFF)]
            if self.width == 8:
                parts = [(byte // 4, value & 0xFFFFFFFF), (byte // 4 + 1, value >> 32)]
            for word, value32 in parts:
                for lane in (0, 1):
                    sums[lane] += self.multiplier(lane, word) * value32
        return sums[0] & M64, sums[1] & M64


# --- metadata objects -----------------------------------------------------------------------------------


def unseal(data: bytes, kind: str | None, where: str) -> Any:
    require(len(data) <= MAX_OBJECT, "object-too-large", where)
    require(len(data) >= 24, "truncated", where)
    magic, version, length, checksum = struct.unpack_from("<8sIQI", data)
    require(magic == OBJECT, "magic-wrong", where)
    require(version == 1, "version-unsupported", where)
    require(len(data) >= 24 + length, "truncated", where)
    require(len(data) == 24 + length, "trailing-bytes", where)
    require(crc32c(data[8:20] + data[24:]) == checksum, "crc-mismatch", where)
    body = unpack(data[24:], where)
    require(isinstance(body, dict), "field-type", where)
    required = body.get("required")
    require(
        isinstance(required, list) and all(isinstance(name, str) for name in required), "field-type", where
    )
    require(not required, "feature-unknown", where)
    require(isinstance(body.get("kind"), str) and kind in (None, body["kind"]), "kind-wrong", where)
    return body


def unpack(body: bytes, where: str) -> Any:
    count = count_items(body, where)
    try:
        return msgpack.unpackb(
            body, raw=False, strict_map_key=True, object_pairs_hook=lambda pairs: unique(pairs, where),
            max_array_len=count, max_map_len=count, max_ext_len=0, max_str_len=len(body), max_bin_len=len(body),
        )  # fmt: skip
    except BadObjectError:
        raise
    except Exception as error:
        raise BadObjectError("msgpack-invalid", f"{where}: {error}") from error


def count_items(body: bytes, where: str) -> int:
    """Items of a msgpack body, from their headers alone."""
    lengths = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
    fixed = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
    members = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
    at = items = announced = 0
    while at < len(body):
        items += 1
        require(items <= MAX_ITEMS, "msgpack-invalid", where)
        mark = body[at]
        require(mark not in (0xC1, *range(0xC7, 0xCA), *range(0xD4, 0xD9)), "msgpack-invalid", where)
        if 0x80 <= mark <= 0x9F:
            announced += (mark & 15) * (2 if mark < 0x90 else 1)
            at += 1
        elif mark in members:
            size, each = members[mark]
            announced += each * int.from_bytes(body[at + 1 : at + 1 + size], "big")
            at += 1 + size
        elif 0xA0 <= mark <= 0xBF:
            at += 1 + (mark & 31)
        elif mark in lengths:
            at += 1 + lengths[mark] + int.from_bytes(body[at + 1 : at + 1 + lengths[mark]], "big")
        else:
            at += 1 + fixed.get(mark, 0)
    require(items == announced + 1, "msgpack-invalid", where)
    return items


def unique(pairs: list[tuple[Any, Any]], where: str) -> dict[Any, Any]:
    pairs = list(pairs)
    require(all(isinstance(key, str) for key, _ in pairs), "msgpack-invalid", where)
    require(len(dict(pairs)) == len(pairs), "key-twice", where)
    return dict(pairs)


def decompress(codec: int, stored: bytes, raw: int, where: str) -> bytes:
    if codec == 0:
        require(len(stored) == raw, "column-length", where)
        return stored
    require(codec == 1, "codec-unknown", where)
    require(stored[:4] == b"\x28\xb5\x2f\xfd", "zstd-corrupt", where)
    try:
        declared = zstandard.frame_content_size(stored)
        # The frame's end is found before its content is made.
        require(declared == raw, "zstd-size", where)
        end = frame_end(stored, where)
        require(end == len(stored), "zstd-trailing", where)
        return zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw)
    except zstandard.ZstdError as error:
        raise BadObjectError("zstd-corrupt", f"{where}: {error}") from error


def frame_end(frame: bytes, where: str) -> int:
    head = zstandard.get_frame_parameters(frame)
    at = zstandard.frame_header_size(frame)
    last = False
    while not last:
        require(at + 3 <= len(frame), "zstd-corrupt", where)
        header = int.from_bytes(frame[at : at + 3], "little")
        last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        at += 3 + (1 if kind == 1 else size)
    at += 4 * head.has_checksum
    require(at <= len(frame), "zstd-corrupt", where)
    return at


def table_limit(object_bytes: int) -> int:
    return min(512 << 20, (8 << 20) + 256 * object_bytes)


def is_int(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def parse(data: bytes, kind: str, where: str) -> dict[str, Any]:
    """A record: scalar fields as they are, columns as arrays, tables as dictionaries of arrays."""
    body = unseal(data, kind, where)
    budget = [table_limit(len(data))]
    record = {}
    for name, wire in OBJECTS[kind].items():
        place = f"{where}, field {name}"
        require(name in body, "field-missing", place)
        record[name] = field(body[name], wire, budget, place)
    for name, wire in OPTIONAL.get(kind, {}).items():
        record[name] = field(body[name], wire, budget, f"{where}, field {name}") if name in body else None
    return record


def field(value: Any, wire: str, budget: list[int], where: str) -> Any:
    if wire in TABLES:
        require(isinstance(value, dict) and is_int(value.get("rows")), "field-type", where)
        table = {}
        for name, dtype in TABLES[wire].items():
            require(name in value, "field-missing", f"{where}, column {name}")
            table[name] = column(value[name], dtype, value["rows"], budget, f"{where}, column {name}")
        return table
    if wire.startswith("column"):
        return column(value, "<" + wire[7:], None, budget, where)
    if wire.endswith("?"):
        return None if value is None else field(value, wire[:-1], budget, where)
    good = {
        "int": is_int(value),
        "bool": isinstance(value, bool),
        "bin": isinstance(value, bytes),
        "signature": is_signature(value),
        "bin16": isinstance(value, bytes) and len(value) == 16,
        "bin32": isinstance(value, bytes) and len(value) == 32,
        "texts": isinstance(value, list) and all(isinstance(item, str) for item in value),
        "map": isinstance(value, dict) and all(isinstance(key, str) for key in value),
        "files": isinstance(value, dict) and all(is_file(name, entry) for name, entry in value.items()),
    }[wire]
    require(good, "field-type", where)
    if wire == "files":
        for name in value:
            require(safe_name(name), "key-unsafe", where)
    return value


def is_signature(value: Any) -> bool:
    triple = isinstance(value, list) and [type(part) for part in value] == [str, bytes, bytes]
    return triple and len(value[2]) > 0


def is_file(name: Any, entry: Any) -> bool:
    pair = isinstance(name, str) and isinstance(entry, list) and len(entry) == 2
    return pair and isinstance(entry[0], bytes) and len(entry[0]) == 32 and is_int(entry[1])


def safe_name(name: str) -> bool:
    parts = all(part not in ("", ".", "..") for part in name.split("/"))
    return parts and name.isprintable() and len(name) <= 1024 and not any(char in name for char in "\\:%")


def column(value: Any, dtype: str, rows: int | None, budget: list[int], where: str) -> Any:
    fits = isinstance(value, list) and len(value) == 3 and is_int(value[0]) and is_int(value[1])
    require(fits and isinstance(value[2], bytes), "field-type", where)
    codec, raw, stored = value
    size = np.dtype(dtype).itemsize
    require(raw == (raw // size * size if rows is None else rows * size), "column-length", where)
    budget[0] -= raw
    require(budget[0] >= 0, "table-too-large", where)
    return np.frombuffer(decompress(codec, stored, raw, where), dtype)


def content_digest(record: dict[str, Any], kind: str) -> bytes:
    """BLAKE2b-256 of the body with every column raw and every map in the order of its keys."""
    body: dict[str, Any] = {"kind": kind, "required": []}
    for name, wire in OBJECTS[kind].items():
        if wire in TABLES:
            rows = len(next(iter(record[name].values())))
            columns = {key: [0, values.nbytes, values.tobytes()] for key, values in record[name].items()}
            body[name] = {"rows": rows, **columns}
        elif wire.startswith("column"):
            body[name] = [0, record[name].nbytes, record[name].tobytes()]
        else:
            body[name] = record[name]
    return blake2b(msgpack.packb(ordered(body), use_bin_type=True))


def ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: ordered(value[key]) for key in sorted(value, key=str.encode)}
    return [ordered(item) for item in value] if isinstance(value, list) else value


# --- schema and tiling ----------------------------------------------------------------------------------


def schema_of(data: bytes, where: str, digest: bytes | None = None) -> list[dict[str, Any]]:
    """Tensors as dictionaries: name, dtype, width, shape, owner (row; its own unless it is an alias)."""
    record = parse(data, "schema", where)
    require(digest in (None, content_digest(record, "schema")), "digest-mismatch", where)
    return tensors_of(record, where)


def tensors_of(record: dict[str, Any], where: str) -> list[dict[str, Any]]:
    table = {key: values.tolist() for key, values in record["tensors"].items()}
    require(len(table["rank"]) <= MAX_TENSORS, "table-too-large", where)
    require(all(rank <= 16 for rank in table["rank"]), "shape-overflow", where)
    require(sum(table["rank"]) == len(record["shapes"]), "column-length", where)
    require(sum(table["name_length"]) == len(record["names"]), "column-length", where)
    require(all(extent < 2**63 for extent in record["shapes"].tolist()), "shape-overflow", where)
    require(all(name in DTYPES for name in record["dtypes"]), "dtype-unknown", where)
    names, shapes = record["names"].tobytes(), record["shapes"].tolist()
    tensors: list[dict[str, Any]] = []
    for row, length in enumerate(table["name_length"]):
        require(table["dtype"][row] < len(record["dtypes"]), "index-range", where)
        require(table["alias"][row] <= len(table["rank"]), "index-range", where)
        try:
            name = names[:length].decode()
        except UnicodeDecodeError as error:
            raise BadObjectError("name-invalid", where) from error
        shape = shapes[: table["rank"][row]]
        names, shapes = names[length:], shapes[table["rank"][row] :]
        dtype = record["dtypes"][table["dtype"][row]]
        require(length <= 4096, "name-invalid", where)
        require(name != "__metadata__", "name-reserved", where)
        require(math.prod(max(1, n) for n in shape) * DTYPES[dtype][1] < 2**63, "shape-overflow", where)
        owner = table["alias"][row] - 1 if table["alias"][row] else row
        tensors.append(
            {"name": name, "dtype": dtype, "width": DTYPES[dtype][1], "shape": shape, "owner": owner}
        )
    require(len({tensor["name"] for tensor in tensors}) == len(tensors), "name-twice", where)
    for row, tensor in enumerate(tensors):
        owner = tensors[tensor["owner"]]
        alike = (owner["dtype"], owner["shape"]) == (tensor["dtype"], tensor["shape"])
        own = table["alias"][row] == 0
        require(own or (alike and table["alias"][tensor["owner"]] == 0), "alias-invalid", where)
    return tensors


Domain = dict[str, Any]


def tiling_of(
    data: bytes, tensors: list[dict[str, Any]], schema: bytes, where: str, digest: bytes | None = None
) -> list[Domain]:
    """Domains as dictionaries: width, boxes (tensor row, start, stop), volume."""
    record = parse(data, "tiling", where)
    require(digest in (None, content_digest(record, "tiling")), "digest-mismatch", where)
    require(record["schema"] == schema, "schema-mismatch", where)
    rows = record["boxes"]["tensor"].tolist()
    require(all(row < len(tensors) for row in rows), "box-tensor", where)
    require(
        all(width in (1, 2, 4, 8) for width in record["domains"]["width"].tolist()), "width-mismatch", where
    )
    counts = record["domains"]["boxes"].tolist()
    require(sum(counts) == len(rows), "column-length", where)
    ranks = [len(tensors[row]["shape"]) for row in rows]
    require(sum(ranks) == len(record["starts"]) == len(record["stops"]), "column-length", where)
    widest = max([1, *(len(tensor["shape"]) for tensor in tensors)])
    require(16 * widest * len(rows) <= table_limit(len(data)), "table-too-large", where)
    starts, stops = record["starts"].tolist(), record["stops"].tolist()
    require(all(value < 2**63 for value in starts + stops), "box-outside", where)
    require(all(counts), "domain-empty", where)
    require(all(tensors[row]["owner"] == row for row in rows), "box-tensor", where)
    boxes = []
    for row, rank in zip(rows, ranks, strict=True):
        start, stop, starts, stops = starts[:rank], stops[:rank], starts[rank:], stops[rank:]
        inside = all(a < b <= n for a, b, n in zip(start, stop, tensors[row]["shape"], strict=True))
        require(inside, "box-outside", where)
        boxes.append((row, start, stop))
    domains, at = [], 0
    for width, count in zip(record["domains"]["width"].tolist(), counts, strict=True):
        own = boxes[at : at + count]
        at += count
        volume = sum(box_volume(box) for box in own)
        require(volume <= MAX_DOMAIN, "domain-too-large", where)
        domains.append({"width": width, "boxes": own, "volume": volume})
    for domain in domains:
        require(
            all(tensors[box[0]]["width"] == domain["width"] for box in domain["boxes"]),
            "width-mismatch",
            where,
        )
    check_cover(tensors, boxes, where)
    return domains


def box_volume(box: Any) -> int:
    return math.prod(b - a for a, b in zip(box[1], box[2], strict=True))


def check_cover(tensors: list[dict[str, Any]], boxes: list[Any], where: str) -> None:
    for row, tensor in enumerate(tensors):
        own = [box for box in boxes if box[0] == row]
        expected = math.prod(tensor["shape"]) if tensor["owner"] == row else 0
        covered = sum(box_volume(box) for box in own)
        require(covered <= expected, "tiling-overlap", where)
        require(covered == expected, "tiling-hole", where)
        for k, first in enumerate(own):
            for second in own[:k]:
                apart = any(
                    b <= c or d <= a
                    for a, b, c, d in zip(first[1], first[2], second[1], second[2], strict=True)
                )
                require(apart, "tiling-overlap", where)


def flat_index(shape: list[int], box: Any) -> Any:
    """Canonical flat indices of a box's elements, in row-major order."""
    index = np.zeros((), np.int64)
    for n, a, b in zip(shape, box[1], box[2], strict=True):
        index = index[..., None] * n + np.arange(a, b)
    return index.reshape(-1)


# --- manifests ------------------------------------------------------------------------------------------


def check_manifest(
    m: dict[str, Any], tensors: list[dict[str, Any]], domains: list[Domain], where: str
) -> None:
    require(m["version"] < 10**18 and 1 <= m["writers"] <= 100_000, "index-range", where)
    require((m["base"] is None) == (m["base_digest"] is None), "base-digest", where)
    require(m["base"] is None or m["base"] < m["version"], "base-order", where)
    writers = m["shards"]["writer"].tolist()
    require(all(writer < m["writers"] for writer in writers), "index-range", where)
    require(writers == sorted(set(writers)), "shard-order", where)
    require(all(size < 2**62 for size in m["shards"]["size"].tolist()), "index-range", where)
    chunks = rows_of(m["chunks"])
    check_chunks(chunks, domains, where)
    check_columns(m, where)
    digests = m["chunk_digests"]
    require(digests is None or len(digests) == 32 * len(chunks), "column-length", where)
    sizes = m["shards"]["size"].tolist()
    require(all(chunk["shard"] < len(sizes) for chunk in chunks), "index-range", where)
    spans = []
    for chunk, columns in zip(chunks, columns_by_chunk(m), strict=True):
        end = chunk["offset"] + sum(row["stored"] for row in columns)
        require(chunk["offset"] >= 8 and end <= sizes[chunk["shard"]], "chunk-place", where)
        spans.append((chunk["shard"], chunk["offset"], end))
    spans.sort()
    for first, second in itertools.pairwise(spans):
        require(first[0] != second[0] or first[2] <= second[1], "chunk-place", where)
    listed = m["domains"]["domain"].tolist()
    require(all(domain < len(domains) for domain in listed), "index-range", where)
    require(listed == sorted(set(listed)), "digest-rows", where)
    for row in rows_of(m["domains"]):
        known = row["base_known"] == 1
        require(known or (row["base_known"], row["base0"], row["base1"]) == (0, 0, 0), "digest-rows", where)
    require(len(m["tensors"]["digest0"]) == len(tensors), "digest-rows", where)
    require({chunk["domain"] for chunk in chunks} <= set(listed), "digest-rows", where)
    if m["base"] is None:
        require(all(chunk["operation"] == DENSE for chunk in chunks), "anchor-chunk", where)
        require(not m["domains"]["base_known"].any(), "digest-rows", where)
        require(len(listed) == len(domains), "digest-rows", where)
        require(len(chunks) == (len(domains) if m["data"] else 0), "anchor-incomplete", where)
    else:
        require(m["data"], "anchor-incomplete", where)
    total = sum(domain["volume"] for domain in domains)
    require(m["listed"] == sum(chunk["listed"] for chunk in chunks), "statistics", where)
    require((m["changed"] or 0) <= total, "statistics", where)
    for chunk, columns in zip(chunks, columns_by_chunk(m), strict=True):
        domain = domains[chunk["domain"]]
        blocks = 0 if chunk["operation"] == DENSE else len(block_spans(domain, chunk["block"]))
        check_lengths(chunk, columns, domain, blocks, where)


def check_chunks(chunks: list[dict[str, int]], domains: list[Domain], where: str) -> None:
    before: dict[str, int] | None = None
    for chunk in chunks:
        require(chunk["domain"] < len(domains), "index-range", where)
        domain = domains[chunk["domain"]]
        require(chunk["operation"] in OPERATIONS, "operation-unknown", where)
        require(chunk["order"] in (0, 1), "order-unknown", where)
        require(chunk["width"] == domain["width"], "width-mismatch", where)
        dense = chunk["operation"] == DENSE
        if before is not None:
            place = (chunk["domain"], chunk["operation"])
            require(place > (before["domain"], before["operation"]), "chunk-order", where)
            if chunk["domain"] == before["domain"]:
                require((before["operation"], chunk["operation"]) == (SET, STEP), "chunk-overlap", where)
                require(before["listed"] + chunk["listed"] <= domain["volume"], "chunk-listed", where)
        require(1 <= chunk["listed"] <= domain["volume"], "chunk-listed", where)
        require(not dense or chunk["listed"] == domain["volume"], "chunk-listed", where)
        coding = (chunk["shift"], chunk["block"])
        good = coding == (0, 0) if dense else chunk["shift"] <= 16 and 6 <= chunk["block"] <= 24
        require(good, "chunk-coding", where)
        before = chunk


def check_columns(m: dict[str, Any], where: str) -> None:
    require(
        int(m["chunks"]["columns"].sum(dtype=np.int64)) == len(m["columns"]["column"]), "column-count", where
    )
    require(m["chunks"]["columns"].all(), "column-count", where)
    for row in rows_of(m["columns"]):
        require(row["codec"] in (0, 1), "codec-unknown", where)
        stored, raw = row["stored"], row["raw"]
        require(0 < stored < 2**48 and 0 < raw < 2**40, "column-length", where)
        require(
            stored == raw if row["codec"] == 0 else stored <= raw + raw // 256 + 1024, "column-length", where
        )


def rows_of(table: dict[str, Any]) -> list[dict[str, int]]:
    lists = {name: values.tolist() for name, values in table.items()}
    return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]


def columns_by_chunk(m: dict[str, Any]) -> list[list[dict[str, int]]]:
    rows, result, at = rows_of(m["columns"]), [], 0
    for count in m["chunks"]["columns"].tolist():
        result.append(rows[at : at + count])
        at += count
    return result


# --- chunks ---------------------------------------------------------------------------------------------


def block_spans(domain: Domain, block: int) -> list[tuple[int, int]]:
    """[start, stop) positions of each block; blocks begin anew at every box."""
    spans, at = [], 0
    for box in domain["boxes"]:
        end = at + box_volume(box)
        spans += [(low, min(low + (1 << block), end)) for low in range(at, end, 1 << block)]
        at = end
    return spans


def decode(
    chunk: dict[str, int], columns: list[dict[str, int]], data: bytes, domain: Domain, where: str
) -> tuple[Any, Any]:
    """(positions, values): values are steps modulo 2^(8 width) for `step`, new bits otherwise."""
    spans = [] if chunk["operation"] == DENSE else block_spans(domain, chunk["block"])
    check_lengths(chunk, columns, domain, len(spans), where)
    require(len(data) == sum(row["stored"] for row in columns), "truncated", where)
    raw: dict[int, bytes] = {}
    for row in columns:
        stored, data = data[: row["stored"]], data[row["stored"] :]
        require(crc32c(stored) == row["crc"], "crc-mismatch", where)
        raw[row["column"]] = decompress(row["codec"], stored, row["raw"], where)
    width, n = chunk["width"], chunk["listed"]
    if chunk["operation"] == DENSE:
        return np.arange(n), from_planes(raw, width)
    counts = np.frombuffer(raw[BLOCK], np.uint8).reshape(4, 4, -1).astype(np.int64)
    entries, elements, magnitudes, escapes = (
        sum(field[p] << 8 * p for p in range(4)).tolist() for field in counts
    )
    require(sum(entries) == len(raw[GAP]) and sum(elements) == n, "block-counts", where)
    positions = decode_positions(raw[GAP], raw.get(LOW, b""), chunk["shift"], spans, entries, elements, where)
    if chunk["operation"] == SET:
        require(not any(magnitudes) and not any(escapes), "block-counts", where)
        return positions, from_planes(raw, width)
    steps = decode_steps(raw, elements, magnitudes, escapes, n, width, where)
    return positions, np.array(steps, f"<u{width}")


def check_lengths(
    chunk: dict[str, int], columns: list[dict[str, int]], domain: Domain, blocks: int, where: str
) -> None:
    ids = [row["column"] for row in columns]
    require(ids == sorted(set(ids)), "column-order", where)
    n, width, shift = chunk["listed"], chunk["width"], chunk["shift"]
    planes = {PLANE + j: (n, n) for j in range(width)}
    low, codes = (n * shift + 7) // 8, (2 * n + 7) // 8
    positions = {
        GAP: (n, n + (domain["volume"] >> shift) // 255 + 1),
        LOW: (low, low),
        BLOCK: (16 * blocks, 16 * blocks),
    }
    steps = {CODE: (codes, codes), MAGNITUDE: (0, n), ESCAPE: (0, n * width)}
    limits = {DENSE: planes, SET: positions | planes, STEP: positions | steps}[chunk["operation"]]
    found = {row["column"]: row["raw"] for row in columns}
    require(chunk["operation"] != STEP or found.get(ESCAPE, 0) % width == 0, "column-length", where)
    for column, (least, most) in limits.items():
        require(least <= found.pop(column, 0) <= most, "column-length", f"{where}, column {COLUMNS[column]}")
    require(not found, "column-unexpected", where)


def from_planes(raw: dict[int, bytes], width: int) -> Any:
    planes = [np.frombuffer(raw[PLANE + j], np.uint8) for j in range(width)]
    return np.ascontiguousarray(np.stack(planes, axis=1)).view(f"<u{width}").reshape(-1)


def decode_positions(
    gap: bytes,
    low: bytes,
    shift: int,
    spans: list[tuple[int, int]],
    entries: list[int],
    elements: list[int],
    where: str,
) -> Any:
    bits = int.from_bytes(low, "little")
    positions: list[int] = []
    at = 0
    for (start, stop), entry_count, element_count in zip(spans, entries, elements, strict=True):
        own, position, first = gap[at : at + entry_count], start - 1, len(positions)
        at += entry_count
        for byte in own:
            if byte == 255:
                position += 255 << shift
            else:
                number = len(positions)
                position += 1 + (byte << shift | bits >> number * shift & (1 << shift) - 1)
                positions.append(position)
        require(not own or own[-1] != 255, "gap-trailing", where)
        require(position < stop, "position-outside", where)
        require(len(positions) - first == element_count, "block-counts", where)
    require(bits >> len(positions) * shift == 0, "padding-nonzero", where)
    return np.array(positions, np.int64)


def decode_steps(
    raw: dict[int, bytes],
    elements: list[int],
    magnitudes: list[int],
    escapes: list[int],
    n: int,
    width: int,
    where: str,
) -> list[int]:
    code, magnitude, escape = raw[CODE], raw.get(MAGNITUDE, b""), raw.get(ESCAPE, b"")
    require(len(escape) % width == 0, "block-counts", where)
    require((sum(magnitudes), sum(escapes)) == (len(magnitude), len(escape) // width), "block-counts", where)
    steps: list[int] = []
    m = e = 0
    for element_count, magnitude_count, escape_count in zip(elements, magnitudes, escapes, strict=True):
        last_m, last_e = m + magnitude_count, e + escape_count
        for _ in range(element_count):
            i = len(steps)
            two = code[i >> 2] >> 2 * (i & 3) & 3
            size, negative = 1, two & 1
            if two & 2:
                require(m < last_m, "block-counts", where)
                size = magnitude[m] + 2
                if magnitude[m] == 255:
                    require(e < last_e, "block-counts", where)
                    d = int.from_bytes(escape[e * width : (e + 1) * width], "little", signed=True)
                    require(abs(d) >= 257, "escape-short", where)
                    require((d < 0) == bool(negative), "escape-sign", where)
                    size = abs(d)
                    e += 1
                require(size <= (1 << 8 * width - 1) - (not negative), "escape-short", where)
                m += 1
            steps.append((-size if negative else size) % (1 << 8 * width))
        require((m, e) == (last_m, last_e), "block-counts", where)
    require(n % 4 == 0 or code[-1] >> 2 * (n % 4) == 0, "padding-nonzero", where)
    return steps


def add_steps(old: Any, steps: Any, order: int, width: int) -> Any:
    mask, sign = (1 << 8 * width) - 1, 1 << 8 * width - 1
    result = []
    for bits, step in zip(old.tolist(), steps.tolist(), strict=True):
        if order == 0:
            result.append((bits + step) & mask)
            continue
        key = bits ^ mask if bits & sign else bits | sign
        key = (key + step) & mask
        result.append(key ^ sign if key & sign else key ^ mask)
    return np.array(result, old.dtype)


# --- a whole root ---------------------------------------------------------------------------------------


# Owners' elements, flat, by name, dtype and shape: what must agree for a tensor to go on in a later version.
State = dict[tuple[str, str, tuple[int, ...]], Any]


class Root:
    """A lineage in a local folder; with `secret`, only what is signed with it is taken."""

    def __init__(self, path: Path, secret: bytes | None = None) -> None:
        self.path, self.secret = path, secret
        self.lineage = parse(self.read("lineage.dfm"), "lineage", "lineage.dfm")["lineage"]

    def read(self, key: str) -> bytes:
        try:
            return (self.path / key).read_bytes()
        except FileNotFoundError as error:
            code = "lineage-missing" if key == "lineage.dfm" else "object-missing"
            raise BadObjectError("version-missing" if key.startswith("versions/") else code, key) from error

    def floor(self) -> int:
        """The oldest version that retention has left."""
        folder = self.path / "floors"
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return max((int(name[:20]) for name in names if re.fullmatch(r"[0-9]{20}\.dfm", name)), default=0)

    def schema(self, digest: bytes) -> list[dict[str, Any]]:
        key = f"schemas/{digest.hex()}.dfm"
        return schema_of(self.read(key), key, digest)

    def tiling(self, digest: bytes, schema: bytes) -> list[Domain]:
        key = f"tilings/{digest.hex()}.dfm"
        return tiling_of(self.read(key), self.schema(schema), schema, key, digest)

    def manifest(self, key: str, version: int, kind: str) -> dict[str, Any]:
        m = parse(self.read(key), kind, key)
        if self.secret is not None:
            check_signature(self.read(key), m, self.secret, key)
        require((m["target_digest"] is None) == (kind == "version"), "target-digest", key)
        require(m["version"] == version, "version-mismatch", key)
        require(m["lineage"] == self.lineage, "lineage-mismatch", key)
        check_manifest(m, self.schema(m["schema"]), self.tiling(m["tiling"], m["schema"]), key)
        return m

    def ways(self, version: int) -> list[dict[str, Any]]:
        key = f"versions/{version:020d}.dfm"
        ways = [self.manifest(key, version, "version")]
        digest = blake2b(self.read(key))
        folder = self.path / f"ways/{version:020d}"
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            if not re.fullmatch(r"(\d{20}|anchor)\.dfm", path.name):
                continue
            key = f"ways/{version:020d}/{path.name}"
            way = self.manifest(key, version, "way")
            require(way_name(way["base"]) == path.stem, "version-mismatch", key)
            require(way["target_digest"] == digest, "target-digest", key)
            require(way["schema"] == ways[0]["schema"], "schema-mismatch", key)
            for lane in ("digest0", "digest1"):
                same = way["tensors"][lane].tolist() == ways[0]["tensors"][lane].tolist()
                require(same, "content-mismatch", key)
            ways.append(way)
        return ways

    def shard_key(self, m: dict[str, Any], row: int) -> str:
        folder = f"data/{m['version']:020d}"
        if m["target_digest"] is not None:
            folder = f"ways-data/{m['version']:020d}/{way_name(m['base'])}"
        return f"{folder}/{m['attempt'].hex()}/{int(m['shards']['writer'][row]):05d}.dfs"

    def tensors(self, version: int, way: str | None = None) -> dict[str, Any]:
        """Owners' elements, flat, by name, at a version; every digest on the way is checked."""
        require(version >= self.floor(), "version-gone", f"version {version}")
        chain: list[dict[str, Any]] = []
        wanted: int | None = version
        while wanted is not None:
            m = self.choose(wanted, way if wanted == version else None)
            chain.append(m)
            wanted = m["base"]
        state: State = {}
        for m in reversed(chain):
            state = self.apply(state, m)
        return {name: flat for (name, _, _), flat in state.items()}

    def choose(self, version: int, name: str | None) -> dict[str, Any]:
        for m in self.ways(version):
            usable = m["data"] if m["base"] is None else m["base"] >= self.floor()
            if usable and name in (None, way_name(m["base"]), str(m["base"])):
                if m["base"] is not None:
                    self.check_base(m)
                return m
        raise BadObjectError("chain-broken", f"version {version}")

    def check_base(self, m: dict[str, Any]) -> None:
        where = f"version {m['version']}"
        key = f"versions/{m['base']:020d}.dfm"
        require(blake2b(self.read(key)) == m["base_digest"], "base-differs", where)
        base = self.manifest(key, m["base"], "version")
        same = (m["schema"], m["tiling"]) == (base["schema"], base["tiling"])
        domains = self.tiling(m["tiling"], m["schema"])
        require(same or len(m["domains"]["domain"]) == len(domains), "digest-rows", where)

    def apply(self, before: State, m: dict[str, Any]) -> State:
        tensors = self.schema(m["schema"])
        domains = self.tiling(m["tiling"], m["schema"])
        dense = set(m["chunks"]["domain"][m["chunks"]["operation"] == DENSE].tolist())
        state, flats = {}, {}
        for row, tensor in enumerate(tensors):
            if tensor["owner"] != row:
                continue
            key = (tensor["name"], tensor["dtype"], tuple(tensor["shape"]))
            if key not in before:
                own = {d for d, domain in enumerate(domains) if any(box[0] == row for box in domain["boxes"])}
                require(own <= dense, "new-not-dense", f"version {m['version']}, {tensor['name']}")
            fresh = np.zeros(math.prod(tensor["shape"]), f"<u{tensor['width']}")
            state[key] = flats[tensor["name"]] = before[key].copy() if key in before else fresh
        bases = {d: domain_digest(tensors, domain, flats) for d, domain in enumerate(domains)}
        self.write_chunks(flats, m, tensors, domains)
        self.check_digests(flats, m, tensors, domains, bases)
        return state

    def write_chunks(
        self, state: dict[str, Any], m: dict[str, Any], tensors: list[Any], domains: list[Domain]
    ) -> None:
        where = f"version {m['version']}"
        taken: dict[int, set[int]] = {}
        for row, (chunk, columns) in enumerate(zip(rows_of(m["chunks"]), columns_by_chunk(m), strict=True)):
            domain = domains[chunk["domain"]]
            shard = self.read(self.shard_key(m, chunk["shard"]))
            require(len(shard) == int(m["shards"]["size"][chunk["shard"]]), "truncated", where)
            end = chunk["offset"] + sum(row["stored"] for row in columns)
            stored = shard[chunk["offset"] : end]
            if self.secret is not None:
                signed = m["chunk_digests"][32 * row : 32 * row + 32]
                require(blake2b(stored) == signed, "digest-mismatch", where)
            positions, values = decode(chunk, columns, stored, domain, where)
            seen = taken.setdefault(chunk["domain"], set())
            require(not seen & set(positions.tolist()), "position-twice", where)
            seen |= set(positions.tolist())
            at = 0
            for box in domain["boxes"]:
                tensor = tensors[box[0]]
                volume = box_volume(box)
                here = (positions >= at) & (positions < at + volume)
                index = flat_index(tensor["shape"], box)[positions[here] - at]
                flat = state[tensor["name"]]
                if chunk["operation"] == STEP:
                    flat[index] = add_steps(flat[index], values[here], chunk["order"], chunk["width"])
                else:
                    flat[index] = values[here]
                at += volume

    def check_digests(
        self,
        state: dict[str, Any],
        m: dict[str, Any],
        tensors: list[Any],
        domains: list[Domain],
        bases: dict[int, Any],
    ) -> None:
        where = f"version {m['version']}"
        for row in rows_of(m["domains"]):
            found = domain_digest(tensors, domains[row["domain"]], state)
            require(found == (row["digest0"], row["digest1"]), "content-mismatch", where)
            if row["base_known"]:
                require(bases[row["domain"]] == (row["base0"], row["base1"]), "content-mismatch", where)
        for tensor, row in zip(tensors, rows_of(m["tensors"]), strict=True):
            owner = tensors[tensor["owner"]]
            flat = state[owner["name"]]
            found = TensorDigest(owner["name"], owner["width"]).of(np.arange(len(flat)), flat)
            require(
                found == (row["digest0"], row["digest1"]), "content-mismatch", f"{where}, {tensor['name']}"
            )


def check_signature(data: bytes, m: dict[str, Any], secret: bytes, where: str) -> None:
    """An HMAC-SHA256 by a shared secret, at the end of the object."""
    require(m["signature"] is not None, "signature-missing", where)
    require(m["chunk_digests"] is not None or not len(m["columns"]["column"]), "signature-missing", where)
    algorithm, key_id, value = m["signature"]
    material = hmac.digest(secret, b"deltafmt key id", "sha256")
    own_id = hashlib.blake2b(b"hmac-sha256\0" + material, digest_size=8).digest()
    require((algorithm, key_id) == ("hmac-sha256", own_id), "signature-untrusted", where)
    entry = msgpack.packb("signature") + msgpack.packb([algorithm, key_id, value])
    require(data.endswith(entry), "signature-place", where)
    message = b"deltafmt manifest 1\0" + data[24 : -len(value)]
    require(hmac.compare_digest(hmac.digest(secret, message, "sha256"), value), "signature-wrong", where)


def domain_digest(tensors: list[Any], domain: Domain, state: dict[str, Any]) -> tuple[int, int]:
    total = [0, 0]
    for box in domain["boxes"]:
        tensor = tensors[box[0]]
        index = flat_index(tensor["shape"], box)
        part = TensorDigest(tensor["name"], tensor["width"]).of(index, state[tensor["name"]][index])
        total = [(a + b) & M64 for a, b in zip(total, part, strict=True)]
    return total[0], total[1]


def way_name(base: int | None) -> str:
    return "anchor" if base is None else f"{base:020d}"


# --- what ranks tell one another ------------------------------------------------------------------------


def check_attempt(record: dict[str, Any], where: str) -> None:
    require(len(record["holdings"]) == 16 * record["writers"], "column-length", where)
    require(len(record["owner"]) == len(record["holders"]), "column-length", where)
    require(record["purpose"] <= 2, "index-range", where)
    require(all(owner < record["writers"] for owner in record["owner"].tolist()), "index-range", where)
    require((record["schema"] is None) == (record["tiling"] is None), "index-range", where)


def check_answer(record: dict[str, Any], where: str) -> None:
    if record["failure"]:
        return
    tensors, rows = tensors_of(record, where), record["boxes"]["tensor"].tolist()
    require(all(row < len(tensors) for row in rows), "index-range", where)
    dimensions = sum(len(tensors[row]["shape"]) for row in rows)
    starts, stops = record["starts"].tolist(), record["stops"].tolist()
    require(dimensions == len(starts) == len(stops), "column-length", where)
    for start, stop in zip(starts, stops, strict=True):
        require(start <= stop < 2**63, "box-outside", where)


def check_receipt(record: dict[str, Any], where: str) -> None:
    require(record["writer"] < record["writers"], "index-range", where)
    counts, columns = record["chunks"]["columns"].tolist(), record["columns"]["column"]
    require(sum(counts) == len(columns), "column-count", where)
    digests = record["chunk_digests"]
    require(digests is None or len(digests) in (0, 32 * len(counts)), "column-length", where)


def check_verdict(record: dict[str, Any], where: str) -> None:
    require(record["outcome"] <= 4, "index-range", where)


RANK_RULES = {
    "attempt": check_attempt, "answer": check_answer, "receipt": check_receipt, "verdict": check_verdict,
}  # fmt: skip


# --- output ---------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A record as JSON can show it: bytes in hex, arrays as lists."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return value.tolist() if isinstance(value, np.ndarray) else value


def dump(path: Path) -> dict[str, Any]:
    data, where = path.read_bytes(), path.name
    if data[:8] == SHARD:
        require(
            len(data) >= 24 and data[-8:] == END, "magic-wrong" if len(data) >= 24 else "truncated", where
        )
        offset = int.from_bytes(data[-16:-8], "little")
        require(8 <= offset <= len(data) - 16, "footer-offset", where)
        return {
            "kind": "shard",
            "footer_offset": offset,
            "footer": plain(parse(data[offset:-16], "footer", where)),
        }
    body = unseal(data, None, where)
    kind = body["kind"]
    require(kind in OBJECTS, "kind-wrong", where)
    record = parse(data, kind, where)
    for name, bound in (("version", MAX_VERSION), ("start", MAX_VERSION), ("seconds", MAX_LEASE + 1)):
        if kind in ("latest", "floor", "lease") and name in record:
            require(record[name] < bound, "field-type", f"{where}, field {name}")
    if kind in RANK_RULES:
        RANK_RULES[kind](record, where)
    result = {"kind": kind, **plain(record)}
    if kind == "schema":
        result["tensors"] = plain(schema_of(data, where))
    if kind in ("schema", "tiling"):
        result["digest"] = content_digest(record, kind).hex()
    return result


def safetensors_bytes(tensors: list[dict[str, Any]], state: dict[str, Any]) -> bytes:
    header, blob = {}, b""
    for tensor in tensors:
        data = state[tensors[tensor["owner"]]["name"]].tobytes()
        place = [len(blob), len(blob) + len(data)]
        header[tensor["name"]] = {
            "dtype": DTYPES[tensor["dtype"]][0],
            "shape": tensor["shape"],
            "data_offsets": place,
        }
        blob += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + blob


def rebuild(root: Root, version: int, way: str | None, out: Path | None) -> dict[str, Any]:
    state = root.tensors(version, way)
    tensors = root.schema(root.ways(version)[0]["schema"])
    if out is not None:
        out.write_bytes(safetensors_bytes(tensors, state))
    listing = [
        {
            "name": tensor["name"],
            "dtype": tensor["dtype"],
            "shape": tensor["shape"],
            "blake2b": blake2b(state[tensors[tensor["owner"]]["name"]].tobytes()).hex(),
        }
        for tensor in tensors
    ]
    return {"version": version, "tensors": listing}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "path", type=Path, metavar="OBJECT|ROOT", help="a .dfm or .dfs file, or a lineage's folder"
    )
    parser.add_argument("--version", type=int, help="rebuild this version of the lineage in ROOT")
    parser.add_argument("--way", help="by this way only: a base's number, or 'anchor'")
    parser.add_argument("--secret", type=bytes.fromhex, help="take only versions signed with it (hex)")
    parser.add_argument("--out", type=Path, help="write the tensors to this safetensors file")
    options = parser.parse_args()
    try:
        if options.version is None:
            result = dump(options.path)
        else:
            result = rebuild(Root(options.path, options.secret), options.version, options.way, options.out)
    except BadObjectError as error:
        print(json.dumps({"error": error.code, "where": error.where}))
        return 1
    except OSError as error:
        print(f"refdump: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
