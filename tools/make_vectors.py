#!/usr/bin/env python3
"""Make spec/vectors: lineages and objects that every reader must accept (good) or refuse by reason (bad).

    make_vectors.py            write spec/vectors anew

Ids, times and weights are fixed, so that a run changes only what a change of the format changes. index.json
lists the vectors. Each has a folder `root` with the objects of a lineage; `object` names the object that is
looked at, or `version` the version that is rebuilt, and either `error`, the reason code, or for good ones `fields`,
what the object says (bytes in hex), or `tensors`, the BLAKE2b-256 of every tensor's bytes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from deltafmt.dtypes import dtype_of
from deltafmt.format import constants as c
from deltafmt.format import keys
from deltafmt.format.checksum import blake2b, crc32c
from deltafmt.format.chunk import ChunkHead, PackedChunk, pack_chunk
from deltafmt.format.codec import compress
from deltafmt.format.envelope import pack_map, seal, unseal
from deltafmt.format.objects import (
    digest_of_schema,
    digest_of_tiling,
    emit_floor,
    emit_latest,
    emit_lease,
    emit_lineage,
    emit_manifest,
    emit_schema,
    emit_tiling,
    parse_manifest,
)
from deltafmt.format.ranks import (
    answer_of,
    emit_answer,
    emit_attempt,
    emit_receipt,
    emit_verdict,
    holding_digest,
    parse_call,
    parse_reply,
    refusal,
)
from deltafmt.format.records import (
    TABLES,
    Attempt,
    ChunkTable,
    ColumnTable,
    DigestTable,
    DomainTable,
    FloorRecord,
    Footer,
    LatestRecord,
    LeaseRecord,
    LineageRecord,
    Manifest,
    MovedTable,
    Receipt,
    ReplicaTable,
    ShardTable,
    Verdict,
    described,
)
from deltafmt.format.shard import shard_tail
from deltafmt.format.signing import HmacKey
from deltafmt.geometry import Box
from deltafmt.kernels.digest import digest_run, zero
from deltafmt.kernels.positions import block_starts, encode_positions, pack_counts
from deltafmt.kernels.steps import encode_steps, step_between, to_planes
from deltafmt.schema import Schema, TensorSpec
from deltafmt.segments import tensor_salt
from deltafmt.tiling import Tiling, make_tiling

VECTORS = Path(__file__).resolve().parent.parent / "spec" / "vectors"
LINEAGE = bytes(range(16))
CREATED = 1_750_000_000_000
Bits = npt.NDArray[Any]
Content = dict[str, Bits]
Objects = dict[str, bytes]


@dataclass(frozen=True, kw_only=True)
class Coding:
    """How a domain's changes are to be coded."""

    operation: int = c.STEP
    shift: int = 0
    block: int = 6


@dataclass(kw_only=True)
class Root:
    """A lineage under construction."""

    objects: Objects = field(default_factory=dict)
    contents: dict[int, Content] = field(default_factory=dict)
    schemas: dict[int, Schema] = field(default_factory=dict)

    def start(self, schema: Schema) -> None:
        self.objects[keys.schema_key(digest_of_schema(schema))] = emit_schema(schema)
        record = LineageRecord(lineage=LINEAGE, created=CREATED, schema=digest_of_schema(schema))
        self.objects[keys.LINEAGE] = emit_lineage(record)

    def add(
        self,
        version: int,
        schema: Schema,
        content: Content,
        *,
        base: int | None,
        tiling: Tiling | None = None,
        codings: Mapping[int, Sequence[Coding]] | None = None,
        further: bool = False,
        data: bool = True,
        writers: int = 1,
        meta: dict[str, Any] | None = None,
        files: dict[str, bytes] | None = None,
        edit: Callable[[Manifest], Manifest] = lambda manifest: manifest,
        edit_chunk: Callable[[PackedChunk], PackedChunk] = lambda chunk: chunk,
    ) -> None:
        """Add a version or a further way; `edit` and `edit_chunk` spoil it on purpose."""
        tiling = tiling or make_tiling(schema)
        old = self._base_content(schema, content, base)
        chunks = [
            edit_chunk(chunk)
            for domain in range(len(tiling))
            for chunk in self._chunks(schema, tiling, domain, old, content, base, codings or {}, data)
        ]
        manifest = self._manifest(
            version, schema, content, old, base, tiling, chunks, further, data, writers, meta or {}
        )
        for name, body in (files or {}).items():
            manifest.files[name] = (blake2b(body), len(body))
            self.objects[keys.file_key(blake2b(body))] = body
        self.objects[keys.schema_key(digest_of_schema(schema))] = emit_schema(schema)
        self.objects[keys.tiling_key(digest_of_tiling(tiling, schema))] = emit_tiling(tiling, schema)
        if data:
            self._put_shards(manifest, chunks, further)
            sizes = [
                len(self.objects[self._shard(manifest, w, further)]) for w in manifest.shards.writer.tolist()
            ]
            manifest = replace(manifest, shards=manifest.shards.replaced(size=np.array(sizes, "<u8")))
        key = keys.way_key(version, base) if further else keys.version_key(version)
        self.objects[key] = emit_manifest(edit(manifest))
        if not further:
            self.contents[version], self.schemas[version] = content, schema

    def _base_content(self, schema: Schema, content: Content, base: int | None) -> Content:
        before = {} if base is None else self.contents[base]
        return {
            spec.name: before[spec.name]
            if spec.name in before and before[spec.name].shape == content[spec.name].shape
            else np.zeros_like(content[spec.name])
            for spec in schema
            if spec.alias_of is None
        }

    def _chunks(
        self,
        schema: Schema,
        tiling: Tiling,
        domain: int,
        old: Content,
        new: Content,
        base: int | None,
        codings: Mapping[int, Sequence[Coding]],
        data: bool,
    ) -> list[PackedChunk]:
        if not data:
            return []
        before, after = gather(schema, tiling, domain, old), gather(schema, tiling, domain, new)
        if base is None:
            return [pack(schema, tiling, domain, before, after, None, Coding(operation=c.DENSE))]
        changed = np.flatnonzero(before != after).astype(np.uint32)
        if not len(changed):
            return []
        wanted = codings.get(domain, (Coding(),))
        # Several codings share the changes out among them.
        parts = [changed[k :: len(wanted)] for k in range(len(wanted))]
        return [
            pack(schema, tiling, domain, before, after, part, coding)
            for part, coding in zip(parts, wanted, strict=True)
        ]

    def _manifest(
        self, version: int, schema: Schema, content: Content, old: Content, base: int | None, tiling: Tiling,
        chunks: list[PackedChunk], further: bool, data: bool, writers: int, meta: dict[str, Any],
    ) -> Manifest:  # fmt: skip
        base_key = None if base is None else keys.version_key(base)
        rows: list[tuple[int, ...]] = []
        columns: list[tuple[int, ...]] = []
        for number, chunk in enumerate(chunks):
            head = chunk.head
            shard = number * writers // len(chunks)
            rows.append(
                (shard, head.domain, head.operation, head.order, head.width, head.shift, head.block, head.listed, 0, len(chunk.columns))
            )  # fmt: skip
            columns += chunk.columns
        changed = sum(int((old[name] != bits).sum()) for name, bits in content.items())
        return Manifest(
            lineage=LINEAGE,
            version=version,
            base=base,
            base_digest=None if base_key is None else blake2b(self.objects[base_key]),
            target_digest=blake2b(self.objects[keys.version_key(version)]) if further else None,
            schema=digest_of_schema(schema),
            tiling=digest_of_tiling(tiling, schema),
            attempt=hashlib.blake2b(f"{version} {base} {further}".encode(), digest_size=16).digest(),
            writers=writers,
            created=CREATED + version,
            data=data,
            meta=meta,
            files={},
            changed=None if base is None else changed,
            listed=sum(chunk.head.listed for chunk in chunks),
            shards=ShardTable.of_rows([(w, 0) for w in range(writers)] if data else []),
            chunks=ChunkTable.of_rows(rows),
            columns=ColumnTable.of_rows(columns),
            domains=self._domains(schema, tiling, old, content, base, chunks),
            tensors=DigestTable.of_rows([tensor_digest(schema, spec, content) for spec in schema]),
        )

    def _domains(
        self,
        schema: Schema,
        tiling: Tiling,
        old: Content,
        new: Content,
        base: int | None,
        chunks: list[PackedChunk],
    ) -> DomainTable:
        with_chunk = {chunk.head.domain for chunk in chunks}
        rows = []
        for domain in range(len(tiling)):
            same = base is not None and self._tiling_of(base) == digest_of_tiling(tiling, schema)
            if same and domain not in with_chunk:
                continue
            before = (0, 0, 0) if base is None else (*domain_digest(schema, tiling, domain, old), 1)
            rows.append((domain, *domain_digest(schema, tiling, domain, new), *before))
        table: DomainTable = DomainTable.of_rows(rows)
        return table

    def _tiling_of(self, version: int) -> bytes:
        body = unseal(self.objects[keys.version_key(version)], kind="version", where="base")
        return bytes(body["tiling"])

    def _put_shards(self, manifest: Manifest, chunks: list[PackedChunk], further: bool) -> None:
        offsets = []
        for row, writer in enumerate(manifest.shards.writer.tolist()):
            own = [k for k in range(len(chunks)) if manifest.chunks.shard[k] == row]
            body, places = bytearray(c.SHARD_MAGIC), []
            for k in own:
                places.append(len(body))
                body += b"".join(chunks[k].buffers)
            offsets += places
            table = manifest.chunks.take(own).replaced(
                shard=np.zeros(len(own), "<u4"), offset=np.array(places, "<u8")
            )
            footer = Footer(
                lineage=LINEAGE,
                version=manifest.version,
                base=manifest.base,
                schema=manifest.schema,
                tiling=manifest.tiling,
                attempt=manifest.attempt,
                writer=writer,
                writers=manifest.writers,
                changed=manifest.changed,
                listed=sum(chunks[k].head.listed for k in own),
                chunks=table,
                columns=ColumnTable.of_rows([row for k in own for row in chunks[k].columns]),
                domains=manifest.domains,
            )
            self.objects[self._shard(manifest, writer, further)] = bytes(body) + shard_tail(footer, len(body))
        manifest.chunks.offset[:] = offsets

    @staticmethod
    def _shard(manifest: Manifest, writer: int, further: bool) -> str:
        return keys.shard_key(
            version=manifest.version,
            base=manifest.base,
            attempt=manifest.attempt,
            writer=writer,
            further=further,
        )


def gather(schema: Schema, tiling: Tiling, domain: int, content: Content) -> Bits:
    """A domain's elements by position."""
    parts = []
    for row, box in tiling.boxes(domain, schema):
        spec = schema.tensors[row]
        parts.append(content[spec.name].reshape(spec.shape)[box.slices()].reshape(-1))
    return np.concatenate(parts)


def domain_digest(schema: Schema, tiling: Tiling, domain: int, content: Content) -> tuple[int, int]:
    """Digest of a domain, element by element."""
    total = zero()
    for row, box in tiling.boxes(domain, schema):
        spec = schema.tensors[row]
        index = np.arange(spec.volume).reshape(spec.shape)[box.slices()].reshape(-1)
        for i in index.tolist():
            digest_run(content[spec.name].reshape(-1)[i : i + 1], i, tensor_salt(spec.name), total)
    return int(total[0]), int(total[1])


def tensor_digest(schema: Schema, spec: TensorSpec, content: Content) -> tuple[int, int]:
    owner = schema.resolve(spec.name)
    total = zero()
    digest_run(content[owner.name].reshape(-1), 0, tensor_salt(owner.name), total)
    return int(total[0]), int(total[1])


def pack(
    schema: Schema, tiling: Tiling, domain: int, old: Bits, new: Bits, positions: Any, coding: Coding
) -> PackedChunk:
    """Code a domain's changes as asked."""
    rows = slice(tiling.box_rows(domain).start, tiling.box_rows(domain).stop)
    order = dtype_of(schema.tensors[int(tiling.box_tensor[rows.start])].dtype).order_id
    width = int(tiling.widths[domain])
    if coding.operation == c.DENSE:
        head = ChunkHead(
            domain=domain, operation=c.DENSE, order=order, width=width, shift=0, block=0, listed=len(new)
        )
        return pack_chunk(head, {c.PLANE + j: plane for j, plane in enumerate(to_planes(new))})
    starts = block_starts(tiling.box_position[rows], tiling.box_volume[rows], coding.block)
    coded = encode_positions(positions, starts, coding.shift)
    head = ChunkHead(
        domain=domain, operation=coding.operation, order=order, width=width,
        shift=coding.shift, block=coding.block, listed=len(positions),
    )  # fmt: skip
    columns: dict[int, Any] = {c.GAP: coded.gap, c.LOW: coded.low}
    nothing = np.zeros_like(coded.entries)
    if coding.operation == c.SET:
        columns[c.BLOCK] = pack_counts(coded.entries, coded.elements, nothing, nothing)
        columns |= {c.PLANE + j: plane for j, plane in enumerate(to_planes(new[positions]))}
    else:
        steps = encode_steps(step_between(old[positions], new[positions], order), coded.elements)
        columns[c.BLOCK] = pack_counts(coded.entries, coded.elements, steps.magnitudes, steps.escapes)
        columns |= {c.CODE: steps.code, c.MAGNITUDE: steps.magnitude, c.ESCAPE: steps.escape}
    return pack_chunk(head, columns)


def random_content(schema: Schema, seed: int) -> Content:
    rng = np.random.default_rng(seed)
    return {
        spec.name: rng.integers(0, 256, spec.nbytes, dtype=np.uint8)
        .view(dtype_of(spec.dtype).bits)
        .reshape(spec.shape)
        for spec in schema
        if spec.alias_of is None
    }


def changed(content: Content, seed: int, density: float = 0.05) -> Content:
    """A later content: mostly small steps, some far away."""
    rng = np.random.default_rng(seed)
    result = {}
    for name, bits in content.items():
        flat = bits.reshape(-1).copy()
        at = np.flatnonzero(rng.random(len(flat)) < density)
        near = rng.choice([1, 1, 1, 2, 7], len(at)).astype(flat.dtype)
        far = flat[at] ^ flat.dtype.type(0x55 << 8 * (flat.itemsize - 1))
        flat[at] = np.where(rng.random(len(at)) < 0.9, flat[at] + near, far)
        result[name] = flat.reshape(bits.shape)
    return result


# --- good -----------------------------------------------------------------------------------------------

ONE = Schema((TensorSpec("w", "bfloat16", (40, 50)),))
BYTES = Schema((TensorSpec("w", "int8", (40, 50)),))


def every_width() -> Root:
    dtypes = [
        "int8",
        "float8_e4m3fn",
        "bfloat16",
        "int16",
        "float32",
        "int32",
        "float64",
        "int64",
        "complex64",
        "bool",
    ]
    schema = Schema(tuple(TensorSpec(f"t.{name}", name, (9, 31)) for name in dtypes))
    return history(schema, Coding(), Coding(operation=c.SET), Coding(operation=c.DENSE))


def history(
    schema: Schema,
    *codings: Coding,
    tiling: Tiling | None = None,
    density: float = 0.05,
    data: bool = True,
) -> Root:
    """An anchor (without `data`: only its digests) and one delta for each coding."""
    root = Root()
    root.start(schema)
    content = random_content(schema, 0)
    root.add(0, schema, content, base=None, tiling=tiling, data=data, meta={"step": 0})
    for number, coding in enumerate(codings):
        content = changed(content, number + 1, density)
        every = dict.fromkeys(range(100), (coding,))
        root.add(
            number + 1, schema, content, base=number, tiling=tiling, codings=every, meta={"step": number + 1}
        )
    return root


def shifts_and_blocks() -> Root:
    schema = Schema((TensorSpec("w", "bfloat16", (300, 100)),))
    codings = [
        Coding(shift=1, block=10),
        Coding(shift=5, block=24),
        Coding(operation=c.SET, shift=3),
        Coding(shift=16),
    ]
    return history(schema, *codings, density=0.004)


def many_boxes() -> Root:
    schema = Schema(
        (
            TensorSpec("a", "bfloat16", (12, 20)),
            TensorSpec("b", "bfloat16", (77,)),
            TensorSpec("c", "bfloat16", ()),
        )
    )
    tiling = Tiling.of(
        [
            [(0, Box((0, 0), (12, 7))), (1, Box((3,), (70,)))],
            [(2, Box((), ())), (0, Box((0, 7), (5, 20))), (1, Box((0,), (3,)))],
            [(0, Box((5, 7), (12, 20))), (1, Box((70,), (77,)))],
        ],
        schema,
    )
    return history(schema, Coding(), Coding(operation=c.SET, shift=2), tiling=tiling, density=0.1)


def aliases_and_empties() -> Root:
    schema = Schema(
        (
            TensorSpec("lm_head", "bfloat16", (6, 5), "embed"),
            TensorSpec("embed", "bfloat16", (6, 5)),
            TensorSpec("scalar", "float32", ()),
            TensorSpec("none", "float32", (0, 7)),
            TensorSpec("also none", "bfloat16", (3, 0, 2)),
            TensorSpec("../odd name\n", "uint8", (2,)),
        )
    )
    return history(schema, Coding(), Coding(operation=c.SET), density=0.3)


def set_and_step() -> Root:
    root = history(ONE)
    content = changed(root.contents[0], 5, 0.1)
    root.add(1, ONE, content, base=0, codings={0: (Coding(operation=c.SET), Coding())})
    return root


def schema_change() -> Root:
    root = history(ONE, Coding())
    schema = Schema(
        (
            TensorSpec("w", "bfloat16", (40, 50)),
            TensorSpec("new", "float32", (8,)),
            TensorSpec("tied", "float32", (8,), "new"),
        )
    )
    content = {"w": changed(root.contents[1], 9)["w"], "new": random_content(schema, 4)["new"]}
    tiling = make_tiling(schema)
    dense = {d: (Coding(operation=c.DENSE),) for d in range(len(tiling)) if tiling.widths[d] == 4}
    root.add(2, schema, content, base=1, codings=dense)
    root.add(3, schema, changed(content, 10), base=2)
    return root


def ties() -> Root:
    """A tie that breaks, one that forms, and a tensor that becomes the owner of its owner."""
    dtype, shape = "bfloat16", (6, 5)
    tied = Schema((TensorSpec("a", dtype, shape), TensorSpec("b", dtype, shape, "a")))
    free = Schema((TensorSpec("a", dtype, shape), TensorSpec("b", dtype, shape)))
    turned = Schema((TensorSpec("a", dtype, shape, "b"), TensorSpec("b", dtype, shape)))
    root = Root()
    root.start(tied)
    bits = random_content(free, 2)
    root.add(0, tied, {"a": bits["a"]}, base=None)
    # One tensor a domain, so that only what is new need be dense.
    apart = make_tiling(free, domain_elements=16)
    new = {d: (Coding(operation=c.DENSE),) for d in range(len(apart)) if apart.boxes(d, free)[0][0] == 1}
    root.add(1, free, {"a": changed(bits, 3)["a"], "b": bits["b"]}, base=0, tiling=apart, codings=new)
    root.add(2, turned, {"b": changed(root.contents[1], 4)["b"]}, base=1)
    dense = {0: (Coding(operation=c.DENSE),)}
    root.add(3, tied, {"a": changed(root.contents[2], 5)["b"]}, base=2, codings=dense)
    return root


def recut() -> Root:
    schema = Schema((TensorSpec("v", "float32", (50,)), TensorSpec("w", "bfloat16", (40, 50))))
    root = history(schema, Coding(), density=0.02)
    for version, elements in ((2, 300), (3, 64)):
        tiling = make_tiling(schema, domain_elements=elements)
        content = changed(root.contents[version - 1], version, 0.002)
        root.add(version, schema, content, base=version - 1, tiling=tiling)
    return root


def further_ways() -> Root:
    root = history(ONE, Coding(), Coding(), Coding())
    root.add(3, ONE, root.contents[3], base=None, further=True)
    root.add(3, ONE, root.contents[3], base=1, further=True)
    return root


def squashes() -> Root:
    """Ways over runs: new bits beside steps, and a run after which nothing differs."""
    root = history(ONE, Coding(), Coding(operation=c.SET), Coding())
    both = {0: (Coding(operation=c.SET), Coding())}
    root.add(
        3, ONE, root.contents[3], base=0, further=True, codings=both, edit=lambda m: replace(m, changed=None)
    )
    root.add(4, ONE, changed(root.contents[3], 9), base=3)
    root.add(5, ONE, root.contents[3], base=4)
    root.add(5, ONE, root.contents[3], base=3, further=True)
    return root


def collected() -> Root:
    """The floor is version 3, and who removed the rest died before the last of it was gone."""
    root = history(ONE, *[Coding()] * 5)
    root.add(3, ONE, root.contents[3], base=None, further=True)
    root.add(5, ONE, root.contents[5], base=2, further=True)
    for version in (1, 2, 3):
        del root.objects[resolve(root, f"{keys.DATA}/{version:020d}")]
    del root.objects[resolve(root, f"{keys.WAYS_DATA}/{5:020d}")]
    for version in (0, 1):
        del root.objects[keys.version_key(version)]
    for version in (0, 1, 2):
        del root.contents[version]
    for version in (1, 3):
        floor = FloorRecord(lineage=LINEAGE, version=version, created=CREATED)
        root.objects[keys.floor_key(version)] = emit_floor(floor)
    lease = LeaseRecord(lineage=LINEAGE, reader=bytes(16), start=2, seconds=900, created=CREATED)
    root.objects[keys.lease_key(bytes(16))] = emit_lease(lease)
    return root


def two_writers() -> Root:
    schema = Schema(tuple(TensorSpec(f"w{k}", "bfloat16", (64, 64)) for k in range(4)))
    tiling = make_tiling(schema, domain_elements=4096)
    root = Root()
    root.start(schema)
    root.add(0, schema, random_content(schema, 0), base=None, tiling=tiling, writers=2)
    root.add(1, schema, changed(root.contents[0], 1), base=0, tiling=tiling, writers=2)
    return root


def side_files() -> Root:
    root = Root()
    root.start(ONE)
    files = {"config.json": b'{"model_type": "demo"}\n', "tokenizer/vocab.txt": b"a\nb\n"}
    root.add(0, ONE, random_content(ONE, 0), base=None, files=files)
    return root


def signed() -> Root:
    """A delta signed with a secret of the bytes 0 to 31."""
    root = history(ONE, Coding())
    for version in (0, 1):
        key = keys.version_key(version)
        manifest = parse_manifest(root.objects[key], way=False, where=key)
        if version:
            manifest = replace(manifest, base_digest=blake2b(root.objects[keys.version_key(0)]))
        root.objects[key] = emit_manifest(
            replace(manifest, chunk_digests=b"".join(chunk_digests(root, manifest))),
            HmacKey(bytes(range(32))),
        )
    return root


def chunk_digests(root: Root, manifest: Manifest) -> list[bytes]:
    counts = manifest.chunks.columns.astype(np.int64)
    sizes = np.add.reduceat(manifest.columns.stored, np.cumsum(counts) - counts)
    shards = [root.objects[key] for key in manifest.shard_keys]
    places = zip(manifest.chunks.shard.tolist(), manifest.chunks.offset.tolist(), sizes.tolist(), strict=True)
    return [blake2b(shards[shard][offset : offset + size]) for shard, offset, size in places]


def hint_ahead() -> Root:
    """`latest.dfm` names a version that was never committed, beside names that are none."""
    root = history(ONE, Coding(), Coding())
    root.objects[keys.LATEST] = emit_latest(LatestRecord(lineage=LINEAGE, version=70))
    root.objects["versions/00000000000000000071.dfm.tmp"] = b"not a manifest"
    root.objects["versions/9.dfm"] = root.objects[keys.version_key(2)]
    return root


def nothing_changed() -> Root:
    root = history(ONE)
    root.add(1, ONE, root.contents[0], base=0)
    return root


def unknown_keys() -> Root:
    root = history(ONE, Coding())
    for key in (keys.LINEAGE, keys.version_key(1)):
        edit_body(root.objects, key, lambda body: body.update({"x-later": {"a": [1, 2]}, "note": "ignored"}))
    return root


FIRST, SECOND = (bytes([k]) * 16 for k in (0xA1, 0xA2))
"""Attempts: one that asks what the ranks hold, one that calls them to write."""
RANKS = Schema(
    (*(TensorSpec(f"w{k}", "bfloat16", (64, 64)) for k in range(3)), TensorSpec("norm", "float32", (64,)))
)


def called(attempt: bytes, number: int, **fields: Any) -> Attempt:
    """A call by rank 0 of two; without `fields` it asks what they hold."""
    none = np.empty(0, "<u4")
    asking: dict[str, Any] = {
        "schema": None,
        "tiling": None,
        "holdings": np.zeros(32, np.uint8),
        "owner": none,
        "holders": none,
    }
    return Attempt(
        lineage=LINEAGE, version=1, base=0, base_digest=fields.pop("base_digest"), attempt=attempt, job=bytes(16),
        coordinator=bytes(range(16, 32)), round=number, purpose=0, writers=2, created=CREATED + number, data=True,
        beside=False, signed=True, meta={"step": 1}, **asking | fields,
    )  # fmt: skip


def ranks() -> Root:
    """What two ranks put beside version 1, of which both hold `norm`; rank 1 signs its receipt."""
    root = Root()
    root.start(RANKS)
    root.add(0, RANKS, random_content(RANKS, 0), base=None, writers=2)
    root.add(1, RANKS, changed(root.contents[0], 1), base=0, writers=2)
    digest = blake2b(root.objects[keys.version_key(0)])
    tiling = make_tiling(RANKS, domain_elements=4096)
    full = [(spec.name, Box.full(spec.shape)) for spec in RANKS]
    parts = [(*full[:2], full[3]), ((full[2][0], Box((0, 0), (64, 64))), full[3])]
    answers = [answer_of(RANKS, part, attempt=FIRST, writer=rank) for rank, part in enumerate(parts)]
    manifest = parse_manifest(root.objects[keys.version_key(1)], way=False, where="version 1")
    mine = np.flatnonzero(manifest.chunks.shard == 1)
    counts = manifest.chunks.columns.astype(np.int64)
    ends = np.cumsum(counts)
    columns = np.concatenate([np.arange(ends[row] - counts[row], ends[row]) for row in mine])
    digests = chunk_digests(root, manifest)
    receipt = Receipt(
        lineage=LINEAGE,
        version=1,
        base=0,
        base_digest=digest,
        schema=manifest.schema,
        tiling=manifest.tiling,
        attempt=SECOND,
        writer=1,
        writers=2,
        size=int(manifest.shards.size[1]),
        changed=None,
        listed=int(manifest.chunks.listed[mine].sum()),
        chunks=manifest.chunks.take(mine).replaced(shard=np.zeros(len(mine), "<u4")),
        columns=manifest.columns.take(columns),
        domains=manifest.domains.take(np.isin(manifest.domains.domain, manifest.chunks.domain[mine])),
        moved=MovedTable.of_rows([(2, 3, 2**63 + 5)]),
        replicas=ReplicaTable.of_rows([(3, 7, 2**64 - 1)]),
        chunk_digests=b"".join(digests[row] for row in mine.tolist()),
    )
    count = len(tiling)
    call = called(
        SECOND, 2, base_digest=digest, schema=digest_of_schema(RANKS), tiling=digest_of_tiling(tiling, RANKS),
        holdings=np.frombuffer(b"".join(map(holding_digest, answers)), np.uint8),
        owner=np.arange(count, dtype="<u4") % 2, holders=np.ones(count, "<u4"),
    )  # fmt: skip
    failed = {"error": "SchemaError", "kind": "dtype-mismatch", "message": "no", "where": "'w0'"}
    root.objects |= {
        keys.attempt_key(1, FIRST): emit_attempt(called(FIRST, 1, base_digest=digest)),
        keys.reply_key(1, FIRST, 1): emit_answer(answers[1]),
        keys.verdict_key(1, FIRST): emit_verdict(Verdict(attempt=FIRST, outcome=2, failure={})),
        keys.attempt_key(1, SECOND): emit_attempt(call),
        keys.reply_key(1, SECOND, 1): emit_receipt(receipt, HmacKey(bytes(range(32)))),
        keys.reply_key(1, SECOND, 2): emit_answer(refusal(failed, attempt=SECOND, writer=2)),
        keys.verdict_key(1, SECOND): emit_verdict(Verdict(attempt=SECOND, outcome=3, failure=failed)),
    }
    return root


GOOD: dict[str, tuple[str, Callable[[], Root]]] = {
    "every-width": ("step, set and dense at widths 1, 2, 4 and 8 in both orders", every_width),
    "shifts-and-blocks": ("shifts 1, 3, 5 and 16, blocks of 2^6 to 2^24", shifts_and_blocks),
    "many-boxes": ("domains of several boxes of several tensors, columns cut, a scalar", many_boxes),
    "aliases-and-empties": (
        "an alias before its owner, a scalar, empty tensors, odd names",
        aliases_and_empties,
    ),
    "set-and-step": ("one domain with a set and a step chunk", set_and_step),
    "schema-change": ("a delta that brings a new tensor and a tie", schema_change),
    "ties": ("ties that break, form and turn round", ties),
    "recut": ("deltas under other tilings than their base's", recut),
    "further-ways": ("an anchor and a longer delta as further ways", further_ways),
    "squashes": ("ways over runs of deltas, with steps beside new bits, and with nothing", squashes),
    "collected": ("versions below 3 removed, the last of them in part", collected),
    "two-writers": ("shards of two writers", two_writers),
    "side-files": ("side files beside the weights", side_files),
    "signed": ("manifests signed by HMAC-SHA256 with the secret 00 01 .. 1f, chunk digests included", signed),
    "hint-ahead": ("a hint to a version that does not exist, and names that are no versions", hint_ahead),
    "nothing-changed": ("a delta without chunks", nothing_changed),
    "ranks": ("calls, answers, a receipt and verdicts of ranks, beside a version", ranks),
    "unknown-keys": ("optional keys of a later revision", unknown_keys),
}


# --- bad ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Bad:
    """A spoiled lineage: the code, and the object to look at or the version to rebuild."""

    what: str
    error: str
    root: Root
    object: str | None = None
    version: int | None = None


def edit_body(objects: Objects, key: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change a body and seal it again, its checksum right."""
    body = unseal(objects[key], kind=None, where=key)
    edit(body)
    objects[key] = seal(body)


def reseal(body: bytes, *, version: int = 1) -> bytes:
    """Any bytes as a body."""
    head = struct.pack("<IQ", version, len(body))
    return c.OBJECT_MAGIC + head + struct.pack("<I", crc32c(body, crc32c(head))) + body


def bad_object(error: str, what: str, key: str, spoil: Callable[[bytes], bytes]) -> Bad:
    root = history(ONE, Coding())
    key = resolve(root, key)
    root.objects[key] = spoil(root.objects[key])
    return Bad(what=what, error=error, root=root, object=key)


def resolve(root: Root, key: str) -> str:
    """A full name from its beginning."""
    return next(name for name in sorted(root.objects) if name.startswith(key))


def bad_body(error: str, what: str, key: str, edit: Callable[[dict[str, Any]], Any]) -> Bad:
    root = history(ONE, Coding())
    key = resolve(root, key)
    edit_body(root.objects, key, edit)
    return Bad(what=what, error=error, root=root, object=key)


def bad_manifest(error: str, what: str, edit: Callable[[Manifest], Manifest]) -> Bad:
    root = history(ONE, Coding())
    root.add(2, ONE, changed(root.contents[1], 2), base=1, edit=edit)
    return Bad(what=what, error=error, root=root, version=2)


def bad_anchor(error: str, what: str, edit: Callable[[Manifest], Manifest], **options: Any) -> Bad:
    root = Root()
    root.start(ONE)
    root.add(0, ONE, random_content(ONE, 0), base=None, edit=edit, **options)
    return Bad(what=what, error=error, root=root, version=0)


def column(values: Any, dtype: str) -> list[Any]:
    raw = np.array(values, dtype).view(np.uint8)
    codec, stored = compress(raw)
    return [codec, len(raw), stored]


def bad_schema(error: str, what: str, edit: Callable[[dict[str, Any]], Any]) -> Bad:
    """A schema object by itself: nothing but it is looked at."""
    return bad_body(error, what, keys.SCHEMAS, edit)


def bad_tiling(error: str, what: str, edit: Callable[[dict[str, Any]], Any]) -> Bad:
    """A tiling, stored under its true digest, that breaks a rule."""
    root = history(ONE)
    old = resolve(root, keys.TILINGS)
    edit_body(root.objects, old, edit)
    body = unseal(root.objects[old], kind="tiling", where=old)
    digest = blake2b(pack_map(_raw(body)))
    root.objects[keys.tiling_key(digest)] = root.objects.pop(old)
    edit_body(root.objects, keys.version_key(0), lambda body: body.update(tiling=digest))
    return Bad(what=what, error=error, root=root, version=0)


def _raw(value: Any) -> Any:
    """The body with every column raw."""
    if isinstance(value, dict):
        return {key: _raw(item) for key, item in value.items()}
    if isinstance(value, list) and len(value) == 3 and isinstance(value[2], bytes):
        from deltafmt.format.codec import decompress

        return [0, value[1], decompress(value[0], memoryview(value[2]), value[1], where="column").tobytes()]
    return value


def bad_chunk(
    error: str,
    what: str,
    spoil: Callable[[dict[int, Bits], ChunkHead], Any],
    coding: Coding | None = None,
    schema: Schema | None = None,
) -> Bad:
    """A chunk whose columns are spoiled before they are compressed and checksummed."""
    root = history(schema or ONE)

    def edit(chunk: PackedChunk) -> PackedChunk:
        columns = unpacked(chunk)
        spoil(columns, chunk.head)
        return pack_chunk(chunk.head, columns)

    content = changed(root.contents[0], 7, 0.1)
    root.add(1, schema or ONE, content, base=0, codings={0: (coding or Coding(),)}, edit_chunk=edit)
    return Bad(what=what, error=error, root=root, version=1)


def bad_buffer(error: str, what: str, spoil: Callable[[bytes], tuple[int, bytes, int]]) -> Bad:
    """A chunk whose first column's stored bytes are replaced: (codec, stored bytes, raw length announced)."""
    root = history(ONE)

    def edit(chunk: PackedChunk) -> PackedChunk:
        column_id, _, _, raw_bytes, _ = chunk.columns[0]
        raw = unpacked(chunk)[column_id].tobytes()
        codec, stored, announced = spoil(raw)
        row = (column_id, codec, len(stored), announced or raw_bytes, crc32c(stored))
        return replace(chunk, columns=(row, *chunk.columns[1:]), buffers=(stored, *chunk.buffers[1:]))

    root.add(1, ONE, changed(root.contents[0], 7, 0.5), base=0, edit_chunk=edit)
    return Bad(what=what, error=error, root=root, version=1)


def unpacked(chunk: PackedChunk) -> dict[int, Bits]:
    from deltafmt.format.codec import decompress

    return {
        row[0]: decompress(row[1], memoryview(buffer), row[3], where="column").copy()
        for row, buffer in zip(chunk.columns, chunk.buffers, strict=True)
    }


def set_at(column_id: int, index: int, value: int) -> Callable[[dict[int, Bits], ChunkHead], None]:
    def spoil(columns: dict[int, Bits], head: ChunkHead) -> None:
        columns[column_id][index] = value

    return spoil


def table_with(manifest: Manifest, table: str, **columns: Any) -> Manifest:
    old = getattr(manifest, table)
    return replace(
        manifest,
        **{table: old.replaced(**{k: np.array(v, getattr(old, k).dtype) for k, v in columns.items()})},
    )


def zstd_frame(raw: bytes) -> bytes:
    import pyarrow as pa

    frame = pa.Codec("zstd", compression_level=1).compress(raw, asbytes=True)
    assert isinstance(frame, bytes)
    return frame


def flipped(data: bytes) -> bytes:
    return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


def _envelopes() -> dict[str, Bad]:
    lineage = keys.LINEAGE
    version = keys.version_key(1)
    return {
        "empty-object": bad_object("truncated", "no bytes at all", version, lambda d: b""),
        "cut-header": bad_object("truncated", "cut inside the header", version, lambda d: d[:20]),
        "cut-body": bad_object("truncated", "cut inside the body", version, lambda d: d[:-1]),
        "trailing": bad_object("trailing-bytes", "a byte behind the body", version, lambda d: d + b"\0"),
        "magic": bad_object("magic-wrong", "another magic", lineage, lambda d: b"\x88" + d[1:]),
        "text-mode": bad_object("magic-wrong", "CRLF turned to LF", lineage, lambda d: d.replace(b"\r\n", b"\n") + b"\0"),
        "crc": bad_object("crc-mismatch", "one bit of the body flipped", version, flipped),
        "crc-of-length": bad_object("crc-mismatch", "checksum of the body alone", lineage, lambda d: d[:20] + struct.pack("<I", crc32c(d[24:])) + d[24:]),
        "crc32": bad_object("crc-mismatch", "CRC-32 instead of CRC-32C", lineage, lambda d: d[:20] + struct.pack("<I", zlib.crc32(d[8:20] + d[24:])) + d[24:]),
        "version": bad_object("version-unsupported", "format version 2", lineage, lambda d: reseal(d[24:], version=2)),
        "kind": bad_object("kind-wrong", "a schema where a manifest belongs", version, lambda d: reseal(pack_map({"kind": "nonsense", "required": []}))),
        "not-msgpack": bad_object("msgpack-invalid", "a body that is cut inside", lineage, lambda d: reseal(d[24:-2])),
        "trailing-item": bad_object("msgpack-invalid", "a second item behind the map", lineage, lambda d: reseal(d[24:] + b"\xc0")),
        "array-bomb": bad_object("msgpack-invalid", "an array of 2^31 - 1 items", lineage, lambda d: reseal(bytes.fromhex("dd7fffffff"))),
        "map-bomb": bad_object("msgpack-invalid", "a map of 2^31 - 1 items", lineage, lambda d: reseal(bytes.fromhex("df7fffffff"))),
        "bin-bomb": bad_object("msgpack-invalid", "a string of 2^31 - 1 bytes", lineage, lambda d: reseal(bytes.fromhex("c67fffffff"))),
        "nesting": bad_object("msgpack-invalid", "arrays 50,000 deep", lineage, lambda d: reseal(b"\x91" * 50_000 + b"\xc0")),
        "many-items": bad_object("msgpack-invalid", "more items than allowed", lineage, lambda d: reseal(b"\xdd" + struct.pack(">I", 70_000) + b"\x90" * 70_000)),
        "extension": bad_object("msgpack-invalid", "an extension type", lineage, lambda d: reseal(b"\x81\xa1a\xd4\x01\x00")),
        "extension-empty": bad_object("msgpack-invalid", "an extension type without bytes", lineage, lambda _: reseal(b"\x81\xa1a\xc7\x00\x05")),
        "nested-bomb": bad_object("msgpack-invalid", "arrays in arrays that each announce all that follows", lineage, lambda _: reseal(b"\x81\xa1a" + bytes.fromhex("dd0000ea60") * 400 + b"\xc0" * 60_000)),
        "key-bytes": bad_object("msgpack-invalid", "a key that is no string, inside", lineage, lambda _: reseal(b"\x81\xa1a\x81\xc4\x01a\x00")),
        "no-map": bad_object("field-type", "a body that is a list", lineage, lambda d: reseal(msgpack.packb([1, 2]))),
        "key-twice": bad_object("key-twice", "one key twice", lineage, lambda d: reseal(b"\x82\xa1a\x01\xa1a\x02")),
        "feature": bad_body("feature-unknown", "a feature that nobody knows", lineage, lambda b: b.update(required=["time-travel"])),
        "no-required": bad_body("field-type", "`required` is missing", lineage, lambda b: b.pop("required")),
        "field-missing": bad_body("field-missing", "no lineage id", lineage, lambda b: b.pop("lineage")),
        "field-type": bad_body("field-type", "creation time as text", lineage, lambda b: b.update(created="today")),
        "negative": bad_body("field-type", "a negative version", version, lambda b: b.update(version=-1)),
        "short-id": bad_body("field-type", "an id of 15 bytes", lineage, lambda b: b.update(lineage=b"x" * 15)),
    }  # fmt: skip


def _tables() -> dict[str, Bad]:
    version = keys.version_key(1)
    bomb = zstd_frame(bytes(1 << 20))
    return {
        "column-missing": bad_body("field-missing", "a table without a column", version, lambda b: b["chunks"].pop("offset")),
        "column-rows": bad_body("column-length", "rows and column disagree", version, lambda b: b["chunks"].update(rows=7)),
        "column-odd": bad_body("column-length", "a column that is no multiple of its type", version, lambda b: b["tensors"].update(digest0=[0, 7, b"1234567"])),
        "raw-length": bad_body("column-length", "raw length that is not the length", version, lambda b: b["tensors"].update(digest0=[0, 8, b"1234567"])),
        "codec": bad_body("codec-unknown", "codec 9", version, lambda b: b["tensors"].update(digest0=[9, 8, b"12345678"])),
        "zstd-garbage": bad_body("zstd-corrupt", "no frame", version, lambda b: b["tensors"].update(digest0=[1, 8, b"12345678"])),
        "zstd-bomb": bad_body("zstd-size", "a frame of 1 MiB for 8 bytes", version, lambda b: b["tensors"].update(digest0=[1, 8, bomb])),
        "zstd-two": bad_body("zstd-trailing", "two frames", version, lambda b: b["tensors"].update(digest0=[1, 8, zstd_frame(bytes(8)) * 2])),
        "zstd-cut": bad_body("zstd-corrupt", "a frame that is cut", version, lambda b: b["tensors"].update(digest0=[1, 8, zstd_frame(bytes(8))[:-1]])),
        "table-bomb": bad_schema("table-too-large", "names of 1 GiB announced", lambda b: b.update(names=[1, 1 << 30, bomb])),
        "table-bomb-small": bad_schema("table-too-large", "names of 16 MiB in a small object", lambda b: b.update(names=[1, 1 << 24, zstd_frame(bytes(1 << 24))])),
        "signature": bad_body("field-type", "a signature that is no list of three", version, lambda b: b.update(signature=["hmac-sha256", bytes(8)])),
        "signature-empty": bad_body("field-type", "a signature of no bytes", version, lambda b: b.update(signature=["hmac-sha256", bytes(8), b""])),
        "file-name": bad_body("key-unsafe", "a side file outside the root", version, lambda b: b.update(files={"../x": [bytes(32), 1]})),
        "file-absolute": bad_body("key-unsafe", "a side file with an absolute name", version, lambda b: b.update(files={"/etc/passwd": [bytes(32), 1]})),
        "file-escape": bad_body("key-unsafe", "a side file with a percent escape", version, lambda b: b.update(files={"%2e%2e/x": [bytes(32), 1]})),
    }  # fmt: skip


def _schemas() -> dict[str, Bad]:
    def tensors(**columns: Any) -> Callable[[dict[str, Any]], Any]:
        types = {"name_length": "<u4", "dtype": "<u1", "rank": "<u1", "alias": "<u4"}
        rows = len(next(iter(columns.values())))

        def edit(body: dict[str, Any]) -> None:
            extra = columns.copy()
            names, shapes = extra.pop("names", None), extra.pop("shapes", None)
            for name, values in extra.items():
                body["tensors"][name] = column(values, types[name])
            body["tensors"]["rows"] = rows
            if names is not None:
                body["names"] = column(list(names), "<u1")
            if shapes is not None:
                body["shapes"] = column(shapes, "<u8")

        return edit

    two: dict[str, Any] = {
        "name_length": [1, 1],
        "dtype": [0, 0],
        "rank": [1, 1],
        "alias": [0, 0],
        "names": b"ab",
        "shapes": [2, 2],
    }
    one: dict[str, Any] = {
        "name_length": [1],
        "dtype": [0],
        "rank": [2],
        "alias": [0],
        "names": b"w",
        "shapes": [40, 50],
    }
    return {
        "dtype-unknown": bad_schema("dtype-unknown", "a dtype that v1 lacks", lambda b: b.update(dtypes=["float128"])),
        "dtype-index": bad_schema("index-range", "an index behind the dtypes", tensors(**one | {"dtype": [3]})),
        "tensor-twice": bad_schema("name-twice", "one name twice", tensors(**two | {"names": b"aa"})),
        "reserved": bad_schema("name-reserved", "the name __metadata__", tensors(**one | {"name_length": [12], "names": b"__metadata__"})),
        "not-utf8": bad_schema("name-invalid", "a name that is not UTF-8", tensors(**one | {"names": b"\xff"})),
        "overflow": bad_schema("shape-overflow", "extents whose product passes 2^63", tensors(**one | {"shapes": [2**40, 2**40]})),
        "overflow-zero": bad_schema("shape-overflow", "the same beside a zero", tensors(**one | {"rank": [3], "shapes": [0, 2**40, 2**40]})),
        "extent": bad_schema("shape-overflow", "an extent of 2^63", tensors(**one | {"rank": [1], "shapes": [2**63]})),
        "rank": bad_schema("shape-overflow", "17 dimensions", tensors(**one | {"rank": [17], "shapes": [1] * 17})),
        "names-length": bad_schema("column-length", "lengths beyond the names", tensors(**one | {"name_length": [9]})),
        "ranks": bad_schema("column-length", "ranks beyond the extents", tensors(**one | {"rank": [3]})),
        "alias-of-alias": bad_schema("alias-invalid", "two aliases of one another", tensors(**two | {"alias": [2, 1]})),
        "alias-shape": bad_schema("alias-invalid", "an alias of another shape", tensors(**two | {"alias": [0, 1], "shapes": [2, 3]})),
        "alias-row": bad_schema("index-range", "an alias of no row", tensors(**two | {"alias": [0, 9]})),
    }  # fmt: skip


def _tilings() -> dict[str, Bad]:
    def boxes(
        starts: list[int], stops: list[int], counts: list[int], *, tensor: int = 0, width: int = 2
    ) -> Callable[[dict[str, Any]], Any]:
        def edit(body: dict[str, Any]) -> None:
            body["starts"], body["stops"] = column(starts, "<u8"), column(stops, "<u8")
            n = len(starts) // 2
            body["boxes"] = {"rows": n, "tensor": column([tensor] * n, "<u4")}
            body["domains"] = {
                "rows": len(counts),
                "width": column([width] * len(counts), "<u1"),
                "boxes": column(counts, "<u4"),
            }

        return edit

    return {
        "tiling-hole": bad_tiling("tiling-hole", "a row is not covered", boxes([0, 0], [39, 50], [1])),
        "tiling-overlap": bad_tiling("tiling-overlap", "a row is covered twice", boxes([0, 0, 19, 0], [20, 50, 40, 50], [1, 1])),
        "tiling-overlap-hole": bad_tiling("tiling-overlap", "as many elements twice as not at all", boxes([0, 0, 0, 25, 0, 0], [20, 50, 20, 50, 20, 25], [3])),
        "box-outside": bad_tiling("box-outside", "a box leaves its tensor", boxes([0, 0], [40, 51], [1])),
        "box-empty": bad_tiling("box-outside", "a box without elements", boxes([0, 0, 40, 0], [40, 50, 40, 50], [2])),
        "box-huge": bad_tiling("box-outside", "a corner at 2^63", boxes([0, 0], [40, 2**63], [1])),
        "box-tensor": bad_tiling("box-tensor", "a box of no tensor", boxes([0, 0], [40, 50], [1], tensor=5)),
        "domain-empty": bad_tiling("domain-empty", "a domain without boxes", boxes([0, 0], [40, 50], [1, 0])),
        "domain-width": bad_tiling("width-mismatch", "a domain of another width", boxes([0, 0], [40, 50], [1], width=4)),
        "domain-width-odd": bad_tiling("width-mismatch", "a width of 3", boxes([0, 0], [40, 50], [1], width=3)),
        "tiling-counts": bad_tiling("column-length", "counts beyond the boxes", boxes([0, 0], [40, 50], [2])),
        "tiling-schema": bad_tiling("schema-mismatch", "the tiling of another schema", lambda b: b.update(schema=bytes(32))),
    }  # fmt: skip


def _manifests() -> dict[str, Bad]:
    def chunks(**columns: Any) -> Callable[[Manifest], Manifest]:
        return lambda m: table_with(m, "chunks", **columns)

    def twice(m: Manifest) -> Manifest:
        rows = [0, 0]
        n = len(m.columns)
        columns = m.columns.take([*range(n), *range(n)])
        return replace(m, chunks=m.chunks.take(rows), columns=columns, listed=2 * m.listed)

    return {
        "base-self": bad_manifest("base-order", "a manifest that is its own base", lambda m: replace(m, base=2)),
        "base-later": bad_manifest("base-order", "a base of the future", lambda m: replace(m, base=3)),
        "base-digest": bad_manifest("base-differs", "the digest of another base", lambda m: replace(m, base_digest=bytes(32))),
        "base-digest-missing": bad_manifest("base-digest", "a base without digest", lambda m: replace(m, base_digest=None)),
        "other-version": bad_manifest("version-mismatch", "a manifest that was moved", lambda m: replace(m, version=7)),
        "other-lineage": bad_manifest("lineage-mismatch", "a manifest of another lineage", lambda m: replace(m, lineage=bytes(16))),
        "no-writers": bad_manifest("index-range", "no writers", lambda m: replace(m, writers=0)),
        "shard-writer": bad_manifest("index-range", "a shard of an unknown writer", lambda m: table_with(m, "shards", writer=[3])),
        "chunk-domain": bad_manifest("index-range", "a chunk of an unknown domain", chunks(domain=[9])),
        "chunk-shard": bad_manifest("index-range", "a chunk in an unknown shard", chunks(shard=[9])),
        "operation": bad_manifest("operation-unknown", "operation 4", chunks(operation=[4])),
        "order": bad_manifest("order-unknown", "order 2", chunks(order=[2])),
        "chunk-width": bad_manifest("width-mismatch", "a chunk of another width", chunks(width=[4])),
        "listed-none": bad_manifest("chunk-listed", "a chunk that lists nothing", chunks(listed=[0])),
        "listed-many": bad_manifest("chunk-listed", "more elements than the domain has", chunks(listed=[2001])),
        "shift": bad_manifest("chunk-coding", "a shift of 17", chunks(shift=[17])),
        "block-size": bad_manifest("chunk-coding", "blocks of 2^25", chunks(block=[25])),
        "chunk-outside": bad_manifest("chunk-place", "a chunk behind its shard's end", chunks(offset=[1 << 40])),
        "chunk-on-magic": bad_manifest("chunk-place", "a chunk over the magic", chunks(offset=[0])),
        "chunk-twice": bad_manifest("chunk-order", "the same chunk twice", twice),
        "column-count": bad_manifest("column-count", "more columns than rows", chunks(columns=[9])),
        "columns-none": bad_manifest("column-count", "fewer columns than rows", chunks(columns=[1])),
        "column-stored": bad_manifest("column-length", "a stored length of zero", lambda m: table_with(m, "columns", stored=[0, *m.columns.stored[1:]])),
        "column-stored-much": bad_manifest("column-length", "much more stored than decoded", lambda m: table_with(m, "columns", codec=[1, *m.columns.codec[1:]], stored=[m.columns.raw[0] + np.uint64(5000), *m.columns.stored[1:]])),
        "column-raw": bad_manifest("column-length", "a raw column of another length", lambda m: table_with(m, "columns", codec=[0, *m.columns.codec[1:]], raw=[m.columns.stored[0] + np.uint64(1), *m.columns.raw[1:]])),
        "chunk-digests": bad_manifest("column-length", "digests of fewer chunks than there are", lambda m: replace(m, chunk_digests=bytes(31))),
        "digest-rows": bad_manifest("digest-rows", "no digest of the changed domain", lambda m: replace(m, domains=DomainTable.of_rows([]))),
        "digest-domain": bad_manifest("index-range", "a digest of an unknown domain", lambda m: table_with(m, "domains", domain=[8])),
        "base-known": bad_manifest("digest-rows", "an unknown base with a digest", lambda m: table_with(m, "domains", base_known=[0])),
        "tensor-digests": bad_manifest("digest-rows", "digests of two tensors", lambda m: replace(m, tensors=m.tensors.take([0, 0]))),
        "delta-no-data": bad_manifest("anchor-incomplete", "a delta without data", lambda m: replace(m, data=False)),
        "statistics": bad_manifest("statistics", "a sum that is none", lambda m: replace(m, listed=m.listed + 1)),
        "wrong-result": bad_manifest("content-mismatch", "another digest of the result", lambda m: table_with(m, "domains", digest0=m.domains.digest0 + np.uint64(1))),
        "wrong-tensor": bad_anchor("content-mismatch", "an anchor with another digest", lambda m: table_with(m, "domains", digest0=m.domains.digest0 + np.uint64(1))),
        "anchor-empty": bad_anchor("anchor-incomplete", "an anchor without its chunks", lambda m: replace(m, chunks=ChunkTable.empty(), columns=ColumnTable.empty(), listed=0)),
        "anchor-step": bad_anchor("anchor-chunk", "an anchor with a step chunk", lambda m: table_with(m, "chunks", operation=[2], block=[6])),
        "anchor-base": bad_anchor("digest-rows", "an anchor that knows its base", lambda m: table_with(m, "domains", base_known=[1])),
        "dense-cut": bad_anchor("chunk-listed", "a dense chunk that is not complete", lambda m: table_with(m, "chunks", listed=[1999])),
        "dense-coding": bad_anchor("chunk-coding", "a dense chunk with a shift", lambda m: table_with(m, "chunks", shift=[1])),
        "no-data": bad_anchor("chain-broken", "an anchor without data as the only way", lambda m: m, data=False),
    }  # fmt: skip


def _half_way_up(columns: dict[int, Bits], head: ChunkHead) -> None:
    codes = columns[c.CODE]
    first = next(i for i in range(head.listed) if codes[i >> 2] >> 2 * (i & 3) & 2)
    codes[first >> 2] &= 255 - (1 << 2 * (first & 3))
    columns[c.MAGNITUDE][0] = 126


def _chunks() -> dict[str, Bad]:
    def drop(*ids: int) -> Callable[[dict[int, Bits], ChunkHead], None]:
        def spoil(columns: dict[int, Bits], head: ChunkHead) -> None:
            for column_id in ids:
                columns.pop(column_id)

        return spoil

    def cut(column_id: int) -> Callable[[dict[int, Bits], ChunkHead], None]:
        def spoil(columns: dict[int, Bits], head: ChunkHead) -> None:
            columns[column_id] = columns[column_id][:-1]

        return spoil

    def extra(columns: dict[int, Bits], head: ChunkHead) -> None:
        columns[c.PLANE] = np.zeros(head.listed, np.uint8)

    def escapes(value: int, code: int | None = None) -> Callable[[dict[int, Bits], ChunkHead], None]:
        def spoil(columns: dict[int, Bits], head: ChunkHead) -> None:
            columns[c.ESCAPE][:2] = np.array([value], "<i2").view(np.uint8)

        return spoil

    def set_counts(columns: dict[int, Bits], head: ChunkHead) -> None:
        """One entry moved from the first block to the second, so that only the sum is right."""
        planes = columns[c.BLOCK].reshape(16, -1)
        planes[4, 0] -= 1
        planes[4, 1] += 1

    def last_gap(columns: dict[int, Bits], head: ChunkHead) -> None:
        columns[c.GAP][-1] = 200

    def trailing_255(columns: dict[int, Bits], head: ChunkHead) -> None:
        columns[c.GAP] = np.append(columns[c.GAP], np.uint8(255))
        planes = columns[c.BLOCK].reshape(16, -1)
        planes[0, -1] += 1

    return {
        "gap-outside": bad_chunk("position-outside", "a position behind its block", last_gap),
        "gap-trailing": bad_chunk("gap-trailing", "a block that ends with 255", trailing_255),
        "counts": bad_chunk("block-counts", "counts that agree in sum only", set_counts),
        "counts-sum": bad_chunk("block-counts", "counts that do not add up", set_at(c.BLOCK, 0, 99)),
        "block-length": bad_chunk("column-length", "counts of too few blocks", cut(c.BLOCK)),
        "gap-missing": bad_chunk("column-length", "no gap bytes", drop(c.GAP)),
        "code-missing": bad_chunk("column-length", "no codes", drop(c.CODE)),
        "escape-half": bad_chunk("column-length", "half an escape", cut(c.ESCAPE)),
        "code-padding": bad_chunk("padding-nonzero", "bits behind the last code", lambda cols, head: cols[c.CODE].__setitem__(-1, cols[c.CODE][-1] | 0xC0), Coding()),
        "low-padding": bad_chunk("padding-nonzero", "bits behind the last low part", lambda cols, head: cols[c.LOW].__setitem__(-1, cols[c.LOW][-1] | 0x80), Coding(shift=1)),
        "unexpected": bad_chunk("column-unexpected", "a byte plane in a step chunk", extra),
        "escape-short": bad_chunk("escape-short", "an escape that needs none", escapes(3)),
        "step-spelling": bad_chunk("escape-short", "128 steps up in one byte, which are 128 down", _half_way_up, schema=BYTES),
        "escape-zero": bad_chunk("escape-short", "a step of zero", escapes(0)),
        "escape-sign": bad_chunk("escape-sign", "an escape of the other sign", lambda cols, head: cols.__setitem__(c.ESCAPE, np.negative(cols[c.ESCAPE].view("<i2")).view(np.uint8))),
        "set-magnitudes": bad_chunk("block-counts", "a set chunk that counts magnitudes", lambda cols, head: cols[c.BLOCK].reshape(16, -1)[8].__setitem__(0, 1), Coding(operation=c.SET)),
        "plane-cut": bad_chunk("column-length", "a byte plane that is too short", cut(c.PLANE + 1), Coding(operation=c.SET)),
        "chunk-crc": Bad(what="one bit of a chunk flipped", error="crc-mismatch", root=_flipped_chunk(), version=1),
        "chunk-bomb": bad_buffer("zstd-size", "a frame of 1 MiB for a small column", lambda raw: (1, zstd_frame(bytes(1 << 20)), 0)),
        "chunk-two-frames": bad_buffer("zstd-trailing", "two frames", lambda raw: (1, zstd_frame(raw) + zstd_frame(b""), 0)),
        "chunk-raw-bomb": bad_buffer("column-length", "a raw length beyond the volume", lambda raw: (1, zstd_frame(bytes(1 << 20)), 1 << 20)),
        "chunk-garbage": bad_buffer("zstd-corrupt", "no frame", lambda raw: (1, b"not a zstd frame", 0)),
        "hostile-size": bad_buffer("zstd-size", "a frame that claims 7 * 10^18 bytes", lambda raw: (1, bytes.fromhex("28b52ffde06c06060663636363"), 0)),
        "column-order": Bad(what="columns in another order", error="column-order", root=_spoiled(_swapped), version=1),
        "chunk-overlap": Bad(what="a set and a dense chunk of one domain", error="chunk-overlap", root=_overlap(), version=1),
        "position-twice": Bad(what="a position in both chunks of a domain", error="position-twice", root=_position_twice(), version=1),
    }  # fmt: skip


def _flipped_chunk() -> Root:
    root = history(ONE, Coding())
    key = resolve(root, f"{keys.DATA}/{1:020d}")
    data = root.objects[key]
    root.objects[key] = data[:20] + bytes([data[20] ^ 4]) + data[21:]
    return root


def _spoiled(edit: Callable[[PackedChunk], PackedChunk]) -> Root:
    root = history(ONE)
    root.add(1, ONE, changed(root.contents[0], 7, 0.1), base=0, edit_chunk=edit)
    return root


def _swapped(chunk: PackedChunk) -> PackedChunk:
    order = [1, 0, *range(2, len(chunk.columns))]
    return replace(
        chunk, columns=tuple(chunk.columns[k] for k in order), buffers=tuple(chunk.buffers[k] for k in order)
    )


def _overlap() -> Root:
    root = history(ONE)
    codings = {0: (Coding(operation=c.SET), Coding(operation=c.DENSE))}
    root.add(1, ONE, changed(root.contents[0], 7, 0.1), base=0, codings=codings)
    return root


def _position_twice() -> Root:
    root = history(ONE)
    old = root.contents[0]["w"].reshape(-1)
    new = old.copy()
    new[[5, 9, 70]] += 1
    tiling = make_tiling(ONE)

    def edit(chunk: PackedChunk) -> PackedChunk:
        if chunk.head.operation == c.STEP:
            return pack(ONE, tiling, 0, old, new, np.array([5], np.uint32), Coding())
        return chunk

    codings = {0: (Coding(operation=c.SET), Coding())}
    root.add(1, ONE, {"w": new.reshape(40, 50)}, base=0, tiling=tiling, codings=codings, edit_chunk=edit)
    return root


def _shards() -> dict[str, Bad]:
    shard = f"{keys.DATA}/{1:020d}"
    return {
        "shard-magic": bad_object("magic-wrong", "another end magic", shard, lambda d: d[:-1] + b"\0"),
        "shard-footer": bad_object("footer-offset", "a footer outside the shard", shard, lambda d: d[:-16] + struct.pack("<Q", 1 << 40) + d[-8:]),
        "shard-footer-crc": bad_object("crc-mismatch", "a footer with a flipped bit", shard, lambda d: d[:-40] + bytes([d[-40] ^ 1]) + d[-39:]),
        "shard-cut": bad_object("truncated", "less than a frame", shard, lambda d: d[:20]),
    }  # fmt: skip


def _ways() -> dict[str, Bad]:
    def way(error: str, what: str, edit: Callable[[Manifest], Manifest]) -> Bad:
        # No other way leads to the version, so that it cannot be passed by.
        root = history(ONE, Coding(), data=False)
        root.add(1, ONE, root.contents[1], base=None, further=True, edit=edit)
        return Bad(what=what, error=error, root=root, version=1)

    other = history(ONE, Coding(), data=False)
    foreign = Schema((TensorSpec("v", "bfloat16", (40, 50)),))
    other.add(1, foreign, random_content(foreign, 1), base=None, further=True)
    writers = two_writers()
    content, schema = changed(writers.contents[1], 3), writers.schemas[1]
    tiling = make_tiling(schema, domain_elements=4096)
    writers.add(
        2, schema, content, base=1, tiling=tiling, writers=2,
        edit=lambda m: table_with(m, "shards", writer=[1, 0]),
    )  # fmt: skip
    renamed = history(ONE)
    key = resolve(renamed, keys.SCHEMAS)
    edit_body(renamed.objects, key, lambda body: body.update(names=column(list(b"v"), "<u1")))
    return {
        "shard-order": Bad(what="shards out of order", error="shard-order", root=writers, version=2),
        "schema-digest": Bad(
            what="a schema under the name of another", error="digest-mismatch", root=renamed, version=0
        ),
        "way-target": way(
            "target-digest", "a way to another manifest", lambda m: replace(m, target_digest=bytes(32))
        ),
        "way-content": way(
            "content-mismatch", "a way to another content", lambda m: table_with(m, "tensors", digest1=[7])
        ),
        "way-schema": Bad(what="a way to another schema", error="schema-mismatch", root=other, version=1),
        "new-not-dense": _not_dense(TensorSpec("v", "bfloat16", (40, 50)), "a new tensor with steps"),
        "dtype-not-dense": _not_dense(TensorSpec("w", "float16", (40, 50)), "steps to another dtype"),
        "shape-not-dense": _not_dense(TensorSpec("w", "bfloat16", (50, 40)), "steps to another shape"),
        "recut-rows": Bad(
            what="another tiling without all digests", error="digest-rows", root=_recut_rows(), version=1
        ),
    }


def _retention() -> dict[str, Bad]:
    lease, floor = keys.lease_key(bytes(16)), keys.floor_key(3)

    def spoiled(what: str, key: str, **fields: int) -> Bad:
        root = collected()
        edit_body(root.objects, key, lambda body: body.update(fields))
        return Bad(what=what, error="field-type", root=root, object=key)

    return {
        "below-floor": Bad(
            what="a version below the floor", error="version-gone", root=collected(), version=2
        ),
        "lease-long": spoiled("a lease of more than a day", lease, seconds=86_401),
        "lease-start": spoiled("a lease on a version that cannot be", lease, start=10**18),
        "floor-high": spoiled("a floor at a version that cannot be", floor, version=10**18),
    }


def _ranks() -> dict[str, Bad]:
    asking, call = keys.attempt_key(1, FIRST), keys.attempt_key(1, SECOND)
    answer, receipt = keys.reply_key(1, FIRST, 1), keys.reply_key(1, SECOND, 1)
    verdict = keys.verdict_key(1, FIRST)

    def bad(error: str, what: str, key: str, edit: Callable[[dict[str, Any]], Any]) -> Bad:
        root = ranks()
        edit_body(root.objects, key, edit)
        return Bad(what=what, error=error, root=root, object=key)

    def fewer_columns(body: dict[str, Any]) -> None:
        body["chunks"] |= {"columns": column([1] * body["chunks"]["rows"], "<u1")}

    return {
        "attempt-holdings": bad("column-length", "digests of what one of two ranks holds", asking, lambda b: b.update(holdings=column([0] * 16, "<u1"))),
        "attempt-holders": bad("column-length", "holders of fewer domains than owners", call, lambda b: b.update(holders=column([1], "<u4"))),
        "attempt-owner": bad("index-range", "an owner that is no rank", call, lambda b: b.update(owner=column([2] * (b["owner"][1] // 4), "<u4"))),
        "attempt-tiling": bad("index-range", "a schema without a tiling", call, lambda b: b.update(tiling=None)),
        "attempt-purpose": bad("index-range", "a purpose that v1 lacks", call, lambda b: b.update(purpose=3)),
        "attempt-job": bad("field-missing", "no job", asking, lambda b: b.pop("job")),
        "attempt-signed": bad("field-type", "a number for a truth", asking, lambda b: b.update(signed=1)),
        "answer-row": bad("index-range", "a part of a tensor that the rank does not know", answer, lambda b: b["boxes"].update(tensor=column([9, 3], "<u4"))),
        "answer-corners": bad("column-length", "a corner too few", answer, lambda b: b.update(stops=column([64, 64], "<u8"))),
        "answer-reversed": bad("box-outside", "a part that ends before it begins", answer, lambda b: b.update(starts=column([65, 0, 0], "<u8"))),
        "answer-huge": bad("box-outside", "a part up to 2^63", answer, lambda b: b.update(stops=column([2**63, 64, 64], "<u8"))),
        "answer-dtype": bad("dtype-unknown", "a dtype that v1 lacks", answer, lambda b: b.update(dtypes=["bfloat17", "float32"])),
        "answer-failure": bad("field-type", "a failure that is a text", answer, lambda b: b.update(failure="no")),
        "receipt-writer": bad("index-range", "rank 2 of 2", receipt, lambda b: b.update(writer=2)),
        "receipt-columns": bad("column-count", "fewer columns than rows", receipt, fewer_columns),
        "receipt-digests": bad("column-length", "digests of fewer chunks than there are", receipt, lambda b: b.update(chunk_digests=bytes(31))),
        "receipt-moved": bad("column-length", "rows and column disagree", receipt, lambda b: b["moved"].update(rows=2)),
        "receipt-signature": bad("field-type", "a signature of no bytes", receipt, lambda b: b.update(signature=["hmac-sha256", bytes(8), b""])),
        "verdict-outcome": bad("index-range", "an outcome that v1 lacks", verdict, lambda b: b.update(outcome=5)),
        "verdict-attempt": bad("field-type", "an attempt of 15 bytes", verdict, lambda b: b.update(attempt=bytes(15))),
    }  # fmt: skip


def _not_dense(spec: TensorSpec, what: str) -> Bad:
    root = history(ONE)
    content = {spec.name: changed(root.contents[0], 1)["w"].reshape(spec.shape)}
    root.add(1, Schema((spec,)), content, base=0)
    return Bad(what=what, error="new-not-dense", root=root, version=1)


def _recut_rows() -> Root:
    root = history(ONE)
    content = {"w": root.contents[0]["w"].copy()}
    content["w"][0, 0] += 1
    root.add(
        1, ONE, content, base=0, tiling=make_tiling(ONE, domain_elements=500),
        edit=lambda m: replace(m, domains=m.domains.take(slice(0, 1))),
    )  # fmt: skip
    return root


# --- output ---------------------------------------------------------------------------------------------


def write(folder: Path, objects: Objects) -> None:
    for key, data in objects.items():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def fields_of(data: bytes, key: str) -> dict[str, Any]:
    """A record as JSON: bytes in hex, columns as lists."""
    kind = unseal(data, kind=None, where=key)["kind"]
    record = (parse_call if kind in ("attempt", "verdict") else parse_reply)(data, where=key)
    fields: dict[str, Any] = {"kind": kind}
    for name, wire, _ in described(type(record)):
        value = getattr(record, name)
        if wire in TABLES:
            fields[name] = {column: shown(getattr(value, column)) for column, _ in value.column_types()}
        else:
            fields[name] = shown(value)
    return fields


def shown(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [shown(item) for item in value]
    return value.hex() if isinstance(value, bytes) else value


def main() -> None:
    shutil.rmtree(VECTORS, ignore_errors=True)
    good = []
    for name, (what, make) in GOOD.items():
        root = make()
        write(VECTORS / "good" / name, root.objects)
        for version in sorted(root.contents):
            schema, content = root.schemas[version], root.contents[version]
            tensors = {
                spec.name: blake2b(content[schema.resolve(spec.name).name].tobytes()).hex() for spec in schema
            }
            good.append(
                {"name": name, "what": what, "root": f"good/{name}", "version": version, "tensors": tensors}
            )
        for key in (key for key in root.objects if key.startswith(keys.ATTEMPTS)):
            fields = fields_of(root.objects[key], key)
            good.append({"name": name, "what": what, "root": f"good/{name}", "object": key, "fields": fields})
    bad = []
    groups = (
        _envelopes(),
        _tables(),
        _schemas(),
        _tilings(),
        _manifests(),
        _chunks(),
        _shards(),
        _ways(),
        _retention(),
        _ranks(),
    )
    for name, vector in (item for group in groups for item in group.items()):
        write(VECTORS / "bad" / name, vector.root.objects)
        place = {"object": vector.object} if vector.object else {"version": vector.version}
        bad.append({"name": name, "what": vector.what, "root": f"bad/{name}", **place, "error": vector.error})
    text = json.dumps({"good": good, "bad": bad}, indent=1, ensure_ascii=True)
    (VECTORS / "index.json").write_text(text + "\n")
    print(f"{len(good)} good and {len(bad)} bad vectors in {VECTORS}")


if __name__ == "__main__":
    main()
