"""What one rank of a sharded model holds, in canonical coordinates, from torch's own sharded objects."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from deltafmt.errors import LayoutError
from deltafmt.geometry import Box
from deltafmt.layout import Layout, Placement
from deltafmt.schema import Schema, TensorSpec
from deltafmt.shard_boxes import Slicing, held_boxes, held_shape
from deltafmt.tensors import NamedTensors, dtype_name, named


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """One rank's local tensors (not copied), the canonical tensors that they are parts of, and where.

    A `Writer` takes it in place of named tensors.
    """

    schema: Schema
    layout: Layout
    tensors: dict[str, torch.Tensor]


def shards_of(tensors: NamedTensors | torch.nn.Module) -> Shards:
    """What this rank holds of named tensors, or of a module's parameters and persistent buffers.

    Distributed tensors (`DTensor`, as `fully_shard` and tensor parallelism make them) count as the parts that
    this rank has of them, cut along any dimensions of any mesh; every other tensor counts as a whole one. Of
    modules wrapped in `FullyShardedDataParallel` the flat parameters are looked into, whether or not with
    `use_orig_params`; so give the module then, since its `state_dict` would gather. Nothing is communicated,
    nothing is copied. Raises `LayoutError` (`shard-unknown`) for what is no plain part of a tensor, such as a
    sum that is still spread over ranks.

    >>> shards = shards_of(torch.nn.Linear(2, 3))
    >>> shards.layout.placements[0].source_box
    Box(start=(0, 0), stop=(3, 2))
    """
    found = Collected()
    if isinstance(tensors, torch.nn.Module):
        from deltafmt.module_shards import collect

        collect(tensors, found)
    else:
        for name, tensor in named(tensors).items():
            found.add(name, tensor)
    return found.shards()


def is_distributed(tensor: object) -> bool:
    """Whether this is a `DTensor`."""
    # A process that has not imported it has none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


@dataclass(kw_only=True)
class Collected:
    """Parts of tensors, as they are found one by one."""

    specs: dict[str, TensorSpec] = field(default_factory=dict)
    placements: list[Placement] = field(default_factory=list)
    untouched: list[tuple[str, Box]] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _names: dict[tuple[object, ...], str] = field(default_factory=dict)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """A whole tensor, or a distributed one; a second name of the same memory is an alias."""
        tensor = tensor.detach()
        shape, dtype = tuple(tensor.shape), dtype_name(tensor)
        local, slicings = _local(name, tensor)
        # An empty part has no address, but still a storage of its own.
        place = (
            local.data_ptr() if local.numel() else (local.untyped_storage()._cdata, local.storage_offset())
        )
        key = (place, tuple(local.stride()), shape, dtype)
        owner = self._names.setdefault(key, name) if tensor.numel() else name
        self.specs[name] = TensorSpec(name, dtype, shape, None if owner == name else owner)
        if owner != name or slicings is None:
            return
        self.tensors[name] = local
        strides = tuple(local.stride())
        for box, at in held_boxes(shape, slicings):
            offset = sum(a * s for a, s in zip(at, strides, strict=True))
            self.placements.append(Placement(name, box, name, offset, strides))

    def shards(self) -> Shards:
        """All of it."""
        layout = Layout(self.placements, untouched=self.untouched)
        return Shards(schema=Schema(self.specs.values()), layout=layout, tensors=self.tensors)


def _local(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, list[Slicing] | None]:
    """The part that this rank has, and how it was cut out of the whole; None where the rank is not in the mesh."""
    if not is_distributed(tensor):
        return tensor, []
    distributed: Any = tensor
    local = distributed.to_local()
    # A collective that is under way hides behind a tensor class of its own.
    local = local.wait() if hasattr(local, "wait") else local
    mesh = distributed.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return local, None
    slicings = list(_slicings(name, distributed.placements, mesh.shape, coordinate))
    expected = held_shape(tuple(tensor.shape), slicings)
    if tuple(local.shape) != expected:
        raise LayoutError(
            "this rank's part has another shape than its mesh and placements say",
            kind="shard-unknown",
            where=f"{name!r} {tuple(distributed.placements)} of {tuple(tensor.shape)}",
            expected=expected,
            found=tuple(local.shape),
        )
    return local, slicings


def _slicings(
    name: str, placements: Iterable[Any], mesh: Iterable[int], coordinate: Iterable[int]
) -> Iterator[Slicing]:
    from torch.distributed.tensor import Replicate, Shard, placement_types

    strided = getattr(placement_types, "_StridedShard", ())
    for placement, parts, index in zip(placements, mesh, coordinate, strict=True):
        if isinstance(placement, strided):
            factor = int(placement.split_factor)
            yield Slicing(dim=placement.dim, parts=parts, index=index, factor=factor)
        elif isinstance(placement, Shard):
            yield Slicing(dim=placement.dim, parts=parts, index=index)
        elif not isinstance(placement, Replicate):
            raise LayoutError(
                "only shards and replicas can be published; redistribute the tensor first",
                kind="shard-unknown",
                where=repr(name),
                found=placement,
            )


def any_distributed(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether some of the tensors are `DTensor`s."""
    return any(map(is_distributed, tensors.values()))
