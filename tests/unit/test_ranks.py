"""Several ranks write one version through the root: what they agree on, and how it ends for all of them."""

from __future__ import annotations

import secrets
from functools import partial

import pytest
import torch

import deltafmt
from deltafmt.errors import (
    BaseMismatchError,
    CommitConflictError,
    IncompleteError,
    LayoutError,
    SchemaError,
    StoreError,
)
from deltafmt.read.newest import read_hint
from deltafmt.schema import Schema
from deltafmt.store import MemoryStore, register_protocol
from deltafmt.testing.faulty import FaultyStore, delayed, failing, flipped
from tests.ranks import (
    Tensors,
    anchor,
    assert_holds,
    changed,
    memory_root,
    model,
    publish,
    staged_parts,
    tensor_parallel,
    together,
    writers,
)


def lineage_of(states: list[Tensors], world: int, root: str) -> list[deltafmt.Writer]:
    """Tensor-parallel ranks that have published the states."""
    layouts, parts = tensor_parallel(states[0], world)
    ranks = writers(root, world, schema=Schema.of(states[0]), layouts=layouts)
    assert anchor(ranks, parts) == [0] * world
    for version, state in enumerate(states[1:], 1):
        assert publish(ranks, tensor_parallel(state, world)[1], step=version) == [version] * world
    return ranks


@pytest.mark.parametrize("world", [2, 4])
def test_shards_of_ranks_make_whole_versions(world: int) -> None:
    root = memory_root()
    states = [model(), changed(model(), 1), changed(model(), 2)]
    lineage_of(states, world, root)
    for version, state in enumerate(states):
        assert_holds(root, version, state)
    lineage = deltafmt.open(root)
    assert lineage.manifest(2).writers == world
    assert lineage.manifest(2).shards.writer.tolist() == list(range(world))
    assert lineage.verify().ok
    assert [info.step for info in lineage.log()] == [None, 1, 2]
    assert read_hint(lineage.history.store) == 2


def whole(state: Tensors, *names: str) -> Tensors:
    return {name: state[name] for name in names}


def staged(root: str, states: list[Tensors], **settings: object) -> list[deltafmt.Writer]:
    ranks = writers(root, 3, **settings)
    assert anchor(ranks, staged_parts(states[0])) == [0, 0, 0]
    for version, state in enumerate(states[1:], 1):
        assert publish(ranks, staged_parts(state)) == [version] * 3
    return ranks


def test_whole_tensors_of_ranks_are_put_together_without_a_schema() -> None:
    root, states = memory_root(), [model(), changed(model(), 1), changed(model(), 2)]
    staged(root, states)
    for version, state in enumerate(states):
        assert_holds(root, version, {name: state[name] for name in deltafmt.open(root).schema(version).names})
    owners = deltafmt.open(root).manifest(0).shards.writer.tolist()
    assert owners == [0, 1, 2]


def test_a_version_without_a_change_needs_no_shard() -> None:
    root, state = memory_root(), model()
    ranks = staged(root, [state])
    assert publish(ranks, staged_parts(state)) == [1, 1, 1]
    manifest = deltafmt.open(root).manifest(1)
    assert (len(manifest.shards), manifest.changed) == (0, 0)
    assert publish(ranks, staged_parts(changed(state, 3))) == [2, 2, 2]
    assert_holds(root, 2, {name: changed(state, 3)[name] for name in deltafmt.open(root).schema().names})


def test_replicas_that_differ_are_refused_with_tensor_and_ranks() -> None:
    root, state = memory_root(), model()
    ranks = staged(root, [state])
    parts = staged_parts(changed(state, 1))
    good = parts[1]["norm"]
    parts[1]["norm"] = good.clone()
    parts[1]["norm"].view(torch.int32)[5] ^= 1
    for error in publish(ranks, parts):
        assert isinstance(error, IncompleteError)
        assert error.kind == "replicas-differ"
        assert "'norm'" in str(error)
        assert "ranks 0 and 1" in str(error)
    assert deltafmt.open(root).latest() == 0
    parts[1]["norm"] = good
    assert publish(ranks, parts) == [1, 1, 1]
    assert_holds(root, 1, {name: changed(state, 1)[name] for name in deltafmt.open(root).schema().names})


def test_one_name_with_other_shapes_on_two_ranks_is_refused() -> None:
    ranks = writers(memory_root(), 2)
    for error in anchor(ranks, [{"w": torch.zeros(4)}, {"w": torch.zeros(5)}]):
        assert isinstance(error, SchemaError)
        assert "'w', ranks 0 and 1" in str(error)
    assert anchor(ranks, [{"w": torch.zeros(4)}, {"w": torch.zeros(4)}]) == [0, 0]


def test_an_element_that_no_rank_holds_is_named_on_all_ranks() -> None:
    state = model()
    layouts, parts = tensor_parallel(state, 2)
    holes = [layouts[0], deltafmt.Layout(p for p in layouts[1].placements if p.source != "down")]
    del parts[1]["down"]
    ranks = writers(memory_root(), 2, schema=Schema.of(state), layouts=holes)
    for error in anchor(ranks, parts):
        assert isinstance(error, IncompleteError)
        assert error.kind == "element-unowned"
        assert "'down' (0, 48) to (48, 96)" in str(error)


def test_a_rank_that_fails_is_named_and_the_next_publish_works() -> None:
    root, state = memory_root(), model()
    ranks = staged(root, [state])
    parts = staged_parts(changed(state, 1))
    broken = [parts[0], {"up": torch.zeros(3).to_sparse(), "norm": parts[1]["norm"]}, parts[2]]
    first, second, third = publish(ranks, broken)
    assert isinstance(second, SchemaError)
    for error in (first, third):
        assert isinstance(error, IncompleteError)
        assert (error.kind, error.where) == ("rank-failed", "rank 1")
    assert publish(ranks, parts) == [1, 1, 1]


def test_a_leader_that_fails_tells_the_others() -> None:
    root, state = memory_root(), model()
    ranks = writers(root, 3)
    first, second, third = publish(ranks, staged_parts(state))
    assert isinstance(first, deltafmt.NotFoundError)
    for error in (second, third):
        assert isinstance(error, deltafmt.DeltafmtError)
        assert "publish_anchor" in str(error)
    assert anchor(ranks, staged_parts(state)) == [0, 0, 0]


def test_missing_ranks_are_named() -> None:
    root, state = memory_root(), model()
    ranks = staged(root, [state], options={"rank_timeout_seconds": 0.6})
    parts = staged_parts(changed(state, 1))
    first, second = together([lambda: ranks[0].publish(parts[0]), lambda: ranks[2].publish(parts[2])])
    assert isinstance(first, IncompleteError)
    assert (first.kind, first.where) == ("rank-missing", "rank 1")
    assert isinstance(second, IncompleteError)
    assert deltafmt.open(root).latest() == 0
    for writer in ranks:
        assert writer.version == 0
    assert publish(writers(root, 3), parts) == [1, 1, 1]


def test_ranks_without_their_leader_say_so_and_have_not_moved() -> None:
    root, state = memory_root(), model()
    ranks = staged(root, [state], options={"rank_timeout_seconds": 0.5})
    parts = staged_parts(changed(state, 1))
    for error in together([partial(ranks[k].publish, parts[k]) for k in (1, 2)]):
        assert isinstance(error, IncompleteError)
        assert error.kind == "rank-missing"
        assert str(error.where).startswith("rank 0")
    assert publish(ranks, parts) == [1, 1, 1]


def test_ranks_asked_for_different_steps_are_refused() -> None:
    root, state = memory_root(), model()
    ranks = staged(root, [state])
    parts = staged_parts(changed(state, 1))
    steps = (5, 5, 4)
    found = together([partial(ranks[k].publish, parts[k], step=steps[k]) for k in range(3)])
    assert [error.kind for error in found] == ["rank-failed", "rank-failed", "rank-disagrees"]
    assert "rank 2" in str(found[0])


def test_tensors_may_come_change_and_go_on_any_rank() -> None:
    root, state = memory_root(), model()
    ranks = staged(root, [state])
    grown = {**changed(state, 1), "new": torch.ones(10, 3)}
    parts = [*staged_parts(grown)[:2], {**staged_parts(grown)[2], "new": grown["new"]}]
    assert publish(ranks, parts) == [1, 1, 1]
    assert_holds(root, 1, {name: grown[name] for name in deltafmt.open(root).schema(1).names})
    reshaped = {**changed(grown, 2), "new": torch.zeros(4, 4)}
    parts = [
        *staged_parts(reshaped)[:2],
        {"down": reshaped["down"], "scale": reshaped["scale"], "new": reshaped["new"]},
    ]
    assert publish(ranks, parts) == [2, 2, 2]
    assert_holds(root, 2, {name: reshaped[name] for name in deltafmt.open(root).schema(2).names})
    # A tensor that moves to another rank keeps its bits: its new owner reads what it starts from.
    last = changed(reshaped, 3)
    moved = [whole(last, "embed", "norm", "scale"), whole(last, "norm"), whole(last, "down", "scale", "up")]
    assert publish(ranks, moved) == [3, 3, 3]
    assert "new" not in deltafmt.open(root).schema(3)
    assert_holds(root, 3, {name: last[name] for name in deltafmt.open(root).schema(3).names})
    assert deltafmt.open(root).verify().ok


def test_two_jobs_on_one_root_one_wins_and_the_other_has_changed_nothing() -> None:
    root, state = memory_root(), model()
    states = [changed(state, 1), changed(state, 2)]
    staged(root, [state])
    jobs = [writers(root, 3, options={"job": name}) for name in ("a", "b")]
    calls = [
        partial(w.publish, p)
        for ranks, new in zip(jobs, states, strict=True)
        for w, p in zip(ranks, staged_parts(new), strict=True)
    ]
    found = together(calls)
    won = 0 if found[0] == 1 else 1
    assert found[3 * won : 3 * won + 3] == [1, 1, 1]
    for error in found[3 * (1 - won) :][:3]:
        assert isinstance(error, CommitConflictError)
    assert_holds(root, 1, {name: states[won][name] for name in deltafmt.open(root).schema().names})
    assert [writer.version for writer in jobs[1 - won]] == [None] * 3
    together([writer.resume for writer in jobs[1 - won]])
    assert publish(jobs[1 - won], staged_parts(states[1 - won])) == [2, 2, 2]
    assert_holds(root, 2, {name: states[1 - won][name] for name in deltafmt.open(root).schema().names})


def test_a_restarted_job_goes_on_from_the_newest_version() -> None:
    root = memory_root()
    states = [changed(model(), seed) for seed in range(6)]
    lineage_of(states, 2, root)
    receiver_state = {name: tensor.clone() for name, tensor in states[5].items()}
    receiver = deltafmt.Receiver(root, receiver_state)
    receiver.adopt(5)
    # The trainer restarts from its own step of version 3, on another number of ranks.
    restored = changed(states[3], 9)
    layouts, parts = tensor_parallel(restored, 4)
    ranks = writers(root, 4, schema=Schema.of(restored), layouts=layouts, options={"job": "restarted"})
    assert publish(ranks, parts, step=3) == [6] * 4
    assert deltafmt.open(root).manifest(6).base == 5
    assert_holds(root, 6, restored)
    assert receiver.advance() == 6
    assert all(torch.equal(receiver_state[name], restored[name]) for name in restored)


def test_given_tensors_are_proven_by_the_sum_of_all_ranks() -> None:
    root = memory_root()
    states = [model(), changed(model(), 1)]
    lineage_of(states, 2, root)
    layouts, parts = tensor_parallel(states[1], 3 + 1)
    ranks = writers(root, 4, schema=Schema.of(states[1]), layouts=layouts, options={"job": "b"})
    assert together([partial(w.resume, None, p) for w, p in zip(ranks, parts, strict=True)]) == [1] * 4
    wrong = [{name: tensor.clone() for name, tensor in part.items()} for part in parts]
    wrong[2]["down"].view(torch.int16)[0, 0] ^= 1
    for error in together([partial(w.resume, 1, p) for w, p in zip(ranks, wrong, strict=True)]):
        assert isinstance(error, BaseMismatchError)
        assert "'down'" in str(error)
    assert together([partial(w.resume, 1, p) for w, p in zip(ranks, parts, strict=True)]) == [1] * 4
    new = changed(states[1], 7)
    assert publish(ranks, tensor_parallel(new, 4)[1]) == [2] * 4
    assert_holds(root, 2, new)


def test_ranks_with_different_baselines_are_refused() -> None:
    root, state = memory_root(), model()
    staged(root, [state, changed(state, 1)])
    ranks = writers(root, 3, options={"job": "b"})
    ranks[1].resume()
    staged_again = writers(root, 3, options={"job": "c"})
    assert publish(staged_again, staged_parts(changed(state, 2))) == [2, 2, 2]
    for writer in (ranks[0], ranks[2]):
        writer.resume()
    for error in publish(ranks, staged_parts(changed(state, 3))):
        assert isinstance(error, BaseMismatchError)
        assert "rank 1" in str(error) or error.found == "version 1"
    together([writer.resume for writer in ranks])
    assert publish(ranks, staged_parts(changed(state, 3))) == [3, 3, 3]


def test_masters_in_fp32_are_published_as_their_cast_through_layouts() -> None:
    root, state = memory_root(), model()
    schema = Schema.of(state)
    layouts, parts = tensor_parallel(state, 2)
    masters = [
        {name: t.float() + 1e-4 if t.dtype == torch.bfloat16 else t for name, t in part.items()}
        for part in parts
    ]
    ranks = writers(root, 2, schema=schema, layouts=layouts, publish_dtype="bfloat16")
    assert anchor(ranks, masters) == [0, 0]
    read = deltafmt.open(root).read(0)
    rows = masters[1]["fused"][:48].bfloat16()
    assert torch.equal(read["up"][48:], rows)
    assert torch.equal(read["down"][:, 48:], masters[1]["down"].bfloat16())
    without = writers(memory_root(), 2, schema=schema, layouts=layouts)
    assert {type(error) for error in anchor(without, masters)} <= {LayoutError, IncompleteError}


def test_publishing_in_the_background_by_all_ranks() -> None:
    root, state = memory_root(), model()
    ranks = staged(root, [state])
    new = changed(state, 1)
    parts = [{name: tensor.clone() for name, tensor in part.items()} for part in staged_parts(new)]
    pending = together([partial(w.publish_async, p) for w, p in zip(ranks, parts, strict=True)])
    for part in parts:
        for tensor in part.values():
            tensor.zero_()
    assert [p.result() for p in pending] == [1, 1, 1]
    assert_holds(root, 1, {name: new[name] for name in deltafmt.open(root).schema().names})
    newer = changed(new, 2)
    assert publish(ranks, staged_parts(newer)) == [2, 2, 2]
    assert_holds(root, 2, {name: newer[name] for name in deltafmt.open(root).schema().names})


def test_an_anchor_without_data_needs_all_ranks_digests_only() -> None:
    root, state = memory_root(), model()
    ranks = writers(root, 3)
    parts = staged_parts(state)
    calls = [
        partial(w.publish_anchor, p, store_data=False, meta={"hint": "elsewhere"})
        for w, p in zip(ranks, parts, strict=True)
    ]
    assert together(calls) == [0, 0, 0]
    assert len(deltafmt.open(root).manifest(0).shards) == 0
    live = {name: tensor.clone() for name, tensor in state.items()}
    receiver = deltafmt.Receiver(root, live)
    assert receiver.adopt(0) == 0
    assert publish(ranks, staged_parts(changed(state, 1))) == [1, 1, 1]
    assert receiver.advance() == 1
    assert torch.equal(live["up"], changed(state, 1)["up"])


def test_what_a_writer_cannot_be_asked_for() -> None:
    with pytest.raises(TypeError, match="process group"):
        deltafmt.Writer(memory_root(), group=object())
    with pytest.raises(ValueError, match="rank 2 of 2"):
        deltafmt.Writer(memory_root(), rank=2, world_size=2)


def test_ranks_add_anchors_by_themselves() -> None:
    root = memory_root()
    states = [changed(model(), seed) for seed in range(6)]
    layouts, parts = tensor_parallel(states[0], 2)
    ranks = writers(root, 2, schema=Schema.of(states[0]), layouts=layouts, options={"anchor_every": 2})
    # Rank 0's options count.
    ranks[1] = writers(root, 2, schema=Schema.of(states[0]), layouts=layouts)[1]
    assert anchor(ranks, parts) == [0, 0]
    for version, state in enumerate(states[1:], 1):
        assert publish(ranks, tensor_parallel(state, 2)[1]) == [version, version]
    lineage = deltafmt.open(root)
    assert [info.ways for info in lineage.log()] == [(None,), (0,), (1, None), (2,), (3, None), (4,)]
    anchors = [lineage.history.further_way(version, None).manifest for version in (2, 4)]
    assert [way.shards.writer.tolist() for way in anchors] == [[0, 1], [0, 1]]
    lineage.gc(keep_last=1, grace_seconds=0.0, dry_run=False)
    assert_holds(root, 5, states[5])
    assert deltafmt.open(root).verify().ok


def test_a_rank_that_cannot_do_its_part_of_an_anchor_leaves_the_version_as_it_is() -> None:
    name, state = secrets.token_hex(8), model()
    stores = faulty_stores("anchorless")
    root = f"memory://{name}"
    ranks = writers(f"anchorless://{name}", 3, options={"anchor_every": 1})
    assert anchor(ranks, staged_parts(state)) == [0, 0, 0]
    stores[1].inject(
        failing(StoreError("away", kind="store-unreachable")), verb="open_sink", key="ways-data/"
    )
    for version in (1, 2):
        assert publish(ranks, staged_parts(changed(state, version))) == [version] * 3
    lineage = deltafmt.open(root)
    assert [info.ways for info in lineage.log()] == [(None,), (0,), (1, None)]
    assert not [key for key in lineage.history.store.list("ways-data") if "00000001/" in key]


def test_one_process_may_hold_its_tensors_through_a_layout() -> None:
    root = memory_root()
    states = [changed(model(), seed) for seed in range(4)]
    layouts, parts = tensor_parallel(states[0], 1)
    options = deltafmt.WriterOptions(anchor_every=2)
    writer = deltafmt.Writer(root, schema=Schema.of(states[0]), layout=layouts[0], options=options)
    assert writer.publish_anchor(parts[0]) == 0
    for version, state in enumerate(states[1:3], 1):
        assert writer.publish(tensor_parallel(state, 1)[1][0]) == version
    again = deltafmt.Writer(root, schema=Schema.of(states[0]), layout=layouts[0])
    assert again.resume(named_tensors=tensor_parallel(states[2], 1)[1][0]) == 2
    assert again.publish(tensor_parallel(states[3], 1)[1][0]) == 3
    for version, state in enumerate(states):
        assert_holds(root, version, state)
    assert [info.ways for info in deltafmt.open(root).log()] == [(None,), (0,), (1, None), (2,)]
    holes = deltafmt.Layout(p for p in layouts[0].placements if p.source != "down")
    del parts[0]["down"]
    with pytest.raises(IncompleteError, match="down"):
        deltafmt.Writer(memory_root(), schema=Schema.of(states[0]), layout=holes).publish_anchor(parts[0])


def faulty_stores(protocol: str) -> list[FaultyStore]:
    """The stores that are opened by a protocol over this process's memory, in order."""
    stores: list[FaultyStore] = []

    def opened(path: str, _: object) -> FaultyStore:
        stores.append(FaultyStore(MemoryStore.named(path)))
        return stores[-1]

    register_protocol(protocol, opened)
    return stores


def test_a_straggler_of_an_older_attempt_is_named_by_no_manifest() -> None:
    name, state = secrets.token_hex(8), model()
    stores = faulty_stores("slow")
    root = f"memory://{name}"
    ranks = writers(f"slow://{name}", 3, options={"rank_timeout_seconds": 1.5})
    assert anchor(ranks, staged_parts(state)) == [0, 0, 0]
    parts = staged_parts(changed(state, 1))
    stores[1].inject(delayed(3.0), verb="close", key="data/")
    first, second, third = publish(ranks, parts)
    assert (first.kind, first.where) == ("rank-missing", "rank 1")
    assert (second.kind, third.kind) == ("rank-missing", "rank-missing")
    assert deltafmt.open(root).latest() == 0
    newer = changed(state, 2)
    assert publish(ranks, staged_parts(newer)) == [1, 1, 1]
    manifest = deltafmt.open(root).manifest(1)
    late = [
        c.key for c in stores[1].log if c.verb == "close" and c.key.startswith("data/00000000000000000001")
    ]
    assert len(late) == 2
    assert late[0] not in manifest.shard_keys
    assert late[1] in manifest.shard_keys
    assert_holds(root, 1, {name: newer[name] for name in deltafmt.open(root).schema().names})


def test_a_rank_reads_and_writes_its_share() -> None:
    name, stores = secrets.token_hex(8), faulty_stores("counted")
    random = torch.Generator().manual_seed(1)
    shape = (1024, 256)
    state = {f"w{k}": torch.randn(shape, generator=random).bfloat16() for k in range(4)}
    assert anchor(writers(f"counted://{name}", 4), [{k: state[k]} for k in state]) == [0] * 4
    sizes = deltafmt.open(f"memory://{name}").manifest(0).shards.size
    assert max(sizes) < 1.1 * min(sizes)
    stores.clear()
    again = writers(f"counted://{name}", 4, options={"job": "again"})
    assert publish(again, [{k: state[k] + 1} for k in state]) == [1] * 4
    for store in stores:
        read = sum(
            (c.stop or 0) - (c.start or 0) for c in store.log if c.verb == "read_range" and "data/" in c.key
        )
        assert read <= 1.01 * max(sizes), "one rank's part of the base, of which it is a fourth"


@pytest.mark.parametrize("times", [1, 1000])
def test_a_rank_that_misreads_the_manifest_leaves_its_shard(times: int) -> None:
    """Of a version that is there, nothing may go because one rank's reads are spoiled, once or for good."""
    name, state = secrets.token_hex(8), model()
    stores = faulty_stores(f"misread{times}")
    root = f"memory://{name}"
    ranks = writers(f"misread{times}://{name}", 3, options={"rank_timeout_seconds": 2.0})
    assert anchor(ranks, staged_parts(state)) == [0, 0, 0]
    new = changed(state, 1)
    stores[1].inject(flipped(30), verb="read_all", key="versions/00000000000000000001", times=times)
    first, second, third = publish(ranks, staged_parts(new))
    assert (first, third) == (1, 1)
    assert second == 1 if times == 1 else second.kind == "rank-missing"
    assert_holds(root, 1, {name: new[name] for name in deltafmt.open(root).schema().names})
    assert deltafmt.open(root).verify().ok


@pytest.mark.parametrize(("rank", "told"), [(0, False), (2, True)])
def test_a_rank_that_would_publish_alone_is_told(
    rank: int, told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Under torchrun a writer without a rank is somebody else's competitor, unless it is rank 0's only one."""
    import torch.distributed as dist

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    with deltafmt.Writer(memory_root()) as writer:
        assert writer.publish_anchor({"w": torch.zeros(3)}) == 0
    assert ("rank 2 of the 4" in caplog.text) == told
