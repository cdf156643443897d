from __future__ import annotations

from deltafmt.format import keys
from deltafmt.read.history import History
from deltafmt.store import MemoryStore


def test_the_floor_is_the_highest_name_and_never_falls() -> None:
    store = MemoryStore()
    history = History(store)
    assert history.floor() == 0
    for version in (3, 20, 7):
        store.put(keys.floor_key(version), b"")
    store.put("floors/note.txt", b"")
    store.put("floors/99.dfm", b"")
    assert history.floor() == 20
    store.delete([keys.floor_key(20)])
    assert history.floor() == 20
    assert History(store).floor() == 7
