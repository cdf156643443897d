"""Tensors that have nothing to do with one another, so that a loader can be given some at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from deltafmt.layout import Layout
from deltafmt.schema import Schema

AT_ONCE = 1 << 30
"""Bytes of stored and local tensors that are small enough to be traced as one."""
_MOST_GROUPS = 32


@dataclass(slots=True, kw_only=True)
class Group:
    """Names of a schema, aliases among them, and the local tensors that theirs fill."""

    names: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    stored_bytes: int = 0

    def part_of(self, layout: Layout) -> Layout:
        """What a layout says of these local tensors."""
        targets = set(self.targets)
        return Layout(
            [placement for placement in layout.placements if placement.target in targets],
            untouched=[(name, box) for name, box in layout.untouched if name in targets],
            casts={name: dtype for name, dtype in layout.casts.items() if name in targets},
        )


def bytes_of(schema: Schema, tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of all stored and local tensors."""
    return schema.nbytes + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def groups_by_layout(schema: Schema, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> list[Group]:
    """The local tensors and what fills them, in a few groups that share no tensor and no memory."""
    parent: dict[object, object] = {}

    def root(key: object) -> object:
        while parent.setdefault(key, key) != key:
            parent[key] = key = parent[parent[key]]
        return key

    storage = {name: ("memory", tensor.untyped_storage()._cdata) for name, tensor in tensors.items()}
    for placement in layout.placements:
        owner = schema.resolve(placement.source).name
        parent[root(("name", owner))] = root(storage[placement.target])
    members: dict[object, Group] = {}
    for name in schema.names:
        key = root(("name", schema.resolve(name).name))
        members.setdefault(key, Group()).names.append(name)
    for target in tensors:
        members.setdefault(root(storage[target]), Group()).targets.append(target)
    return _packed(schema, members.values())


def groups_by_layer(schema: Schema) -> list[Group]:
    """The names of a schema, those with the same first number (of a layer) together."""
    members: dict[str, Group] = {}
    for name in schema.names:
        owner = schema.resolve(name).name
        number = re.search(r"(^|\.)\d+(\.|$)", owner)
        members.setdefault(owner[: number.end()] if number else "", Group()).names.append(name)
    return _packed(schema, members.values())


def _packed(schema: Schema, members: Iterable[Group]) -> list[Group]:
    """Groups joined until there are few; each is as large as it must be, or of a size of its own."""
    least = max(AT_ONCE // 4, schema.nbytes // _MOST_GROUPS)
    packed: list[Group] = []
    for group in members:
        specs = [schema[name] for name in group.names]
        size = sum(spec.nbytes for spec in specs if spec.alias_of is None)
        if not packed or packed[-1].stored_bytes + size > least:
            packed.append(Group())
        last = packed[-1]
        last.names += group.names
        last.targets += group.targets
        last.stored_bytes += size
    for group in packed:
        group.names.sort(key=schema.index)
    return packed
