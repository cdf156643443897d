from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from deltafmt import FormatError, NotFoundError
from deltafmt.read.chain import cheapest_chain
from deltafmt.read.history import Stored
from deltafmt.write.policy import spans


def digest(version: int) -> bytes:
    return version.to_bytes(32, "big")


def way(
    version: int, base: int | None, nbytes: int, *, data: bool = True, base_digest: bytes | None = None
) -> Stored:
    if base_digest is None and base is not None:
        base_digest = digest(base)
    manifest = SimpleNamespace(
        version=version,
        base=base,
        base_digest=base_digest,
        stored_bytes=nbytes,
        data=data,
        meta={} if data else {"hint": "hub/model"},
    )
    return Stored(key=f"{version} from {base}", digest=digest(version), manifest=cast("Any", manifest))


class Lineage:
    """What a chain asks, answered from a list of ways (the first one to a version is its own), and noted."""

    def __init__(self, *ways: Stored) -> None:
        self.ways = ways
        self.asked: list[int] = []
        self.read: list[tuple[int, int | None]] = []

    def _to(self, version: int) -> list[Stored]:
        found = [w for w in self.ways if w.manifest.version == version]
        if not found:
            raise NotFoundError("no such version", kind="version-missing", where=version)
        return found

    def first_way(self, version: int) -> Stored:
        if version not in self.asked:
            self.asked.append(version)
        return self._to(version)[0]

    def further_bases(self, version: int) -> list[int | None]:
        return [w.manifest.base for w in self._to(version)[1:]]

    def further_way(self, version: int, base: int | None) -> Stored:
        self.read.append((version, base))
        found = next(w for w in self._to(version)[1:] if w.manifest.base == base)
        if found.manifest.stored_bytes < 0:
            raise FormatError("damaged", kind="crc-mismatch", where=found.key)
        return found


def steps(path: list[Stored]) -> list[tuple[int, int | None]]:
    return [(way.manifest.version, way.manifest.base) for way in path]


LINE = [way(0, None, 100), *(way(v, v - 1, 10) for v in range(1, 6))]


def test_deltas_lead_from_a_held_version() -> None:
    lineage = Lineage(*LINE)
    assert steps(cheapest_chain(lineage, 3, 5)) == [(4, 3), (5, 4)]
    assert lineage.asked == [5, 4], "no more of the history is read than needed"


def test_from_nothing_it_starts_at_an_anchor() -> None:
    assert steps(cheapest_chain(Lineage(*LINE), None, 2)) == [(0, None), (1, 0), (2, 1)]


def test_a_squashed_way_is_taken_where_it_is_cheaper() -> None:
    assert steps(cheapest_chain(Lineage(*LINE, way(5, 1, 25)), 1, 5)) == [(5, 1)]
    assert steps(cheapest_chain(Lineage(*LINE, way(5, 1, 45)), 1, 5)) == [(v, v - 1) for v in range(2, 6)]
    assert steps(cheapest_chain(Lineage(*LINE, way(4, 1, 25)), 1, 5)) == [(4, 1), (5, 4)]


def test_a_receiver_far_behind_finds_the_cheapest_chain_in_few_requests() -> None:
    """Among the squashes that a writer adds, from every offset; and one way over all of them is seen at once."""
    sizes = {(v - span, v): round(1000 * span**0.64) for v in range(1, 160) for span in (1, *spans(v, 64))}
    lineage = Lineage(way(0, None, 10**6), *(way(v, base, size) for (base, v), size in sizes.items()))
    for wanted in range(80, 144):
        cheapest = {wanted: 0}
        for version in range(wanted, wanted - 64, -1):
            for base in range(wanted - 64, version):
                if version in cheapest and (base, version) in sizes:
                    cost = cheapest[version] + sizes[base, version]
                    cheapest[base] = min(cost, cheapest.get(base, cost))
        lineage.asked.clear()
        path = cheapest_chain(lineage, wanted - 64, wanted)
        assert sum(w.manifest.stored_bytes for w in path) <= 1.02 * cheapest[wanted - 64]
        assert len(lineage.asked) <= 25
    lineage = Lineage(*lineage.ways, way(150, 1, 30_000))
    assert steps(cheapest_chain(lineage, 1, 150)) == [(150, 1)]
    assert lineage.asked == [150]


def test_an_anchor_serves_whoever_holds_another_version() -> None:
    dear = [way(0, None, 100), way(1, 0, 90), way(2, 1, 90), way(2, None, 100)]
    assert steps(cheapest_chain(Lineage(*dear), 0, 2)) == [(2, None)]


def test_an_older_version_is_reached_from_an_anchor() -> None:
    assert steps(cheapest_chain(Lineage(*LINE), 5, 1)) == [(0, None), (1, 0)]


@pytest.mark.parametrize("held", [None, 0])
def test_a_gap_is_bridged_by_an_anchor_or_named(held: int | None) -> None:
    kept = [way(0, None, 100), way(4, 3, 10), way(4, None, 100), way(5, 4, 10), way(6, 5, 10)]
    assert steps(cheapest_chain(Lineage(*kept), held, 6)) == [(4, None), (5, 4), (6, 5)]
    kept = [w for w in kept if w.manifest.version != 5]
    with pytest.raises(NotFoundError, match="version 5") as caught:
        cheapest_chain(Lineage(*kept), held, 6)
    assert caught.value.kind == "chain-broken"


def test_an_anchor_without_data_is_no_way_from_nothing() -> None:
    ways = [way(0, None, 0, data=False), way(1, 0, 10)]
    with pytest.raises(NotFoundError, match="hub/model") as caught:
        cheapest_chain(Lineage(*ways), None, 1)
    assert caught.value.kind == "chain-broken"
    assert steps(cheapest_chain(Lineage(*ways), 0, 1)) == [(1, 0)], "who has adopted it goes on"


def test_a_way_from_another_base_is_passed_by() -> None:
    foreign = [*LINE[:3], way(3, 2, 10, base_digest=digest(9)), way(3, 1, 30)]
    assert steps(cheapest_chain(Lineage(*foreign), 0, 3)) == [(1, 0), (3, 1)]
    with pytest.raises(FormatError) as caught:
        cheapest_chain(Lineage(*foreign[:4]), 0, 3)
    assert caught.value.kind == "base-differs"


def test_bits_of_another_history_are_no_base() -> None:
    lineage = Lineage(*LINE)
    assert steps(cheapest_chain(lineage, 1, 2, held_digest=digest(1))) == [(2, 1)]
    assert steps(cheapest_chain(lineage, 1, 2, held_digest=digest(7))) == [(0, None), (1, 0), (2, 1)]


def test_an_unknown_version_is_not_found() -> None:
    with pytest.raises(NotFoundError) as caught:
        cheapest_chain(Lineage(*LINE), 3, 9)
    assert caught.value.kind == "version-missing"
