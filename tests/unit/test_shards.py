from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import deltafmt
from deltafmt.errors import LayoutError, SchemaError
from deltafmt.layout import TargetInfo
from deltafmt.shard_boxes import Slicing, flat_boxes, held_boxes, held_shape
from tests.ranks import assert_holds, memory_root


def assembled(shape: tuple[int, ...], slicings: list[Slicing]) -> np.ndarray:
    """The local tensor, out of the boxes that it is said to hold of numbered elements."""
    whole = np.arange(np.prod(shape)).reshape(shape)
    local = np.full(held_shape(shape, slicings), -1)
    for box, at in held_boxes(shape, slicings):
        place = tuple(slice(a, a + n) for a, n in zip(at, box.shape, strict=True))
        local[place] = whole[box.slices()]
    return local


@pytest.mark.parametrize("shape", [(9,), (8, 3), (2, 7), (1, 5), (0, 4)])
@pytest.mark.parametrize(("first", "second"), [*itertools.product([1, 2, 3], [1, 2, 5])])
@pytest.mark.parametrize("factor", [1, 2, 3])
def test_parts_are_cut_as_torch_cuts_them(
    shape: tuple[int, ...], first: int, second: int, factor: int
) -> None:
    numbers = torch.arange(int(np.prod(shape))).reshape(shape)
    for dim in range(len(shape)):
        outer = _StridedShard(dim, split_factor=factor)
        parts, _ = outer._split_tensor(numbers, first, with_padding=False)
        for i, j in itertools.product(range(first), range(second)):
            own, _ = Shard(dim)._split_tensor(parts[i], second, with_padding=False)
            expected = own[j] if j < len(own) else parts[i].narrow(dim, 0, 0)
            slicings = [
                Slicing(dim=dim, parts=first, index=i, factor=factor),
                Slicing(dim=dim, parts=second, index=j),
            ]
            assert np.array_equal(assembled(shape, slicings), expected.numpy())


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (2, 1, 3)])
def test_a_flat_range_is_its_boxes_in_order(shape: tuple[int, ...]) -> None:
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    for start, stop in itertools.combinations_with_replacement(range(whole.size + 1), 2):
        boxes = list(flat_boxes(shape, start, stop))
        found = [whole[box.slices()].reshape(-1) for box in boxes]
        assert [*itertools.chain(*found)] == list(range(start, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1))
    dist.destroy_process_group()


def test_distributed_tensors_of_one_rank(mesh: DeviceMesh) -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "cut": DTensor.from_local(weight.clone(), mesh, [Shard(1), Shard(0)]),
        "whole": DTensor.from_local(weight.t(), mesh, [Replicate(), Replicate()]),
        "plain": torch.zeros(2),
    }
    tensors["tied"] = tensors["cut"].detach()
    shards = deltafmt.shards_of(tensors)
    assert shards.schema["tied"].alias_of == "cut"
    assert shards.tensors.keys() == {"cut", "whole", "plain"}
    shards.layout.validate(shards.schema, {n: TargetInfo.of(t) for n, t in shards.tensors.items()})
    root = memory_root()
    writer = deltafmt.Writer(root)
    writer.publish_anchor(tensors)
    cut = tensors["cut"]
    assert isinstance(cut, DTensor)
    cut.to_local()[1, 1] = -1
    assert writer.publish(tensors) == 1
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    assert_holds(root, 1, {name: tensor.contiguous() for name, tensor in full.items()})


def test_what_is_no_plain_part_is_refused(mesh: DeviceMesh) -> None:
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial(), Replicate()])
    with pytest.raises(LayoutError) as refused:
        deltafmt.shards_of({"p": partial})
    assert refused.value.kind == "shard-unknown"
    odd = DTensor.from_local(torch.ones(3), mesh, [Shard(0), Replicate()], shape=torch.Size([5]), stride=(1,))
    with pytest.raises(LayoutError) as refused:
        deltafmt.shards_of({"odd": odd})
    assert (refused.value.kind, refused.value.expected) == ("shard-unknown", (5,))
    writer = deltafmt.Writer(memory_root())
    with pytest.raises(LayoutError):
        writer.publish_anchor({"p": partial})
    assert writer.publish_anchor({"p": torch.ones(3)}) == 0


def test_a_module_without_shards_is_its_state(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    model[2].weight = model[0].weight
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    root = memory_root()
    writer = deltafmt.Writer(root)
    assert writer.publish_anchor(deltafmt.shards_of(model)) == 0
    assert deltafmt.open(root).read().keys() == model.state_dict().keys()
    assert deltafmt.open(root).schema()["2.weight"].alias_of == "0.weight"
    with pytest.raises(TypeError):
        writer.publish(model)  # type: ignore[arg-type]


def test_shards_and_a_layout_exclude_each_other() -> None:
    shards = deltafmt.shards_of({"w": torch.zeros(2)})
    writer = deltafmt.Writer(memory_root(), schema=shards.schema, layout=shards.layout)
    with pytest.raises((LayoutError, SchemaError)) as refused:
        writer.publish_anchor(shards)
    assert refused.value.kind == "schema-differs"
    assert writer.publish_anchor(shards.tensors) == 0
