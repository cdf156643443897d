"""What a rank of a model-parallel trainer holds, from a few declarations."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from deltafmt.errors import LayoutError
from deltafmt.geometry import Box
from deltafmt.layout_builder import LayoutBuilder
from deltafmt.schema import Schema, TensorSpec
from deltafmt.shards import Shards
from deltafmt.tensors import NamedTensors, dtype_name, named


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    source: str
    box: Box
    target: str
    at: tuple[int, ...]


class ShardBuilder:
    """Collects what canonical tensors one rank's tensors are parts of, as Megatron and its like hold them.

    `rank` and `world` are its place among the ranks that share tensors (tensor parallelism). Other ranks may hold
    other tensors (pipeline and expert parallelism): `first` gives, for each list of modules, the global number
    of what this rank calls 0, and wherever a canonical name stands, `layers.0` and the like are counted from
    there. Canonical shapes follow from local ones. Verbs return the builder; a name left out is the local one.

    >>> tensors = {"layers.0.up": torch.zeros(6, 4), "layers.0.norm": torch.ones(4)}
    >>> builder = ShardBuilder(tensors, rank=1, world=2, first={"layers": 8})
    >>> builder.column("layers.0.up").whole().build().schema["layers.8.up"].shape
    (12, 4)
    """

    def __init__(
        self,
        tensors: NamedTensors,
        *,
        rank: int = 0,
        world: int = 1,
        first: Mapping[str, int] | None = None,
    ) -> None:
        if not 0 <= rank < world:
            raise LayoutError(
                "rank is not in the group", kind="index-range", expected=f"below {world}", found=rank
            )
        self.tensors: dict[str, torch.Tensor] = named(tensors)
        self.rank, self.world = rank, world
        self.first = dict(first or {})
        self._specs: dict[str, TensorSpec] = {}
        self._parts: list[_Part] = []
        self._untouched: list[tuple[str, Box]] = []

    def global_name(self, name: str) -> str:
        """A name with the numbers that all ranks know."""
        path = name.split(".")
        for k, (modules, number) in enumerate(itertools.pairwise(path)):
            if number.isdecimal():
                path[k + 1] = str(int(number) + self.first.get(modules, 0))
        return ".".join(path)

    def column(self, local: str, name: str | None = None) -> ShardBuilder:
        """A weight `(out, in)` or bias of which ranks share the outputs."""
        return self.stack(local, [name or local])

    def row(self, local: str, name: str | None = None) -> ShardBuilder:
        """A weight `(out, in)` of which ranks share the inputs."""
        return self.stack(local, [name or local], dim=1)

    def stack(
        self,
        local: str,
        names: Sequence[str],
        *,
        rows: Sequence[int] | None = None,
        dim: int = 0,
    ) -> ShardBuilder:
        """Equal shares of several tensors, one behind another along a dimension: gate and up, or q, k and v.

        `rows` are the extents of the parts in the local tensor (default: equal ones).
        """
        extent = self._tensor(local).shape[dim]
        rows = [extent // len(names)] * len(names) if rows is None else rows
        self._covers(local, sum(rows), extent)
        at = 0
        for name, size in zip(names, rows, strict=True):
            self._share(name, local, dim, at, size, self.rank * size, self.world * size)
            at += size
        return self

    def qkv_groups(
        self, local: str, q: str, k: str, v: str, *, head_dim: int, queries_per_group: int
    ) -> ShardBuilder:
        """Megatron's fused weight or bias: for each key-value head its query heads, its key and its value."""
        sizes = [queries_per_group * head_dim, head_dim, head_dim]
        extent = self._tensor(local).shape[0]
        groups = extent // sum(sizes)
        self._covers(local, groups * sum(sizes), extent)
        at = 0
        for group, (name, size) in itertools.product(range(groups), zip((q, k, v), sizes, strict=True)):
            start = (self.rank * groups + group) * size
            self._share(name, local, 0, at, size, start, self.world * groups * size)
            at += size
        return self

    def vocabulary(self, local: str, name: str | None = None, *, size: int) -> ShardBuilder:
        """Rows of an embedding or head of `size` tokens; what pads the ranks' equal shares is not published."""
        tensor = self._tensor(local)
        rows = tensor.shape[0]
        if rows * self.world < size:
            self._covers(local, size, rows * self.world)
        start = min(self.rank * rows, size)
        held = min(start + rows, size) - start
        self._share(name or local, local, 0, 0, held, start, size)
        if held < rows:
            self._untouched.append((local, Box((held, *(0,) * (tensor.dim() - 1)), tuple(tensor.shape))))
        return self

    def experts(
        self, local: str, *names: str, numbers: Sequence[int], rows: Sequence[int] | None = None
    ) -> ShardBuilder:
        """A stack `(slots, ...)` of experts; `numbers` gives the global number of the expert in each slot.

        Each of `names` is a pattern such as `"layers.0.experts.{}.gate.weight"`; several of them, as gate and
        up, stand one behind another along the slot's first dimension, `rows` long each. Matrices are whole: the
        group of `rank` and `world` does not cut them.
        """
        tensor = self._tensor(local)
        self._covers(local, len(numbers), tensor.shape[0])
        inner = tuple(tensor.shape[1:])
        rows = [inner[0] // len(names)] * len(names) if rows is None else rows
        self._covers(local, sum(rows), inner[0])
        for slot, number in enumerate(numbers):
            at = 0
            for pattern, size in zip(names, rows, strict=True):
                shape = (size, *inner[1:])
                place = (slot, at, *(0,) * (len(inner) - 1))
                self._add(
                    self.global_name(pattern).replace("{}", str(number)), shape, Box.full(shape), local, place
                )
                at += size
        return self

    def whole(self, local: str | None = None, name: str | None = None) -> ShardBuilder:
        """A tensor that this rank has all of; without arguments, all tensors not mentioned yet."""
        if local is None:
            taken = {part.target for part in self._parts}
            for rest in [each for each in self.tensors if each not in taken]:
                self.whole(rest)
            return self
        shape = tuple(self._tensor(local).shape)
        self._add(self.global_name(name or local), shape, Box.full(shape), local, (0,) * len(shape))
        return self

    def tie(self, name: str, owner: str) -> ShardBuilder:
        """A second name of a tensor, which stores nothing of its own."""
        name, owner = self.global_name(name), self.global_name(owner)
        spec = self._specs.get(owner)
        if spec is None:
            raise LayoutError("tied to a tensor not mentioned yet", kind="name-unknown", where=repr(owner))
        self._specs[name] = TensorSpec(name, spec.dtype, spec.shape, owner)
        return self

    def build(self) -> Shards:
        """What the rank holds, every local element placed."""
        schema = Schema(self._specs.values())
        builder = LayoutBuilder(schema, self.tensors)
        for part in self._parts:
            builder.place(part.source, part.target, box=part.box, at=part.at)
        for target, box in self._untouched:
            builder.untouched(target, box)
        return Shards(schema=schema, layout=builder.build(), tensors=self.tensors)

    def _share(self, name: str, local: str, dim: int, at: int, size: int, start: int, whole: int) -> None:
        """`size` of a tensor's `whole` extent along a dimension, from `start`, `at` an index of the local one."""
        shape = list(self._tensor(local).shape)
        low, high, place = [0] * len(shape), list(shape), [0] * len(shape)
        shape[dim], low[dim], high[dim], place[dim] = whole, start, start + size, at
        box = Box(tuple(low), tuple(high))
        self._add(self.global_name(name), tuple(shape), box, local, tuple(place))

    def _add(self, name: str, shape: tuple[int, ...], box: Box, local: str, at: tuple[int, ...]) -> None:
        spec = TensorSpec(name, dtype_name(self._tensor(local)), shape)
        known = self._specs.setdefault(name, spec)
        if known != spec:
            raise LayoutError(
                "one tensor is declared in two ways",
                kind="shape-mismatch",
                where=repr(name),
                expected=known.shape,
                found=shape,
            )
        self._parts.append(_Part(source=name, box=box, target=local, at=at))

    def _covers(self, local: str, rows: int, extent: int) -> None:
        if rows != extent:
            raise LayoutError(
                "the parts declared do not make up the local tensor",
                kind="shape-mismatch",
                where=repr(local),
                expected=rows,
                found=extent,
            )

    def _tensor(self, local: str) -> torch.Tensor:
        if local not in self.tensors:
            raise LayoutError("there is no such local tensor", kind="name-unknown", where=repr(local))
        return self.tensors[local]
