"""The usual layouts of inference engines from a few declarations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import le
from typing import Any

from deltafmt.errors import LayoutError
from deltafmt.geometry import Box
from deltafmt.given import named_pairs
from deltafmt.layout import Layout, Placement, TargetInfo
from deltafmt.schema import Schema


class LayoutBuilder:
    """Collects placements for one rank and builds a validated `Layout`.

    `targets` are the rank's local tensors (torch or numpy, or `TargetInfo`), `rank` and `world` its place in
    the tensor-parallel group. Verbs return the builder, so that they chain. Whatever a verb is told that
    does not fit the schema or the targets is a `LayoutError`, at the latest from `build`.

    >>> from deltafmt.schema import TensorSpec
    >>> schema = Schema((TensorSpec("q", "bfloat16", (8, 4)), TensorSpec("k", "bfloat16", (4, 4))))
    >>> targets = {"qk": TargetInfo("bfloat16", (6, 4), (4, 1))}
    >>> LayoutBuilder(schema, targets, rank=1, world=2).fuse("qk", ["q", "k"]).build()
    Layout(2 placements into 1 tensors)
    """

    def __init__(self, schema: Schema, targets: Mapping[str, Any], *, rank: int = 0, world: int = 1) -> None:
        if not 0 <= rank < world:
            raise LayoutError(
                "rank is not in the group", kind="index-range", expected=f"below {world}", found=rank
            )
        self.schema = schema
        self.targets = {name: TargetInfo.of(target) for name, target in named_pairs(targets)}
        self.rank, self.world = rank, world
        self._placements: list[Placement] = []
        self._untouched: list[tuple[str, Box]] = []
        self._casts: dict[str, str] = {}

    def place(
        self,
        source: str,
        target: str,
        *,
        box: Box | None = None,
        at: Sequence[int] | None = None,
        dims: Sequence[int] | None = None,
    ) -> LayoutBuilder:
        """Put a box of a source (default: all of it) at an index of a target (default: its beginning).

        `dims` names the target's dimension along which each source dimension runs; by default the last ones,
        in order. So `dims=(1, 0)` transposes, and a matrix goes into slot 3 of a stack with `at=(3, 0, 0)`.
        """
        info, spec = self._info(target), self._spec(source)
        box = Box.full(spec.shape) if box is None else box
        rank, shape = len(spec.shape), info.shape
        dims = tuple(range(len(shape) - rank, len(shape))) if dims is None else tuple(dims)
        at = (0,) * len(shape) if at is None else tuple(at)
        if (
            box.rank != rank
            or len(dims) != rank
            or len(set(dims)) != rank
            or not all(0 <= d < len(shape) for d in dims)
            or len(at) != len(shape)
        ):
            raise LayoutError(
                "source and target dimensions do not fit",
                kind="shape-mismatch",
                where=f"{source!r} -> {target!r}",
                expected=f"{rank} dimensions of {shape}",
                found=f"{box}, dims {dims}, at {at}",
            )
        stop = [a + 1 for a in at]
        for d, extent in zip(dims, box.shape, strict=True):
            stop[d] += extent - 1
        if min(at, default=0) < 0 or not all(map(le, stop, shape)):
            raise LayoutError(
                "placement leaves its target",
                kind="placement-outside",
                where=f"{source!r} -> {target!r}",
                expected=f"inside {shape}",
                found=f"{at} to {tuple(stop)}",
            )
        offset = sum(a * s for a, s in zip(at, info.strides, strict=True))
        strides = tuple(info.strides[d] for d in dims)
        if box.volume:
            self._placements.append(Placement(source, box, target, offset, strides))
        return self

    def shard(
        self,
        source: str,
        target: str,
        *,
        dim: int,
        at: Sequence[int] | None = None,
        dims: Sequence[int] | None = None,
        part: int | None = None,
        parts: int | None = None,
    ) -> LayoutBuilder:
        """Put this rank's equal share of a source along one of its dimensions.

        Column-parallel linears are cut along 0, row-parallel ones along 1 (of `(out, in)` weights). `part` of
        `parts` are the rank and the world unless given.
        """
        return self.place(
            source, target, box=self.share(source, dim, part=part, parts=parts), at=at, dims=dims
        )

    def share(self, source: str, dim: int, *, part: int | None = None, parts: int | None = None) -> Box:
        """The box of one of `parts` equal shares along a dimension."""
        spec = self._spec(source)
        part = self.rank if part is None else part
        parts = self.world if parts is None else parts
        extent = spec.shape[dim] if -len(spec.shape) <= dim < len(spec.shape) else 0
        if extent == 0 or extent % parts:
            raise LayoutError(
                "the dimension cannot be cut into equal shares",
                kind="shape-mismatch",
                where=repr(source),
                expected=f"a multiple of {parts} along dimension {dim}",
                found=spec.shape,
            )
        dim %= len(spec.shape)
        size = extent // parts
        start, stop = [0] * len(spec.shape), list(spec.shape)
        start[dim], stop[dim] = part * size, (part + 1) * size
        return Box(tuple(start), tuple(stop))

    def fuse(
        self,
        target: str,
        sources: Sequence[str],
        *,
        dim: int = 0,
        sharded: bool = True,
        at: Sequence[int] | None = None,
    ) -> LayoutBuilder:
        """Stack this rank's shares of several sources along a dimension, such as gate and up, or q, k and v.

        The parts may be unequal. `at` is where the stack begins in the target; with `sharded=False` every
        source is stacked whole.
        """
        boxes = [
            self.share(source, dim) if sharded else Box.full(self._spec(source).shape) for source in sources
        ]
        return self._stack(target, list(zip(sources, boxes, strict=True)), dim, at)

    def fuse_qkv(
        self, target: str, q: str, k: str, v: str, *, head_dim: int, kv_heads: int | None = None
    ) -> LayoutBuilder:
        """Stack this rank's query, key and value heads, as grouped-query attention has them.

        With fewer key-value heads than ranks, each is held by several neighbouring ranks. Works for
        weights `(heads * head_dim, hidden)` and biases.
        """
        kv_heads = self._spec(k).shape[0] // head_dim if kv_heads is None else kv_heads
        if kv_heads >= self.world:
            return self.fuse(target, [q, k, v])
        if self.world % kv_heads:
            raise LayoutError(
                "ranks cannot share key-value heads evenly",
                kind="shape-mismatch",
                where=repr(target),
                expected=f"a multiple of {kv_heads} ranks",
                found=self.world,
            )
        head = self.rank * kv_heads // self.world
        pairs = [
            (q, self.share(q, 0)),
            *((name, self.share(name, 0, part=head, parts=kv_heads)) for name in (k, v)),
        ]
        return self._stack(target, pairs, 0, None)

    def vocabulary(self, source: str, target: str) -> LayoutBuilder:
        """Put this rank's rows of an embedding whose vocabulary is padded to equal shares; padding stays untouched."""
        spec, info = self._spec(source), self._info(target)
        rows = info.shape[0]
        start = min(self.rank * rows, spec.shape[0])
        stop = min(start + rows, spec.shape[0])
        if rows * self.world < spec.shape[0]:
            raise LayoutError(
                "the ranks' rows do not hold the vocabulary",
                kind="shape-mismatch",
                where=f"{source!r} -> {target!r}",
                expected=f"at least {spec.shape[0]} rows on {self.world} ranks",
                found=rows * self.world,
            )
        if stop > start:
            box = Box((start, *(0,) * (len(spec.shape) - 1)), (stop, *spec.shape[1:]))
            self.place(source, target, box=box)
        if stop - start < rows:
            self.untouched(target, Box((stop - start, *(0,) * (len(info.shape) - 1)), info.shape))
        return self

    def experts_w13(
        self,
        target: str,
        gate: str | Sequence[str],
        up: str | Sequence[str],
        *,
        slots: Sequence[int],
        up_first: bool = False,
    ) -> LayoutBuilder:
        """Fill a stack `(slots, 2 * intermediate / world, hidden)` of gate and up projections.

        `gate` and `up` are lists of names by global expert number, or the names of stacked tensors
        `(experts, intermediate, hidden)`. `slots` gives the global expert of each local slot; an expert may
        have several (redundant slots). With `up_first` the halves change places.
        """
        for slot, expert in enumerate(slots):
            row = 0
            for names in (up, gate) if up_first else (gate, up):
                source, box = self._expert(names, expert, dim=0)
                self._place_expert(source, box, target, (slot, row, 0))
                row += box.shape[-2]
        return self

    def experts_w2(self, target: str, down: str | Sequence[str], *, slots: Sequence[int]) -> LayoutBuilder:
        """Fill a stack `(slots, hidden, intermediate / world)` of down projections; arguments as in `experts_w13`."""
        for slot, expert in enumerate(slots):
            source, box = self._expert(down, expert, dim=1)
            self._place_expert(source, box, target, (slot, 0, 0))
        return self

    def by_name(self, *, prefix: str = "") -> LayoutBuilder:
        """Fill every target that nothing fills yet from the stored tensor of its name (behind `prefix`)."""
        taken = {placement.target for placement in self._placements} | {name for name, _ in self._untouched}
        for name in self.targets:
            if name not in taken:
                self.place(prefix + name, name)
        return self

    def untouched(self, target: str, box: Box | None = None) -> LayoutBuilder:
        """Declare that nothing fills a box of a target (default: all of it)."""
        self._untouched.append((target, Box.full(self._info(target).shape) if box is None else box))
        return self

    def cast(self, target: str, source_dtype: str = "bfloat16") -> LayoutBuilder:
        """Declare that a target holds its source in a wider dtype: bfloat16 in float32."""
        self._info(target)
        self._casts[target] = source_dtype
        return self

    def build(self) -> Layout:
        """The layout, every local element placed or declared untouched."""
        layout = Layout(self._placements, untouched=self._untouched, casts=self._casts)
        layout.validate(self.schema, self.targets)
        return layout

    def _stack(
        self, target: str, pairs: Sequence[tuple[str, Box]], dim: int, at: Sequence[int] | None
    ) -> LayoutBuilder:
        info = self._info(target)
        place = [0] * len(info.shape) if at is None else list(at)
        for source, box in pairs:
            self.place(source, target, box=box, at=place)
            place[len(info.shape) - box.rank + dim % box.rank] += box.shape[dim]
        return self

    def _expert(self, names: str | Sequence[str], expert: int, *, dim: int) -> tuple[str, Box]:
        """(source, this rank's box) of one expert's matrix, cut along `dim` of the matrix."""
        if not isinstance(names, str):
            if not 0 <= expert < len(names):
                raise LayoutError(
                    "no such expert", kind="index-range", expected=f"below {len(names)}", found=expert
                )
            return names[expert], self.share(names[expert], dim)
        box = self.share(names, dim + 1)
        experts = self._spec(names).shape[0]
        if not 0 <= expert < experts:
            raise LayoutError(
                "no such expert",
                kind="index-range",
                where=repr(names),
                expected=f"below {experts}",
                found=expert,
            )
        return names, Box((expert, *box.start[1:]), (expert + 1, *box.stop[1:]))

    def _place_expert(self, source: str, box: Box, target: str, at: tuple[int, int, int]) -> None:
        shape = self._info(target).shape
        if len(shape) != 3:
            raise LayoutError(
                "a stack of experts has three dimensions; other layouts of a kernel are not guessed",
                kind="shape-mismatch",
                where=repr(target),
                found=shape,
            )
        self.place(source, target, box=box, at=at)

    def _spec(self, source: str) -> Any:
        if source not in self.schema:
            raise LayoutError("the schema has no such tensor", kind="name-unknown", where=repr(source))
        return self.schema[source]

    def _info(self, target: str) -> TargetInfo:
        if target not in self.targets:
            raise LayoutError("there is no such local tensor", kind="name-unknown", where=repr(target))
        return self.targets[target]
