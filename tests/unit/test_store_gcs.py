"""Google Cloud Storage through gcsfs, on an emulator."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import deltafmt
from deltafmt import UnsupportedError, VersionGoneError
from deltafmt.store import AlreadyExists, Store, open_store
from deltafmt.testing.gcs import GcsServer
from deltafmt.testing.store_suite import StoreSuite
from tests.reading import blank, copied, same


@pytest.fixture(scope="module")
def gcs() -> Iterator[GcsServer]:
    with GcsServer(conditions=True) as server:
        yield server


# gcsfs hands large bodies to aiohttp as bytes, which that would rather have in pieces.
@pytest.mark.filterwarnings("ignore:Sending a large body directly")
class TestGcs(StoreSuite):
    @pytest.fixture
    def store(self, gcs: GcsServer) -> Store:
        return open_store(gcs.url(), gcs.storage_options)


def test_a_lineage_lives_on_gcs(gcs: GcsServer) -> None:
    url, options = gcs.url(), gcs.storage_options
    tensors = {"w": torch.zeros(300, dtype=torch.bfloat16), "b": torch.ones(7)}
    versions = []
    with deltafmt.Writer(url, storage_options=options) as writer:
        writer.publish_anchor(tensors)
        versions.append(copied(tensors))
        for step in range(4):
            tensors["w"][step] += 1
            writer.publish(tensors)
            versions.append(copied(tensors))
    lineage = deltafmt.open(url, storage_options=options)
    lineage.squash(0, 4)
    lineage.add_anchor(3)
    assert lineage.verify().ok
    live = blank(tensors)
    receiver = deltafmt.Receiver(url, live, storage_options=options)
    for version in (0, 4, 3):
        receiver.advance(version)
        assert same(live, versions[version])
    receiver.close()
    lineage.gc(keep_last=2, grace_seconds=0, dry_run=False)
    lineage = deltafmt.open(url, storage_options=options)
    assert [info.version for info in lineage.log()] == [3, 4]
    assert same(lineage.read(4), versions[4])
    with pytest.raises(VersionGoneError):
        lineage.read(1)


def test_of_many_creates_one_succeeds(gcs: GcsServer) -> None:
    stores = [open_store(gcs.url("race"), gcs.storage_options) for _ in range(4)]

    def create(number: int) -> bool:
        try:
            stores[number % 4].put_if_absent(f"versions/{number // 4}", bytes([number]))
        except AlreadyExists:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(create, range(100)))
    for key in range(25):
        winners = [number for number in range(4 * key, 4 * key + 4) if won[number]]
        assert len(winners) == 1
        assert stores[0].read(f"versions/{key}") == bytes(winners)


def test_a_server_that_ignores_the_condition_is_refused_for_writing() -> None:
    with GcsServer(conditions=False) as server:
        url, options = server.url(), server.storage_options
        with pytest.raises(UnsupportedError, match="overwrites an object") as caught:
            deltafmt.Writer(url, storage_options=options).publish_anchor({"w": torch.zeros(3)})
        assert caught.value.kind == "create-not-exclusive"
        assert list(open_store(url, options).entries("probes")) == []
