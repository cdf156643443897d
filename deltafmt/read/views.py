"""A lineage's tilings as they look from local tensors, computed once per tiling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deltafmt.format.records import Manifest
from deltafmt.kernels import apply as native
from deltafmt.kernels.apply import DomainView
from deltafmt.layout import Layout
from deltafmt.read.decode import DomainShape, domain_shape
from deltafmt.read.history import History
from deltafmt.read.live import LiveDomain
from deltafmt.read.targets import Targets
from deltafmt.schema import Schema, TensorSpec
from deltafmt.segments import Placed, SegmentTable, make_segments, segments_of
from deltafmt.tiling import Tiling


@dataclass(frozen=True, kw_only=True)
class View:
    """One tiling seen from the local tensors."""

    schema: Schema
    tiling: Tiling
    table: SegmentTable
    targets: Targets

    def shape(self, domain: int) -> DomainShape:
        """What decoding needs to know of a domain."""
        return domain_shape(self.tiling, domain)

    def domain(self, domain: int) -> LiveDomain:
        """The live elements of a domain."""
        table, targets, width = self.table, self.targets, int(self.tiling.widths[domain])
        view = DomainView(table, domain, targets.addresses, width)
        if targets.flats is None:
            return LiveDomain.on_cpu(view)
        from deltafmt.kernels import torch_backend

        rows = table.segment_rows(domain)
        foreign = targets.foreign[table.target[rows.start : rows.stop]]
        other = torch_backend.TorchView(table, domain, targets.flats, width)
        parts = [
            (native, view.restricted(~foreign), ~foreign),
            (torch_backend, other.restricted(foreign), foreign),
        ]
        return LiveDomain(parts, width)

    def name(self, domain: int) -> str:
        """A domain for error messages: its number and the tensors that it begins and ends with."""
        rows = self.tiling.box_rows(domain)
        first, last = (self.schema.names[int(self.tiling.box_tensor[row])] for row in (rows[0], rows[-1]))
        return f"domain {domain} ({first!r})" if first == last else f"domain {domain} ({first!r} to {last!r})"


class Views:
    """Views of one set of targets, through one layout (None: each target by its own name)."""

    def __init__(self, history: History, targets: Targets, layout: Layout | None = None) -> None:
        self.history = history
        self.targets = targets
        self._given = layout
        self._layouts: dict[bytes, Layout] = {}
        self._fit: dict[bytes, bool] = {}
        self._views: dict[tuple[bytes, bytes], View] = {}

    def check(self, schema: bytes) -> None:
        """Raise `LayoutError` unless the targets fit a schema."""
        if not self._fits(schema):
            self._layout(schema)

    def view(self, manifest: Manifest, final: bytes) -> View:
        """The manifest's tiling from targets that in the end hold a version of schema `final`.

        Under an earlier schema only those placements count whose tensor goes on under its name until then;
        all others are filled densely on the way.
        """
        key = (manifest.tiling, final)
        if key not in self._views:
            schema = self.history.schema(manifest.schema)
            tiling = self.history.tiling(manifest.tiling, manifest.schema)
            table = self._table(schema, tiling, self.history.schema(final), final)
            self._views[key] = View(schema=schema, tiling=tiling, table=table, targets=self.targets)
        return self._views[key]

    def _table(self, schema: Schema, tiling: Tiling, later: Schema, final: bytes) -> SegmentTable:
        if self._fits(final):
            named = map(later.rows.__getitem__, self.targets.names)
            rows = later.owner_rows[np.fromiter(named, np.int64, len(self.targets.names))]
            if schema is not later:
                owners = [later.tensors[row] for row in rows.tolist()]
                kept = [schema.rows[spec.name] if goes_on(schema, spec) else -1 for spec in owners]
                rows = np.array(kept, np.int64)
            placed = Placed.whole(schema, rows)
            cast = np.zeros(len(rows), np.uint8)
            return segments_of(schema, tiling, placed, target_names=self.targets.names, cast=cast)
        layout = self._layout(final)
        if schema is not later:
            carried = (p for p in layout.placements if goes_on(schema, later[p.source]))
            layout = Layout(carried, casts=layout.casts)
        return make_segments(schema, tiling, layout, self.targets.memory_infos)

    def _fits(self, schema: bytes) -> bool:
        if schema not in self._fit:
            self._fit[schema] = self._given is None and self.targets.fit(self.history.schema(schema))
        return self._fit[schema]

    def _layout(self, schema: bytes) -> Layout:
        if schema not in self._layouts:
            self._layouts[schema] = self.targets.resolve(self._given, self.history.schema(schema))
        return self._layouts[schema]

    def forget(self, final: bytes) -> None:
        """Drop the views that led to other schemas than the one now held."""
        self._views = {key: view for key, view in self._views.items() if key[1] == final}

    def carried(self, held: bytes, schemas: Sequence[bytes]) -> bool:
        """Whether live bits of a version of schema `held` serve as base on a path through `schemas`.

        They do not where a tie has formed: the elements of a second name are then replaced by its owner's,
        which no delta repeats.
        """
        path = list(dict.fromkeys((held, *schemas)))
        if len(path) == 1:
            return True
        first, *between = (self.history.schema(digest) for digest in path[:-1])
        final = self.history.schema(path[-1])
        names = final.names if self._given is None else [p.source for p in self._given.placements]
        local = self.targets.tensors.keys() if self._given is None else set(names)
        for name in names:
            owner = final.resolve(name)
            if name not in local or not all(goes_on(schema, owner) for schema in (first, *between)):
                continue
            if name not in first or first.resolve(name).name != owner.name:
                return False
        return True

    def lacks_data(self, manifest: Manifest, base: Manifest) -> str | None:
        """The name of a tensor that is new in a delta way and not dense in it, as the format demands."""
        if manifest.schema == base.schema:
            return None
        schema, before = self.history.schema(manifest.schema), self.history.schema(base.schema)
        new = np.array([row for row in schema.owners if not goes_on(before, schema.tensors[row])], np.int64)
        tiling = self.history.tiling(manifest.tiling, manifest.schema)
        rows = np.flatnonzero(np.isin(tiling.box_tensor, new))
        dense = manifest.chunks.domain[manifest.chunks.operation == 3]
        missing = rows[~np.isin(tiling.domains_of_boxes()[rows], dense)]
        return schema.names[int(tiling.box_tensor[missing[0]])] if len(missing) else None


def goes_on(schema: Schema, later: TensorSpec) -> bool:
    """Whether a tensor of a later schema is the same one under this schema."""
    return later.name in schema and schema[later.name] == later
