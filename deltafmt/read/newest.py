"""Which version is the newest: a few questions to storage, however many versions there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deltafmt.errors import FormatError, NotFoundError, StoreError, UnsupportedError
from deltafmt.format import keys
from deltafmt.format.constants import MAX_HINT_BYTES
from deltafmt.format.objects import parse_latest
from deltafmt.store import Store


def find_newest(
    *,
    start: int | None,
    exists: Callable[[int], bool],
    floor: Callable[[], int],
    listed: Callable[[], Sequence[int]],
) -> int | None:
    """The highest version of which there is a manifest; None where there is none.

    Manifests form one run without a gap: they are added at its upper end and removed at the lower one. So
    one that is there, while the next one was not there before, is the newest. `start` may be any number: what
    was the newest once, a hint, or a lie. With a good one two questions are enough; else the search begins at
    `floor()`, and `listed()` is asked only where there is nothing either.
    """
    if start is not None:
        newest = _upper_end(start, exists)
        if exists(newest):
            return newest
    newest = _upper_end(floor(), exists)
    if exists(newest):
        return newest
    return max(listed(), default=None)


def _upper_end(low: int, exists: Callable[[int], bool]) -> int:
    """The last version of the run that `low` stands in; `low` itself if the next one is not there."""
    step = 1
    while exists(low + step):
        low += step
        step *= 2
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        if exists(middle):
            low = middle
        else:
            high = middle
    return low


def read_hint(store: Store) -> int | None:
    """What somebody has left as the newest version: a number to begin with, and no more; None where it is no use."""
    try:
        return parse_latest(store.read(keys.LATEST, limit=MAX_HINT_BYTES), where=keys.LATEST).version
    except (NotFoundError, FormatError, UnsupportedError):
        return None
    except StoreError as error:
        if error.kind == "store-unreachable":
            raise
        return None
