"""A27: a version published in the background holds what the tensors were when the call returned."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import deltafmt
from deltafmt import IncompleteError, StoreError, WriterOptions
from deltafmt.store import MemoryStore, register_protocol
from deltafmt.tensors import bits, numpy_bits
from deltafmt.testing.faulty import FaultyStore, delayed, failing
from tests.cases.common import assert_same, copied, faulty, new_root
from tests.ranks import Tensors, anchor, assert_holds, changed, model, publish, staged_parts, together

DELAY_SECONDS = 0.02
GPU = [torch.device("cuda")] if torch.cuda.is_available() else []
Given = dict[str, "torch.Tensor | np.ndarray[Any, Any]"]


def slow(store: FaultyStore) -> None:
    for verb in ("open_sink", "write", "close", "put_if_absent"):
        store.inject(delayed(DELAY_SECONDS), verb=verb, times=1 << 20)


def away(store: FaultyStore, verb: str, key: str) -> None:
    store.inject(failing(StoreError("away", kind="store-unreachable")), verb=verb, key=key)


def of_all_kinds() -> Given:
    """Plain, strided, cast, on a GPU where there is one, and memory that belongs to numpy."""
    random = torch.Generator().manual_seed(3)
    tensors: Given = {
        "plain": torch.randn(300, 40, generator=random),
        "strided": torch.randn(40, 300, generator=random).bfloat16().t(),
        "scalar": torch.tensor(1.5),
        "array": np.arange(5000, dtype=np.float32),
        "reversed": np.arange(700, dtype=np.int64)[::2],
    }
    for device in GPU:
        tensors["gpu"] = torch.randn(200, 50, generator=random).to(device)
    return tensors


def picture(tensors: Mapping[str, Any]) -> Tensors:
    return {
        name: torch.from_numpy(value.copy())
        if isinstance(value, np.ndarray)
        else value.detach().cpu().clone()
        for name, value in tensors.items()
    }


def move(tensors: Mapping[str, Any], every: int) -> None:
    """Add one, in place, to every so-manieth element."""
    for value in tensors.values():
        if value.ndim:
            value[::every] += 1
        else:
            value += 1


@pytest.mark.parametrize("every", [1, 7], ids=["all", "some"])
def test_what_was_there_when_the_call_returned(every: int) -> None:
    root = new_root()
    url, store = faulty(root)
    tensors = of_all_kinds()
    writer = deltafmt.Writer(url, options=WriterOptions(domain_elements=4000, anchor_every=2))
    writer.publish_anchor(tensors)
    slow(store)
    pictures = [picture(tensors)]
    pending = []
    for _ in range(3):
        move(tensors, every)
        pictures.append(picture(tensors))
        pending.append(writer.publish_async(tensors))
        move(tensors, 1)
    assert [version.result() for version in pending] == [1, 2, 3]
    writer.close()
    lineage = deltafmt.open(root)
    for version, expected in enumerate(pictures):
        assert_same(lineage.read(version), expected)
    assert [info.ways for info in lineage.log()] == [(None,), (0,), (1, None), (2,)]
    assert lineage.verify().ok


def test_it_returns_while_the_rest_is_under_way_and_the_next_call_waits() -> None:
    url, store = faulty(new_root())
    tensors = {"w": torch.zeros(1000)}
    writer = deltafmt.Writer(url)
    writer.publish_anchor(tensors)
    slow(store)
    tensors["w"] += 1
    first = writer.publish_async(tensors)
    assert not first.done()
    tensors["w"] += 1
    second = writer.publish_async(tensors)
    assert first.done(), "at most one is under way"
    tensors["w"] += 1
    assert writer.publish(tensors) == 3
    assert (first.result(), second.result()) == (1, 2)
    for version in range(4):
        assert deltafmt.open(url).read(version)["w"].unique().tolist() == [version]


def test_new_tensors_and_masters_belong_to_the_picture() -> None:
    url, store = faulty(new_root())
    masters = {"w": torch.randn(3000), "b": torch.randn(40)}
    writer = deltafmt.Writer(url, publish_dtype="bfloat16")
    writer.publish_anchor(masters)
    slow(store)
    masters |= {"new": torch.randn(2000)}
    masters["w"] *= 1.5
    expected = {name: master.bfloat16() for name, master in masters.items()}
    pending = writer.publish_async(masters)
    for master in masters.values():
        master.zero_()
    assert pending.result() == 1
    assert_same(deltafmt.open(url).read(1), expected)


@pytest.mark.parametrize(
    ("verb", "key"), [("open_sink", "data/"), ("close", "data/"), ("put_if_absent", "versions/")]
)
def test_a_failure_shows_at_result_and_at_the_next_call(verb: str, key: str) -> None:
    root = new_root()
    url, store = faulty(root)
    tensors = {"w": torch.zeros(1000)}
    writer = deltafmt.Writer(url)
    writer.publish_anchor(tensors)
    tensors["w"][0] += 1
    store.inject(failing(StoreError("away", kind="store-unreachable")), verb=verb, key=key, times=1000)
    told = writer.publish_async(tensors)
    with pytest.raises(StoreError):
        told.result()
    untold = writer.publish_async(tensors)
    with pytest.raises(StoreError):
        writer.publish(tensors)
    with pytest.raises(StoreError):
        untold.result()
    last = writer.publish_async(tensors)
    with pytest.raises(StoreError):
        writer.close()
    assert last.done()
    store.heal()
    assert deltafmt.open(root).latest() == 0
    tensors["w"][1] += 1
    with deltafmt.Writer(url) as again:
        assert again.publish_async(tensors).result() == 1
    assert deltafmt.open(root).manifest(1).changed == 2, "what was never published is not lost"
    assert_same(deltafmt.open(root).read(1), tensors)


def ranks_of(name: str, stores: list[FaultyStore], **options: Any) -> list[deltafmt.Writer]:
    """Three ranks, each with a faulty store of its own over one root."""

    def opened(path: str, _: object) -> FaultyStore:
        stores.append(FaultyStore(MemoryStore.named(path)))
        return stores[-1]

    protocol = f"picture-{name}"
    register_protocol(protocol, opened)
    given = WriterOptions(**{"threads": 1, "rank_timeout_seconds": 30.0, **options})
    return [
        deltafmt.Writer(f"{protocol}://{name}", rank=rank, world_size=3, options=given) for rank in range(3)
    ]


def published_behind(ranks: list[deltafmt.Writer], state: Tensors) -> list[Any]:
    """All ranks publish a state in the background and spoil their tensors at once."""

    def one(rank: int) -> Any:
        part = copied(staged_parts(state)[rank])
        pending = ranks[rank].publish_async(part)
        for tensor in part.values():
            bits(tensor).fill_(0x55)
        return pending

    return together([partial(one, rank) for rank in range(3)])


def results(pending: list[Any]) -> list[Any]:
    return together([version.result for version in pending])


def test_ranks_take_their_pictures_first() -> None:
    name, stores = secrets.token_hex(8), list[FaultyStore]()
    ranks = ranks_of(name, stores, anchor_every=2)
    states = [changed(model(), seed) for seed in range(4)]
    assert anchor(ranks, staged_parts(states[0])) == [0, 0, 0]
    for store in stores:
        slow(store)
    pending = [published_behind(ranks, states[version]) for version in (1, 2)]
    assert [results(each) for each in pending] == [[1, 1, 1], [2, 2, 2]]
    assert publish(ranks, staged_parts(states[3])) == [3, 3, 3]
    root = f"memory://{name}"
    names = deltafmt.open(root).schema().names
    for version, state in enumerate(states):
        assert_holds(root, version, {name: state[name] for name in names})
    assert [info.ways for info in deltafmt.open(root).log()] == [(None,), (0,), (1, None), (2,)]
    assert deltafmt.open(root).verify().ok


def test_a_failure_of_one_rank_shows_on_all_at_result_and_at_the_next_call() -> None:
    name, stores = secrets.token_hex(8), list[FaultyStore]()
    ranks = ranks_of(name, stores)
    states = [changed(model(), seed) for seed in range(3)]
    assert anchor(ranks, staged_parts(states[0])) == [0, 0, 0]
    away(stores[1], "open_sink", "data/")
    first, second, third = results(published_behind(ranks, states[1]))
    assert isinstance(second, StoreError)
    for error in (first, third):
        assert isinstance(error, IncompleteError)
        assert (error.kind, error.where) == ("rank-failed", "rank 1")
    stores[2].inject(failing(StoreError("away", kind="store-unreachable")), verb="open_sink", key="data/")
    untold = published_behind(ranks, states[1])
    errors = publish(ranks, staged_parts(states[1]))
    assert [type(error) for error in errors] == [IncompleteError, IncompleteError, StoreError]
    assert all(isinstance(error, deltafmt.DeltafmtError) for error in results(untold))
    assert [writer.version for writer in ranks] == [0, 0, 0]
    assert publish(ranks, staged_parts(states[2])) == [1, 1, 1]
    root = f"memory://{name}"
    assert_holds(root, 1, {name: states[2][name] for name in deltafmt.open(root).schema().names})


@pytest.mark.skipif(not GPU, reason="no GPU")
def test_the_picture_of_a_gpu_is_taken_after_its_kernels() -> None:
    url, store = faulty(new_root())
    tensors = {"w": torch.zeros(1 << 22, device="cuda")}
    writer = deltafmt.Writer(url)
    writer.publish_anchor(tensors)
    slow(store)
    for _ in range(50):
        tensors["w"] += 1
    pending = writer.publish_async(tensors)
    tensors["w"].zero_()
    assert pending.result() == 1
    assert np.unique(numpy_bits(deltafmt.open(url).read(1)["w"]).view(np.float32)).tolist() == [50.0]
