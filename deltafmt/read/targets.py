"""Local tensors that are written in place: what a layout sees of them, and which share memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter, eq
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltafmt.errors import LayoutError, UnsupportedError
from deltafmt.given import named_pairs
from deltafmt.layout import Layout, Placement, TargetInfo
from deltafmt.layout_check import find_clash
from deltafmt.schema import Schema
from deltafmt.tensors import NamedTensors, bits, dtype_name, named, torch_dtype


@dataclass(frozen=True, slots=True)
class Memory:
    """A piece of memory that one or more targets show, as one flat tensor.

    `first` is the address of its lowest element; `members` maps each target to the number of the flat
    element at which its first one stands.
    """

    first: int
    info: TargetInfo
    members: dict[str, int]


class Targets:
    """Named local tensors, kept alive and written in place; they must stay where they are in memory.

    Raises `UnsupportedError` for a device that cannot be written to, `LayoutError` for read-only arrays.
    """

    def __init__(self, named_tensors: NamedTensors) -> None:
        self.tensors = _given(named_tensors)
        self.on_cpu = all(self._each("is_cpu"))
        """Whether all are in this process's main memory."""
        self._check_kinds()
        self.contiguous = all(map(torch.Tensor.is_contiguous, self.tensors.values()))
        start = self._first_bytes = self._current()
        self._check_memory(start)
        self._groups = self._meeting(start)
        self.names: tuple[str, ...] = tuple(self.tensors)
        """Memory by memory, the first of the names that show it."""
        self.addresses: npt.NDArray[np.int64] = start
        """Of each memory's lowest element."""
        if self._groups:
            row = {name: k for k, name in enumerate(self.tensors)}
            self.names = tuple(names[0] for names in self._groups)
            self.addresses = np.array(
                [start[[row[n] for n in names]].min() for names in self._groups], np.int64
            )

    def _check_kinds(self) -> None:
        """Raise for tensors that cannot be written to."""
        # One question to all tensors after another: a loop that asks each of them everything is what opening a
        # large model would wait for.
        tensors = self.tensors
        is_strided = set(self._each("layout")) <= {torch.strided}
        if not is_strided or (not self.on_cpu and any(self._each("is_meta"))):
            name = next(
                n for n, tensor in tensors.items() if tensor.is_meta or tensor.layout is not torch.strided
            )
            raise UnsupportedError(
                "a tensor without memory of its own, or a sparse one, cannot be written to",
                kind="device-unsupported",
                where=f"{name!r}, {tensors[name].layout} on {tensors[name].device}",
            )
        if any(map(torch.Tensor.is_conj, tensors.values())) or any(
            map(torch.Tensor.is_neg, tensors.values())
        ):
            name = next(n for n, tensor in tensors.items() if tensor.is_conj() or tensor.is_neg())
            raise LayoutError("a lazy view cannot be a target", kind="target-strides", where=repr(name))

    def _check_memory(self, start: npt.NDArray[np.int64]) -> None:
        """Raise `UnsupportedError` for elements that are nowhere: of wrappers around tensors, or given back."""
        for row in np.flatnonzero(start == 0).tolist():
            name, tensor = list(self.tensors.items())[row]
            if tensor.numel():
                raise UnsupportedError(
                    "a tensor whose elements are not in memory cannot be written to",
                    kind="device-unsupported",
                    where=f"{name!r}, a {type(tensor).__name__} on {tensor.device}",
                )

    def check_in_place(self) -> None:
        """Raise `LayoutError` if a tensor's memory was exchanged: what is there now is not what was given."""
        moved = self._current() != self._first_bytes
        if moved.any():
            raise LayoutError(
                "a local tensor has moved in memory; open a new receiver",
                kind="target-moved",
                where=repr(list(self.tensors)[int(moved.argmax())]),
            )

    def _current(self) -> npt.NDArray[np.int64]:
        places = map(torch.Tensor.data_ptr, self.tensors.values())
        return np.fromiter(places, np.int64, len(self.tensors))

    @cached_property
    def infos(self) -> dict[str, TargetInfo]:
        """What a layout is validated against."""
        return {
            name: TargetInfo(dtype_name(tensor), tuple(tensor.shape), tensor.stride())
            for name, tensor in self.tensors.items()
        }

    @cached_property
    def memories(self) -> tuple[Memory, ...]:
        """Memory by memory, as in `names`."""
        return tuple(self._memory(names) for names in self._groups or [[name] for name in self.tensors])

    @cached_property
    def foreign(self) -> npt.NDArray[np.bool_]:
        """Which memories are not in this process's main memory."""
        if self.on_cpu:
            return np.zeros(len(self.names), bool)
        return np.array([not self.tensors[name].is_cpu for name in self.names], bool)

    @cached_property
    def flats(self) -> list[torch.Tensor | None] | None:
        """The foreign memories as flat integer tensors (None for others); None where there are none."""
        if not self.foreign.any():
            return None
        flats: list[torch.Tensor | None] = []
        for name, info, foreign in zip(
            self.names, self.memory_infos.values(), self.foreign.tolist(), strict=True
        ):
            tensor = self.tensors[name]
            flats.append(bits(tensor).as_strided((info.span,), (1,)) if foreign else None)
        return flats

    def synchronize(self) -> None:
        """Wait until what was written is there for everybody."""
        if self.flats is not None:
            from deltafmt.kernels.torch_backend import synchronize

            for device in {flat.device: flat for flat in self.flats if flat is not None}.values():
                synchronize(device)

    @cached_property
    def _home(self) -> dict[str, Memory]:
        return {name: memory for memory in self.memories for name in memory.members}

    def fit(self, schema: Schema) -> bool:
        """Whether each target is, in full and by itself, a stored tensor of its name: nothing then is left
        to be checked.
        """
        if self._groups or not self.contiguous:
            return False
        rows = [row for row in map(schema.rows.get, self.tensors) if row is not None]
        if len(rows) != len(self.tensors):
            return False
        dtypes = {name: torch_dtype(name) for name in set(schema.dtypes)}
        # Compared one by one: a list of 20,000 shapes is what sets the garbage collector going.
        same_shape = map(eq, self._each("shape"), map(schema.shapes.__getitem__, rows))
        wanted = map(dtypes.__getitem__, map(schema.dtypes.__getitem__, rows))
        same_dtype = map(eq, self._each("dtype"), wanted)
        return all(same_shape) and all(same_dtype)

    def _each(self, attribute: str) -> Iterator[Any]:
        return map(attrgetter(attribute), self.tensors.values())

    @property
    def memory_infos(self) -> dict[str, TargetInfo]:
        """The memories as targets of a layout that `resolve` has returned."""
        return dict(zip(self.names, (memory.info for memory in self.memories), strict=True))

    def resolve(self, layout: Layout | None, schema: Schema) -> Layout:
        """The layout (None: each target is filled by the stored tensor of its name), validated, in terms of
        owners and memories, so that tied names on both sides are one thing.

        Raises `LayoutError` unless every element of every target is filled exactly once, or untouched.
        """
        if layout is None:
            layout = Layout.by_name(schema, self.infos)
            self._check_shapes(schema)
        layout.validate(schema, self.infos)
        shared = [memory for memory in self.memories if len(memory.members) > 1]
        placements = [self._rebased(p, schema) for p in layout.placements]
        by_memory: dict[str, list[Placement]] = defaultdict(list)
        for placement in placements:
            by_memory[placement.target].append(placement)
        for memory in shared:
            clash = find_clash(by_memory[next(iter(memory.members))], schema)
            if clash is not None:
                raise LayoutError(
                    "local tensors share memory, and different elements are placed there",
                    kind="placement-overlap",
                    where=f"{_names(memory)}; one of them from {clash.source!r}",
                )
        casts = {}
        for memory in self.memories:
            found = {layout.casts.get(name) for name in memory.members}
            if len(found) > 1:
                raise LayoutError(
                    "a cast is declared for one name of a tensor and not for another",
                    kind="dtype-mismatch",
                    where=_names(memory),
                )
            if None not in found:
                casts[next(iter(memory.members))] = str(found.pop())
        return Layout(dict.fromkeys(placements), casts=casts)

    def _rebased(self, p: Placement, schema: Schema) -> Placement:
        memory = self._home[p.target]
        shape = schema[p.source].shape
        # Where a dimension has one index its stride says nothing; equal placements then look equal.
        strides = tuple(0 if extent == 1 else stride for extent, stride in zip(shape, p.strides, strict=True))
        return Placement(
            schema.resolve(p.source).name,
            p.source_box,
            next(iter(memory.members)),
            memory.members[p.target] + p.offset,
            strides,
        )

    def _check_shapes(self, schema: Schema) -> None:
        for name, info in self.infos.items():
            if schema[name].shape != info.shape:
                raise LayoutError(
                    "local tensor has another shape than the stored one",
                    kind="shape-mismatch",
                    where=repr(name),
                    expected=schema[name].shape,
                    found=info.shape,
                )

    def _meeting(self, start: npt.NDArray[np.int64]) -> list[list[str]]:
        """All names, those whose address ranges meet together; empty where none do."""
        names = list(self.tensors)
        if self.contiguous:
            sizes = list(self._each("nbytes"))
        else:
            sizes = [_span_bytes(name, tensor) for name, tensor in self.tensors.items()]
        stop = start + np.array(sizes, np.int64)
        if not self.on_cpu:
            # Equal addresses on two devices are two places.
            devices = {device: n for n, device in enumerate(set(self._each("device")))}
            shift = np.array([devices[device] << 56 for device in self._each("device")], np.int64)
            start, stop = start + shift, stop + shift
        # Empty tensors have no address worth the name: each is a memory of its own.
        full = np.flatnonzero(start < stop)
        order = full[np.argsort(start[full], kind="stable")]
        meets = start[order][1:] < np.maximum.accumulate(stop[order])[:-1]
        if not meets.any():
            return []
        groups = [[names[row]] for row in np.flatnonzero(start >= stop).tolist()]
        for row, joined in zip(order.tolist(), [False, *meets.tolist()], strict=True):
            if joined:
                groups[-1].append(names[row])
            else:
                groups.append([names[row]])
        return groups

    def _memory(self, names: list[str]) -> Memory:
        if len(names) == 1:
            return Memory(self.tensors[names[0]].data_ptr(), self.infos[names[0]], {names[0]: 0})
        first = min(self.tensors[name].data_ptr() for name in names)
        size = self.tensors[names[0]].element_size()
        members = {}
        for name in names:
            shift = self.tensors[name].data_ptr() - first
            if self.infos[name].dtype != self.infos[names[0]].dtype or shift % size:
                raise LayoutError(
                    "local tensors of different element types share memory",
                    kind="target-strides",
                    where=f"{names[0]!r} and {name!r}",
                )
            members[name] = shift // size
        span = max(shift + self.infos[name].span for name, shift in members.items())
        return Memory(first, TargetInfo(self.infos[names[0]].dtype, (span,), (1,)), members)


def _given(named_tensors: NamedTensors) -> dict[str, torch.Tensor]:
    if not isinstance(named_tensors, Mapping):
        named_tensors = list(named_pairs(named_tensors))
    tensors = named(named_tensors)
    for name, tensor in _arrays(named_tensors):
        if not tensor.flags.writeable:
            raise LayoutError("a read-only array cannot be a target", kind="target-strides", where=repr(name))
    return tensors


def _arrays(named_tensors: NamedTensors) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    if isinstance(named_tensors, Mapping):
        if set(map(type, named_tensors.values())) <= {torch.Tensor}:
            return
        named_tensors = named_tensors.items()
    yield from ((name, array) for name, array in named_tensors if isinstance(array, np.ndarray))


def _span_bytes(name: str, tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last one in memory."""
    if not tensor.is_contiguous() and min(tensor.stride()) < 0:
        raise LayoutError("negative strides are not supported", kind="target-strides", where=repr(name))
    return TargetInfo("", tuple(tensor.shape), tensor.stride()).span * tensor.element_size()


def _names(memory: Memory) -> str:
    return " and ".join(map(repr, memory.members))
