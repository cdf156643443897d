"""What one rank is given, seen as its share of the canonical tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from deltafmt.errors import LayoutError, SchemaError
from deltafmt.layout import Layout, TargetInfo
from deltafmt.read.history import History
from deltafmt.schema import Schema
from deltafmt.shards import Shards, any_distributed, shards_of
from deltafmt.tensors import NamedTensors, named
from deltafmt.write.commit import check_count
from deltafmt.write.ownership import Holding
from deltafmt.write.publish_dtype import CASTS, PublishDtype, as_published, published_schema
from deltafmt.write.source import check_tensors


class Local:
    """How local tensors are to be read: through a layout, or as whole tensors by name.

    `layout` is the one given, or for `Shards` and distributed tensors the one that follows from them. `alone`,
    whole tensors must be all those of the schema given, and stand in the order in which they are named.
    """

    def __init__(
        self, schema: Schema | None, layout: Layout | None, publish_dtype: PublishDtype, *, alone: bool
    ) -> None:
        self._schema = schema
        self._given = self.layout = layout
        self._publish_dtype = publish_dtype
        self._alone = alone
        self._validated: tuple[Schema, dict[str, TargetInfo]] | None = None
        self._last: Holding | None = None

    def holding(
        self, named_tensors: NamedTensors | Shards, history: History
    ) -> tuple[dict[str, torch.Tensor], Holding]:
        """The tensors by name, and what of the canonical ones they hold; checked, the same object while it is equal."""
        schema, tensors = self._read(named_tensors)
        check_count(len(tensors))
        check_tensors(tensors)
        if self.layout is None:
            found = self._whole(tensors)
        else:
            found = self._placed(tensors, self.layout, schema or _newest_schema(history))
        if self._last is None or found != self._last:
            self._last = found
        return tensors, self._last

    def _read(self, named_tensors: NamedTensors | Shards) -> tuple[Schema | None, dict[str, torch.Tensor]]:
        """(schema that the layout speaks of, tensors); the layout is kept while it is the same."""
        if not isinstance(named_tensors, Shards):
            tensors = named(named_tensors, may_copy=self._given is None)
            if self._given is not None or not any_distributed(tensors):
                self.layout = self._given
                return self._schema, tensors
            named_tensors = shards_of(tensors)
        elif self._given is not None:
            raise LayoutError(
                "shards have a layout of their own, and the writer was given another",
                kind="schema-differs",
                where="Writer.layout",
            )
        if self.layout is None or self.layout.placements != named_tensors.layout.placements:
            self.layout, self._validated, self._last = named_tensors.layout, None, None
        return self._schema or as_published(named_tensors.schema, self._publish_dtype), named_tensors.tensors

    def _whole(self, tensors: Mapping[str, torch.Tensor]) -> Holding:
        own = published_schema(tensors, self._publish_dtype)
        if self._alone and self._schema is not None and set(own) != set(self._schema):
            differ = sorted({spec.name for spec in set(own) ^ set(self._schema)})
            raise SchemaError(
                "tensors do not fit the schema given", kind="schema-differs", where=", ".join(differ[:5])
            )
        if self._schema is None or self._alone:
            same = self._last is not None and self._last.schema == own
            return self._last if same and self._last is not None else Holding.whole(own, own.names)
        specs = {spec.name: spec for spec in self._schema}
        for spec in own:
            known = specs.get(spec.name)
            if known is None or (known.dtype, known.shape) != (spec.dtype, spec.shape):
                raise SchemaError(
                    "tensors do not fit the schema given",
                    kind="schema-differs",
                    where=repr(spec.name),
                    expected=None if known is None else f"{known.dtype} {known.shape}",
                    found=f"{spec.dtype} {spec.shape}",
                )
            owner = self._schema.resolve(spec.name).name
            if owner in own and own.resolve(owner).name != own.resolve(spec.name).name:
                raise SchemaError(
                    "tensors that the schema ties are two",
                    kind="schema-differs",
                    where=f"{spec.name!r}, {owner!r}",
                )
        return Holding.whole(self._schema, own.names)

    def _placed(self, tensors: Mapping[str, torch.Tensor], layout: Layout, schema: Schema) -> Holding:
        infos = {name: TargetInfo.of(tensor) for name, tensor in tensors.items()}
        if self._validated != (schema, infos):
            cast = {name: self._as_published(layout, schema, name, info) for name, info in infos.items()}
            Layout(layout.placements, untouched=layout.untouched).validate(schema, cast)
            self._validated = (schema, infos)
        if self._last is not None and self._last.schema == schema:
            return self._last
        return Holding.placed(schema, layout)

    def _as_published(self, layout: Layout, schema: Schema, name: str, info: TargetInfo) -> TargetInfo:
        """A local tensor with the dtype in which its elements are published, where that cast is asked for."""
        if self._publish_dtype is None and name not in layout.casts:
            return info
        dtypes = {
            schema[p.source].dtype for p in layout.placements if p.target == name and p.source in schema
        }
        if len(dtypes) == 1 and (info.dtype, dtype := dtypes.pop()) in CASTS:
            return TargetInfo(dtype, info.shape, info.strides)
        return info


def _newest_schema(history: History) -> Schema:
    newest = history.latest()
    if newest is None:
        raise SchemaError(
            "a layout speaks of canonical tensors: give the writer their schema", kind="schema-differs"
        )
    return history.schema(history.first_way(newest).manifest.schema)
