"""The shipped suite on every store that ships."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from deltafmt.store import LocalStore, MemoryStore, Store, open_store
from deltafmt.testing.fsspec_stores import fsspec_store
from deltafmt.testing.servers import MotoServer, SeaweedServer
from deltafmt.testing.store_suite import StoreSuite


class TestLocalStore(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "root")


class TestMemoryStore(StoreSuite):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore("suite")


class TestFsspecMemory(StoreSuite):
    @pytest.fixture
    def store(self) -> Store:
        return fsspec_store("memory", f"/{secrets.token_hex(8)}/root")


class TestFsspecFile(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return fsspec_store("file", str(tmp_path / "root"))


class TestFileUrl(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(f"file://{tmp_path}/a folder")


class TestSeaweed(StoreSuite):
    @pytest.fixture
    def store(self, seaweed: SeaweedServer) -> Store:
        return open_store(seaweed.url(), seaweed.storage_options)


class TestMoto(StoreSuite):
    @pytest.fixture
    def store(self, moto: MotoServer) -> Store:
        return open_store(moto.url(), moto.storage_options)


class TestSeaweedByObstore(StoreSuite):
    @pytest.fixture
    def store(self, seaweed: SeaweedServer) -> Store:
        return open_store(seaweed.url(), {**seaweed.storage_options, "obstore": True})
