"""A25: no name and no symbolic link takes a store out of its root, whatever the verb."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from deltafmt import FormatError, StoreError
from deltafmt.store import LocalStore, Range, Store
from deltafmt.testing.store_suite import UNSAFE_KEYS

VERBS: dict[str, Callable[[Store, str], object]] = {
    "read": lambda store, key: store.read(key),
    "read_limited": lambda store, key: store.read(key, limit=100),
    "read_ranges": lambda store, key: list(store.read_ranges([Range(key, 0, 1)])),
    "size": lambda store, key: store.size(key),
    "exists": lambda store, key: store.exists(key),
    "put": lambda store, key: store.put(key, b"mine"),
    "put_if_absent": lambda store, key: store.put_if_absent(key, b"mine"),
    "open_sink": lambda store, key: store.open_sink(key),
    "delete": lambda store, key: store.delete([key]),
    "list": lambda store, key: list(store.list(key)),
}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder with a secret, beside the root."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "x").write_bytes(b"secret")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    made = LocalStore(tmp_path / "root")
    made.put("data/a", b"1")
    return made


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths opened, linked, replaced or removed."""
    log: list[str] = []
    for name in ("open", "link", "replace", "unlink", "scandir"):
        real = getattr(os, name)

        def spy(*arguments: object, _real: Callable[..., object] = real, **options: object) -> object:
            log.extend(str(each) for each in arguments if isinstance(each, (str, Path)))
            return _real(*arguments, **options)

        monkeypatch.setattr(os, name, spy)
    return log


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("key", UNSAFE_KEYS)
def test_unsafe_names_are_refused_before_anything_is_touched(
    store: LocalStore, outside: Path, touched: list[str], verb: str, key: str
) -> None:
    with pytest.raises(FormatError) as caught:
        VERBS[verb](store, key)
    assert caught.value.kind == "key-unsafe"
    assert touched == []
    assert (outside / "x").read_bytes() == b"secret"


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("place", ["a file", "a folder", "a folder above", "nothing", "the root itself"])
def test_links_are_not_followed(
    store: LocalStore, outside: Path, touched: list[str], verb: str, place: str
) -> None:
    links = {
        "a file": ("data/x", outside / "x", "data/x"),
        "a folder": ("data/out", outside, "data/out/x"),
        "a folder above": ("data/up", Path("../../outside"), "data/up/x"),
        "nothing": ("data/new", outside / "new", "data/new"),
        "the root itself": ("data/loop", Path(".."), "data/loop/data/a"),
    }
    name, target, key = links[place]
    (store.root / name).symlink_to(target)
    touched.clear()
    with pytest.raises(StoreError, match="symbolic link") as caught:
        VERBS[verb](store, key)
    assert caught.value.kind == "key-unsafe"
    assert not [path for path in touched if str(outside) in os.path.realpath(path)]
    assert [path.name for path in outside.iterdir()] == ["x"]
    assert (outside / "x").read_bytes() == b"secret"


def test_links_are_not_listed(store: LocalStore, outside: Path) -> None:
    (store.root / "data/x").symlink_to(outside / "x")
    (store.root / "data/out").symlink_to(outside)
    assert list(store.list("data")) == ["data/a"]
