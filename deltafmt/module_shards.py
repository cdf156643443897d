"""A module's parameters and persistent buffers as this rank holds them, sharded by FSDP or not at all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from deltafmt.addresses import contiguous_strides
from deltafmt.errors import LayoutError
from deltafmt.geometry import Box
from deltafmt.layout import Placement
from deltafmt.schema import TensorSpec
from deltafmt.shard_boxes import flat_boxes
from deltafmt.shards import Collected
from deltafmt.tensors import dtype_name

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""What modules that wrap others put into names."""


def collect(model: torch.nn.Module, found: Collected) -> None:
    """Add all that the module has, under the names that it had before it was wrapped; nothing is gathered."""
    flat: set[int] = set()
    for module in model.modules():
        sharded: Any = module
        if _is(sharded, "torch.distributed.fsdp", "FSDPModule"):
            # After a pass without a backward one, parameters may still be whole.
            sharded.reshard()
    for prefix, handle in _handles(model):
        flat |= _add_flat(prefix, handle, found)
    for name, tensor in _own_tensors(model):
        name = _clean(name)
        if id(tensor) not in flat and name not in found.specs:
            found.add(name, tensor)


def _own_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers, those with several names once for each, module by module."""
    for path, module in model.named_modules(remove_duplicate=False):
        start = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield start + name, parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield start + name, buffer


def _handles(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if _is(module, "torch.distributed.fsdp", "FullyShardedDataParallel") and module._handle is not None:
            yield _clean(f"{path}.") if path else "", module._handle


def _add_flat(prefix: str, handle: Any, found: Collected) -> set[int]:
    """Add the parameters of which this rank's part of a flat one consists; returns who stands for them."""
    flat = handle.flat_param
    sharded = bool(handle.uses_sharded_strategy)
    if sharded and handle.is_sharded(flat):
        local, first = flat.detach(), handle.rank * flat._sharded_size[0]
    elif sharded:
        # The whole is there for a while; what the optimizer works on is the shard.
        local, first = flat._local_shard.detach(), handle.rank * flat._sharded_size[0]
    else:
        local, first = flat.detach(), 0
    target = f"{prefix}flat parameter"
    found.tensors[target] = local
    end = 0
    for numel, shape, name, offset in _rows(prefix, flat):
        end = _fill(found, target, local, first, end, offset)
        found.specs[name] = TensorSpec(name, dtype_name(local), shape)
        start, stop = max(first, offset), min(first + local.numel(), offset + numel)
        strides = contiguous_strides(shape)
        for box in flat_boxes(shape, start - offset, stop - offset):
            inside = sum(a * s for a, s in zip(box.start, strides, strict=True))
            found.placements.append(Placement(name, box, target, inside + offset - first, strides))
        end = offset + numel
    _fill(found, target, local, first, end, first + local.numel())
    for info in flat._shared_param_infos:
        name = _joined(prefix, info.module_name, info.param_name)
        owner = found.specs[_joined(prefix, info.prim_module_name, info.prim_param_name)]
        found.specs[name] = TensorSpec(name, owner.dtype, owner.shape, owner.name)
    return {id(flat), *map(id, flat._params or ()), *map(id, flat._shared_params or ())}


def _rows(prefix: str, flat: Any) -> Iterator[tuple[int, tuple[int, ...], str, int]]:
    """(elements, shape, name, first element) of each parameter in a flat one."""
    offset, row = 0, 0
    for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not padding:
            name = _clean(prefix + flat._fqns[row])
            if flat._param_extensions[row] is not None or not flat._contiguities[row]:
                raise LayoutError(
                    "a parameter that was sharded, or not contiguous, before it was flattened; use fully_shard",
                    kind="shard-unknown",
                    where=repr(name),
                )
            yield numel, tuple(flat._shapes[row]), name, offset
            row += 1
        offset += numel


def _fill(found: Collected, target: str, local: torch.Tensor, first: int, start: int, stop: int) -> int:
    """Declare the padding `[start, stop)` of the whole, as far as this rank has it."""
    low, high = max(start - first, 0), min(stop - first, local.numel())
    if low < high:
        found.untouched.append((target, Box((low,), (high,))))
    return stop


def _joined(prefix: str, module: str, parameter: str) -> str:
    return _clean(prefix + (f"{module}.{parameter}" if module else parameter))


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _is(module: object, home: str, name: str) -> bool:
    # A process that has not imported it has none.
    kind = getattr(sys.modules.get(home), name, None)
    return kind is not None and isinstance(module, kind)
