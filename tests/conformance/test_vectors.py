"""The library and the second reader over all vectors: the same tensors, the same reason codes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

import deltafmt
from deltafmt.errors import DeltafmtError
from deltafmt.format import keys
from deltafmt.format.checksum import blake2b, crc32c
from deltafmt.format.constants import SHARD_MAGIC
from deltafmt.format.objects import parse_floor, parse_lease, parse_lineage, parse_manifest, parse_schema
from deltafmt.format.ranks import parse_call, parse_reply
from deltafmt.format.shard import read_footer
from deltafmt.format.signing import check_signature
from deltafmt.tensors import numpy_bits
from tests.conformance.reference import ROOT, load_refdump

VECTORS = ROOT / "spec" / "vectors"
INDEX: dict[str, list[dict[str, Any]]] = json.loads((VECTORS / "index.json").read_text())

OBJECTS = [vector for vector in INDEX["good"] if "object" in vector]
VERSIONS = [vector for vector in INDEX["good"] if "version" in vector]
SIGNATURE_REASONS = {"signature-missing", "signature-untrusted", "signature-wrong", "signature-place"}

refdump = load_refdump()


def library_object(path: Path) -> None:
    data, where = path.read_bytes(), path.name
    key = path.relative_to(VECTORS)
    if path.suffix == ".dfs":
        assert data[:8] == SHARD_MAGIC or len(data) < 8
        read_footer(memoryview(data), where=where)
    elif key.parts[2] == "schemas":
        parse_schema(data, where=where)
    elif key.parts[2] == "floors":
        parse_floor(data, where=where)
    elif key.parts[2] == "leases":
        parse_lease(data, where=where)
    elif key.parts[2] == "attempts":
        rank_object(data, where)
    elif key.parts[2] == "versions":
        parse_manifest(data, way=False, where=where)
    else:
        parse_lineage(data, where=where)


def rank_object(data: bytes, where: str) -> Any:
    call = where.startswith("verdict") or len(where) > len("00000.dfm")
    return (parse_call if call else parse_reply)(data, where=where)


def names(vectors: list[dict[str, Any]]) -> list[str]:
    return [f"{v['name']}-{v.get('version', '')}" for v in vectors]


@pytest.mark.parametrize("vector", OBJECTS, ids=[vector["object"] for vector in OBJECTS])
def test_good_objects(vector: dict[str, Any]) -> None:
    path = VECTORS / vector["root"] / vector["object"]
    record = rank_object(path.read_bytes(), path.name)
    assert type(record).__name__.lower() == vector["fields"]["kind"]
    assert refdump.dump(path).items() >= vector["fields"].items()
    if vector["fields"].get("signature"):
        check_signature(path.read_bytes(), record.signature, [deltafmt.HmacKey(SECRET)], where=path)


@pytest.mark.parametrize("vector", VERSIONS, ids=names(VERSIONS))
def test_good(vector: dict[str, Any]) -> None:
    root = VECTORS / vector["root"]
    tensors = deltafmt.open(str(root)).read(vector["version"])
    found = {name: blake2b(numpy_bits(tensor).tobytes()).hex() for name, tensor in tensors.items()}
    assert found == vector["tensors"]
    rebuilt = refdump.rebuild(refdump.Root(root), vector["version"], None, None)
    assert {t["name"]: t["blake2b"] for t in rebuilt["tensors"]} == vector["tensors"]


@pytest.mark.parametrize(
    ("name", "version", "ways"),
    [("further-ways", 3, ("anchor", "1", "2")), ("squashes", 3, ("0", "2")), ("squashes", 5, ("3", "4"))],
)
def test_every_way_of_a_version_gives_the_same(name: str, version: int, ways: tuple[str, ...]) -> None:
    root = refdump.Root(VECTORS / "good" / name)
    wanted = root.tensors(version)
    for way in ways:
        found = root.tensors(version, way)
        assert all((found[name] == wanted[name]).all() for name in wanted)


SECRET = bytes(range(32))


def test_a_signed_version_by_both_readers() -> None:
    folder = VECTORS / "good" / "signed"
    lineage = deltafmt.open(str(folder), trust=[deltafmt.HmacKey(SECRET)])
    rebuilt = refdump.rebuild(refdump.Root(folder, SECRET), 1, None, None)
    found = {name: blake2b(numpy_bits(tensor).tobytes()).hex() for name, tensor in lineage.read(1).items()}
    assert {t["name"]: t["blake2b"] for t in rebuilt["tensors"]} == found


def spoiled(root: Path, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """The signed lineage with the body of its first version changed, and its checksum right."""
    shutil.copytree(VECTORS / "good" / "signed", root)
    path = root / keys.version_key(0)
    data = path.read_bytes()
    packed = msgpack.packb(edit(msgpack.unpackb(data[24:])))
    head = data[8:12] + len(packed).to_bytes(8, "little")
    path.write_bytes(data[:8] + head + crc32c(packed, crc32c(head)).to_bytes(4, "little") + packed)
    return root


def test_signatures_that_both_readers_refuse(tmp_path: Path) -> None:
    def forged(body: dict[str, Any]) -> dict[str, Any]:
        return body | {"created": body["created"] + 1}

    def moved(body: dict[str, Any]) -> dict[str, Any]:
        return {"signature": body["signature"], **body}

    refused = {
        "signature-missing": (VECTORS / "good" / "side-files", SECRET),
        "signature-untrusted": (VECTORS / "good" / "signed", bytes(32)),
        "signature-wrong": (spoiled(tmp_path / "forged", forged), SECRET),
        "signature-place": (spoiled(tmp_path / "moved", moved), SECRET),
    }
    assert refused.keys() == SIGNATURE_REASONS
    for kind, (root, key) in refused.items():
        with pytest.raises(DeltafmtError) as caught:
            deltafmt.open(str(root), trust=[deltafmt.HmacKey(key)]).read(0)
        assert caught.value.kind == kind
        with pytest.raises(refdump.BadObjectError) as bad:
            refdump.Root(root, key).tensors(0)
        assert bad.value.code == kind


@pytest.mark.parametrize("vector", INDEX["bad"], ids=names(INDEX["bad"]))
def test_bad(vector: dict[str, Any]) -> None:
    root = VECTORS / vector["root"]
    with pytest.raises(DeltafmtError) as caught:
        by_library(root, vector)
    assert caught.value.kind == vector["error"]
    with pytest.raises(refdump.BadObjectError) as bad:
        by_refdump(root, vector)
    assert bad.value.code == vector["error"]


def by_library(root: Path, vector: dict[str, Any]) -> None:
    if "object" in vector:
        library_object(root / vector["object"])
    else:
        deltafmt.open(str(root)).read(vector["version"])


def by_refdump(root: Path, vector: dict[str, Any]) -> None:
    if "object" in vector:
        refdump.dump(root / vector["object"])
    else:
        refdump.Root(root).tensors(vector["version"])


def test_the_vectors_reach_every_reason_of_the_format() -> None:
    covered = {vector["error"] for vector in INDEX["bad"]}
    assert covered >= format_reasons()


def format_reasons() -> set[str]:
    """Codes that an object or lineage can be refused with, by what the readers' sources raise."""
    text = (ROOT / "tools" / "refdump.py").read_text()
    codes = set(re.findall(r'"([a-z0-9]+(?:-[a-z0-9]+)+)"', text)) & deltafmt.errors.REASONS.keys()
    # The first two are too large to keep as files, the others tell that something is absent.
    elsewhere = {
        "object-too-large",
        "domain-too-large",
        "lineage-missing",
        "version-missing",
        "object-missing",
    }
    # Vectors are for readers that demand no signatures.
    return codes - elsewhere - SIGNATURE_REASONS
