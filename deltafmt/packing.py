"""Pieces of tensors gathered into domains."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deltafmt.cells import Pieces

Ints = npt.NDArray[np.int64]

MIN_GROUP_ELEMENTS = 4096
"""Pieces with one set of readers join pieces with more readers, if there are any, below this many elements."""
_WASTE = 40
"""A reader may be made to read this fraction of its share beyond it."""
_MAX_HOMES = 512


def pack(pieces: Pieces, volume: Ints, element: Ints, *, aim: int) -> tuple[Ints, Ints]:
    """(order of the pieces, first piece of each domain and the end) of domains of about `aim` elements.

    Pieces share a domain only if `element` (width and order of bits) and readers are the same. Groups and
    the pieces in each keep the order in which the model has them.
    """
    group, readers = _groups(pieces, element)
    group = _without_dwarfs(group, readers, volume)
    order = np.argsort(group, kind="stable")
    sizes = volume[order].tolist()
    borders = [0]
    ends = np.append(np.flatnonzero(np.diff(group[order])) + 1, len(order)).tolist() if len(order) else []
    for end in ends:
        borders += _borders(sizes, borders[-1], end, aim)
    return order, np.array(borders, np.int64)


def _groups(pieces: Pieces, element: Ints) -> tuple[Ints, list[tuple[int, int]]]:
    """The group of each piece, numbered by first appearance, and (element, set of readers) of each group."""
    key = element * max(1, len(pieces.sets)) + pieces.readers
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    first = np.sort(first)
    sets = [pieces.sets[k] for k in pieces.readers[first].tolist()]
    return rank[inverse.reshape(-1)], list(zip(element[first].tolist(), sets, strict=True))


def _without_dwarfs(group: Ints, keys: list[tuple[int, int]], volume: Ints) -> Ints:
    """Groups, those too small to stand alone moved to one that all their readers read anyway.

    Readers of the home that did not ask for the dwarf read it too, so this is done only as long as it stays
    a small part of what each of them reads. A dwarf without such a home stands alone: any other would make
    its readers read a whole domain.
    """
    size_of = np.zeros(len(keys), np.int64)
    np.add.at(size_of, group, volume)
    sizes: list[int] = size_of.tolist()
    dwarfs = [k for k, size in enumerate(sizes) if size < MIN_GROUP_ELEMENTS]
    if not dwarfs or len(keys) == 1:
        return group
    budget: dict[int, int] = {}
    for (_, readers), size in zip(keys, sizes, strict=True):
        for reader in _bits(readers):
            budget[reader] = budget.get(reader, 0) + size
    budget = {reader: size // _WASTE for reader, size in budget.items()}
    home = np.arange(len(keys))
    homes = sorted(range(len(keys)), key=lambda k: -sizes[k])[:_MAX_HOMES]
    for dwarf in sorted(dwarfs, key=lambda k: (sizes[k], k)):
        element, readers = keys[dwarf]
        able = [
            k
            for k in homes
            if k != dwarf
            and home[k] == k
            and keys[k][0] == element
            and keys[k][1] & readers == readers
            and all(budget[reader] >= sizes[dwarf] for reader in _bits(keys[k][1] & ~readers))
        ]
        if not able or sizes[dwarf] >= MIN_GROUP_ELEMENTS:
            continue
        best = min(able, key=lambda k: (keys[k][1].bit_count(), k))
        for reader in _bits(keys[best][1] & ~readers):
            budget[reader] -= sizes[dwarf]
        home[home == dwarf] = best
        sizes[best] += sizes[dwarf]
    return home[group]


def _bits(readers: int) -> list[int]:
    return [k for k in range(readers.bit_length()) if readers >> k & 1]


def _borders(sizes: list[int], first: int, end: int, aim: int) -> list[int]:
    """Where domains end among the pieces of one group: at the aim, at least a quarter of it in each."""
    borders: list[int] = []
    elements = 0
    for k in range(first, end):
        if elements + sizes[k] > aim and elements >= max(1, aim // 4):
            borders.append(k)
            elements = 0
        elements += sizes[k]
    if borders and elements < aim // 4:
        borders.pop()
    return [*borders, end]
