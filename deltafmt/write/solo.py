"""A writer of one process: what several ranks would have to agree on, it knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from deltafmt.format.ranks import ANCHOR, PROVE
from deltafmt.format.records import Receipt
from deltafmt.layout import Layout
from deltafmt.read.history import History, Stored
from deltafmt.schema import Schema
from deltafmt.tiling import DOMAIN_ELEMENTS, make_tiling
from deltafmt.write.calls import UNKNOWN_HOLDING, call_of
from deltafmt.write.cut import Cut
from deltafmt.write.ownership import Holding, share_out
from deltafmt.write.ranks import Agreed, M, Want
from deltafmt.write.root import prepare


class Solo:
    """The only rank. `domain_elements` None leaves a lineage cut as it is."""

    rank, world, leads = 0, 1, True

    def __init__(
        self, history: History, *, domain_elements: int | None = None, layouts: Sequence[Layout] = ()
    ) -> None:
        self._history = history
        self._domain_elements, self._layouts = domain_elements, layouts
        self._cut: Cut | None = None
        self._placed: tuple[Holding, Cut] | None = None

    def open(self, want: Want) -> Agreed:
        """Cut what is held, and make the root ready for it."""
        cut = self._cut_for(want)
        if want.purpose == PROVE:
            lineage = self._history.descriptor.lineage
        else:
            lineage = prepare(self._history, cut, want.base, purpose=want.purpose)
            self._cut = cut
        domains = len(cut)
        call = call_of(
            want,
            lineage=lineage,
            cut=cut,
            holdings=[UNKNOWN_HOLDING],
            owner=np.zeros(domains),
            holders=np.ones(domains),
        )
        return Agreed(call=call, cut=cut, shared=frozenset(), replicas=np.empty(0, np.int64))

    def refuse(self, _want: Want, _error: Exception) -> None:
        """Nobody is there to be told."""

    def close(
        self,
        _agreed: Agreed,
        receipt: Receipt | Exception,
        *,
        assemble: Callable[[list[Receipt]], M],
        create: Callable[[M], int],
    ) -> int:
        """Make what the receipt says."""
        if isinstance(receipt, Exception):
            raise receipt
        return create(assemble([receipt]))

    def forget(self) -> None:
        """Cut as the lineage is, from here on."""
        self._cut = None

    def cut_of(self, stored: Stored) -> Cut | None:
        """As it was, unless the options ask for something else."""
        self._cut = self._cut_like(self._history.schema(stored.manifest.schema), stored)
        return self._cut

    def _cut_for(self, want: Want) -> Cut:
        if want.purpose == ANCHOR and self._cut is not None:
            return self._cut
        if not want.holding.is_whole:
            return self._cut_placed(want.holding)
        schema = want.holding.schema
        if want.base is not None:
            known = self._history.schema(want.base.manifest.schema)
            # The order of the names given is no change of the model.
            schema = known if set(known) == set(schema) else schema
        return self._cut_like(schema, want.base)

    def _cut_like(self, schema: Schema, stored: Stored | None) -> Cut:
        if self._cut is not None and self._cut.schema == schema:
            return self._cut
        as_it_is = self._domain_elements is None and not self._layouts
        if as_it_is and stored is not None:
            manifest = stored.manifest
            if self._history.schema(manifest.schema) is schema:
                return Cut(schema, self._history.tiling(manifest.tiling, manifest.schema))
        elements = self._domain_elements or DOMAIN_ELEMENTS
        return Cut(schema, make_tiling(schema, domain_elements=elements, layouts=self._layouts))

    def _cut_placed(self, holding: Holding) -> Cut:
        """Cut also where placements begin and end; every element must have one."""
        if self._placed is None or self._placed[0] is not holding:
            elements = self._domain_elements or DOMAIN_ELEMENTS
            shares = share_out([holding], domain_elements=elements, layouts=self._layouts)
            self._placed = (holding, Cut(shares.schema, shares.tiling))
        return self._placed[1]
