"""Names of objects under a root: made here, parsed here, checked here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from deltafmt.errors import FormatError
from deltafmt.format.constants import MAX_VERSION

LINEAGE, LATEST = "lineage.dfm", "latest.dfm"
VERDICT = "verdict"
VERSIONS, WAYS, SCHEMAS, TILINGS, FILES = "versions", "ways", "schemas", "tilings", "files"
DATA, WAYS_DATA = "data", "ways-data"
ATTEMPTS, FLOORS, LEASES, PROBES = "attempts", "floors", "leases", "probes"
ANCHOR = "anchor"

_VERSION_KEY = re.compile(r"versions/([0-9]{20})\.dfm")
_REPLY_KEY = re.compile(r"attempts/[0-9]{20}/[0-9a-f]{32}/([0-9]{5})\.dfm")
_WAY_KEY = re.compile(r"ways/([0-9]{20})/([0-9]{20}|anchor)\.dfm")
_FLOOR_KEY = re.compile(r"floors/([0-9]{20})\.dfm")
_SHARD_KEY = re.compile(r"data/([0-9]{20})/([0-9a-f]{32})/[0-9]{5}\.dfs")
_WAY_SHARD_KEY = re.compile(r"ways-data/([0-9]{20})/([0-9]{20}|anchor)/([0-9a-f]{32})/[0-9]{5}\.dfs")
_ATTEMPT_KEY = re.compile(r"attempts/([0-9]{20})/[0-9a-f]{32}(?:/[0-9a-z]+)?\.dfm")
_CONTENT_KEY = re.compile(r"(?:(?:schemas|tilings)/[0-9a-f]{64}\.dfm|files/[0-9a-f]{64})")
_PROBE_KEY = re.compile(r"probes/[0-9a-f]{32}")
_LEASE_KEY = re.compile(r"leases/([0-9a-f]{32})\.dfm")


def probe_key(token: bytes) -> str:
    """Key of an object that is written only to see how the storage behaves, and removed at once."""
    return f"{PROBES}/{token.hex()}"


def schema_key(digest: bytes) -> str:
    return f"{SCHEMAS}/{digest.hex()}.dfm"


def tiling_key(digest: bytes) -> str:
    return f"{TILINGS}/{digest.hex()}.dfm"


def file_key(digest: bytes) -> str:
    return f"{FILES}/{digest.hex()}"


def version_key(version: int) -> str:
    return f"{VERSIONS}/{version:020d}.dfm"


def ways_folder(version: int) -> str:
    return f"{WAYS}/{version:020d}"


def way_key(version: int, base: int | None) -> str:
    return f"{ways_folder(version)}/{_base(base)}.dfm"


def floor_key(version: int) -> str:
    return f"{FLOORS}/{version:020d}.dfm"


def lease_key(reader: bytes) -> str:
    return f"{LEASES}/{reader.hex()}.dfm"


@dataclass(frozen=True, slots=True)
class ShardName:
    """What a shard's key says: `base` is None for an anchor way and for shards of first ways."""

    version: int
    base: int | None
    attempt: bytes
    further: bool


def shard_key(*, version: int, base: int | None, attempt: bytes, writer: int, further: bool) -> str:
    """Key of a shard; `further` for a way beside the version's first one."""
    folder = f"{WAYS_DATA}/{version:020d}/{_base(base)}" if further else f"{DATA}/{version:020d}"
    return f"{folder}/{attempt.hex()}/{writer:05d}.dfs"


def attempts_folder(version: int) -> str:
    return f"{ATTEMPTS}/{version:020d}"


def attempt_key(version: int, attempt: bytes) -> str:
    return f"{attempts_folder(version)}/{attempt.hex()}.dfm"


def replies_folder(version: int, attempt: bytes) -> str:
    return f"{attempts_folder(version)}/{attempt.hex()}"


def reply_key(version: int, attempt: bytes, writer: int) -> str:
    return f"{replies_folder(version, attempt)}/{writer:05d}.dfm"


def verdict_key(version: int, attempt: bytes) -> str:
    return f"{replies_folder(version, attempt)}/{VERDICT}.dfm"


def reply_of(key: str) -> int | None:
    """The writer whose reply has this key; None for any other key."""
    match = _REPLY_KEY.fullmatch(key)
    return int(match[1]) if match else None


def version_of(key: str) -> int | None:
    """The version whose manifest has this key; None for any other key."""
    return _number(_VERSION_KEY.fullmatch(key))


def floor_of(key: str) -> int | None:
    """The version whose floor has this key; None for any other key."""
    return _number(_FLOOR_KEY.fullmatch(key))


def lease_of(key: str) -> bytes | None:
    """The reader whose lease has this key; None for any other key."""
    match = _LEASE_KEY.fullmatch(key)
    return bytes.fromhex(match[1]) if match else None


def way_of(key: str) -> tuple[int, int | None] | None:
    """(version, base) of the further way whose manifest has this key; None for any other key."""
    match = _WAY_KEY.fullmatch(key)
    if not match or int(match[1]) >= MAX_VERSION:
        return None
    return int(match[1]), None if match[2] == ANCHOR else int(match[2])


def shard_of(key: str) -> ShardName | None:
    """What the key of a shard says; None for any other key."""
    match = _SHARD_KEY.fullmatch(key)
    if match and int(match[1]) < MAX_VERSION:
        return ShardName(int(match[1]), None, bytes.fromhex(match[2]), further=False)
    match = _WAY_SHARD_KEY.fullmatch(key)
    if match and int(match[1]) < MAX_VERSION:
        base = None if match[2] == ANCHOR else int(match[2])
        return ShardName(int(match[1]), base, bytes.fromhex(match[3]), further=True)
    return None


def attempt_of(key: str) -> int | None:
    """The version that an object of an attempt is about; None for any other key."""
    return _number(_ATTEMPT_KEY.fullmatch(key))


def is_content(key: str) -> bool:
    """Whether this is the key of a schema, a tiling or a side file."""
    return _CONTENT_KEY.fullmatch(key) is not None


def is_probe(key: str) -> bool:
    return _PROBE_KEY.fullmatch(key) is not None


def _number(match: re.Match[str] | None) -> int | None:
    return int(match[1]) if match and int(match[1]) < MAX_VERSION else None


def _base(base: int | None) -> str:
    return ANCHOR if base is None else f"{base:020d}"


def check_name(name: str, *, where: object = None) -> str:
    """`name` itself if it is a relative path that stays below its root, else `FormatError` (`key-unsafe`).

    No empty, `.` or `..` part, no leading slash, backslash, scheme, percent escape or control byte.
    """
    if not isinstance(name, str):
        raise FormatError("name is no text", kind="key-unsafe", where=where, found=repr(name)[:64])
    parts = name.split("/")
    unsafe = (
        any(part in ("", ".", "..") for part in parts)
        or any(ord(char) < 32 or ord(char) == 127 for char in name)
        or any(char in name for char in "\\:%")
        or len(name) > 1024
        or not name.isprintable()
    )
    if unsafe:
        raise FormatError(
            "name leaves its root or is unsafe", kind="key-unsafe", where=where, found=repr(name[:64])
        )
    return name


def check_side_names(names: Iterable[str]) -> None:
    """Raise `FormatError` (`key-unsafe`) unless all can stand in one folder, beside an export's weights.

    A name that is a file cannot be a folder too, and those of safetensors files and their index are taken.
    """
    given = {check_name(name, where="side file") for name in names}
    for name in sorted(given):
        parts = name.split("/")
        above = {"/".join(parts[:k]) for k in range(1, len(parts))} & given
        if above:
            raise FormatError(
                "side file stands where another needs a folder",
                kind="key-unsafe",
                where=repr(name),
                found=repr(above.pop()),
            )
        if len(parts) == 1 and name.lower().endswith((".safetensors", ".safetensors.index.json")):
            raise FormatError(
                "side file has the name of a weight file, which an export writes itself",
                kind="key-unsafe",
                where=repr(name),
            )
