"""A21: somebody's cached listings do not hide a new version, and stay as they are."""

from __future__ import annotations

import secrets
from typing import Any

import fsspec
import torch
from fsspec.implementations.memory import MemoryFileSystem

import deltafmt
from deltafmt.format import keys
from deltafmt.store import open_store
from deltafmt.testing.servers import SeaweedServer


def test_a_new_version_is_seen_at_the_next_poll_on_s3(seaweed: SeaweedServer) -> None:
    url = seaweed.url()
    caching: dict[str, Any] = {**seaweed.storage_options, "use_listings_cache": True}
    model = {"w": torch.arange(1000, dtype=torch.int32)}
    writer = deltafmt.Writer(url, storage_options=seaweed.storage_options)
    writer.publish_anchor(model)
    # The caller's own instance remembers listings, and it is the one that these options stand for.
    mine = fsspec.filesystem("s3", **caching)
    folder = f"{url.removeprefix('s3://')}/versions"
    assert len(mine.ls(folder)) == 1
    assert mine.exists(f"{folder}/{keys.version_key(0).rpartition('/')[2]}")

    lineage = deltafmt.open(url, storage_options=caching)
    live = {"w": torch.zeros(1000, dtype=torch.int32)}
    receiver = deltafmt.Receiver(url, live, storage_options=caching)
    store = open_store(url, caching)
    assert lineage.latest() == receiver.advance() == 0
    for version in range(1, 4):
        assert not store.exists(keys.version_key(version))
        model["w"][version::9] += 1
        writer.publish(model)
        assert store.exists(keys.version_key(version))
        assert lineage.latest() == receiver.advance() == version
        assert torch.equal(live["w"], model["w"])
    assert len(mine.ls(folder)) == 1, "the caller's cache is the caller's"
    mine.invalidate_cache()
    assert len(mine.ls(folder)) == 4


class Remembering(MemoryFileSystem):  # type: ignore[misc]
    """fsspec's memory, with the listings that fsspec offers to keep."""

    protocol = "remembering"
    cachable = True

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("remembering://").strip("/")

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        kept = self._ls_from_cache(path)
        if kept is None:
            kept = super().ls(path, detail=True, **options)
            self.dircache[path] = kept
        return kept if detail else [entry["name"] for entry in kept]

    def info(self, path: str, **options: Any) -> Any:
        parent = self._parent(path)
        for entry in self.dircache.get(parent, ()):
            if entry["name"] == path:
                return entry
        return super().info(path, **options)


def test_sizes_are_never_those_of_an_old_listing() -> None:
    fsspec.register_implementation("remembering", Remembering, clobber=True)
    root = f"remembering://{secrets.token_hex(8)}"
    other, mine = MemoryFileSystem(), fsspec.filesystem("remembering")
    store = open_store(root)
    path = f"{store.root}/files/a"  # type: ignore[attr-defined]
    other.pipe_file(path, b"12")
    assert mine.ls(f"{store.root}/files")[0]["size"] == 2  # type: ignore[attr-defined]
    assert list(store.list("files")) == ["files/a"]
    assert store.size("files/a") == 2
    other.pipe_file(path, b"12345")
    other.pipe_file(path[:-1] + "b", b"1")
    assert list(store.list("files")) == ["files/a", "files/b"]
    assert store.read("files/a", limit=5) == b"12345"
    assert mine.ls(f"{store.root}/files")[0]["size"] == 2, "the caller's cache is the caller's"  # type: ignore[attr-defined]
