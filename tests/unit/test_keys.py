from __future__ import annotations

import pytest

from deltafmt.format import keys
from deltafmt.format.constants import MAX_VERSION
from tests.formats import kind_of


def test_names_of_objects() -> None:
    digest, attempt = bytes(range(32)), b"\xab" * 16
    assert keys.schema_key(digest) == f"schemas/{digest.hex()}.dfm"
    assert keys.tiling_key(digest) == f"tilings/{digest.hex()}.dfm"
    assert keys.file_key(digest) == f"files/{digest.hex()}"
    assert keys.version_key(12) == "versions/00000000000000000012.dfm"
    assert keys.way_key(12, 3) == "ways/00000000000000000012/00000000000000000003.dfm"
    assert keys.floor_key(12) == "floors/00000000000000000012.dfm"
    assert keys.lease_key(attempt) == f"leases/{attempt.hex()}.dfm"
    assert keys.way_key(12, None) == "ways/00000000000000000012/anchor.dfm"
    place = {"version": 12, "attempt": attempt, "writer": 7}
    assert keys.shard_key(**place, base=3, further=False) == f"data/{12:020d}/{attempt.hex()}/00007.dfs"  # type: ignore[arg-type]
    assert (
        keys.shard_key(**place, base=3, further=True)  # type: ignore[arg-type]
        == f"ways-data/{12:020d}/{3:020d}/{attempt.hex()}/00007.dfs"
    )
    assert (
        keys.shard_key(**place, base=None, further=True)  # type: ignore[arg-type]
        == f"ways-data/{12:020d}/anchor/{attempt.hex()}/00007.dfs"
    )


@pytest.mark.parametrize("version", [0, 1, MAX_VERSION - 1])
@pytest.mark.parametrize("base", [None, 0, 77])
def test_names_are_read_back(version: int, base: int | None) -> None:
    assert keys.version_of(keys.version_key(version)) == version
    assert keys.way_of(keys.way_key(version, base)) == (version, base)
    assert keys.floor_of(keys.floor_key(version)) == version
    assert keys.lease_of(keys.lease_key(bytes(range(16)))) == bytes(range(16))
    assert keys.way_of(keys.version_key(version)) is None
    assert keys.version_of(keys.way_key(version, base)) is None


@pytest.mark.parametrize(
    "key",
    [
        "versions/12.dfm",
        "versions/00000000000000000012.dfm.tmp",
        "versions/00000000000000000012",
        "versions/00000000000000000012.DFM",
        "versions/00000000000000000012.dfm\n",
        "/versions/00000000000000000012.dfm",
        f"versions/{MAX_VERSION:020d}.dfm",
        "versions/" + "\N{ARABIC-INDIC DIGIT ONE}" * 20 + ".dfm",
        "ways/00000000000000000012/other.dfm",
        f"ways/{MAX_VERSION:020d}/anchor.dfm",
        f"ways/{1:020d}/" + "\N{ARABIC-INDIC DIGIT ONE}" * 20 + ".dfm",
        "floors/12.dfm",
        f"floors/{MAX_VERSION:020d}.dfm",
        f"floors/{1:020d}.dfm.tmp",
        "leases/me.dfm",
        f"leases/{'A' * 32}.dfm",
        f"leases/{'a' * 31}.dfm",
    ],
)
def test_other_names_are_no_versions(key: str) -> None:
    assert keys.floor_of(key) is None
    assert keys.lease_of(key) is None
    assert keys.version_of(key) is None
    assert keys.way_of(key) is None


@pytest.mark.parametrize(
    "name", ["a", "config.json", "a/b/c", "tokenizer/added tokens.json", "名前", "a..b", ".hidden", "x~"]
)
def test_safe_names(name: str) -> None:
    assert keys.check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/../../x",
        "a/./b",
        "a//b",
        "a/",
        "/etc/passwd",
        "s3://other/x",
        "file:///etc/passwd",
        "C:\\x",
        "C:x",
        "..\\x",
        "%2e%2e/x",
        "x\0y",
        "x\ny",
        "x\x7f",
        "x\N{RIGHT-TO-LEFT OVERRIDE}y",
        "x\N{LINE SEPARATOR}y",
        "a" * 1025,
    ],
)
def test_unsafe_names(name: str) -> None:
    assert kind_of(lambda: keys.check_name(name, where="x")) == "key-unsafe"
