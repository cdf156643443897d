"""A20: a write that raises, is cut short, or meets a full disk: no version comes of it, and the next try does."""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import deltafmt
from deltafmt import StoreError
from deltafmt.format import keys
from deltafmt.store import LocalStore, MemoryStore, Sink, open_store, register_protocol
from deltafmt.store.base import Buffer
from deltafmt.testing.faulty import Effect, FaultyStore, failing, lost_reply
from tests.cases.common import assert_same, copied, faulty, new_root

WRITES = {"put", "put_if_absent", "open_sink", "write", "close"}
FAULTS: dict[str, Callable[[], Effect]] = {
    "raises": lambda: failing(RuntimeError("bug")),
    "disk full": lambda: failing(OSError(errno.ENOSPC, "No space left on device")),
    "raises after it was done": lambda: lost_reply(RuntimeError("bug")),
}


def model() -> dict[str, torch.Tensor]:
    return {f"t{k}": torch.arange(5000, dtype=torch.int16) + k for k in range(3)}


def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    result = copied(tensors)
    for tensor in result.values():
        tensor[::7] += 1
    return result


def writes_of(publish: Callable[[str], object]) -> list[int]:
    """At which calls, counted from 1, something is written."""
    url, store = faulty(new_root())
    publish(url)
    return writes_in(store)


def writes_in(store: FaultyStore) -> list[int]:
    """The same of the calls so far, apart from the hint that readers may do without."""
    return [
        number for number, call in enumerate(store.log, 1) if call.verb in WRITES and call.key != keys.LATEST
    ]


def begin(url: str) -> deltafmt.Writer:
    writer = deltafmt.Writer(url)
    writer.publish_anchor(model())
    return writer


@pytest.mark.parametrize("fault", FAULTS)
def test_any_write_of_a_delta_may_fail(fault: str) -> None:
    url, store = faulty(new_root())
    writer = begin(url)
    store.log.clear()
    writer.publish(changed(model()))
    places = writes_in(store)
    assert {store.log[number - 1].verb for number in places} >= WRITES - {"put"}
    for number in places:
        url, store = faulty(new_root())
        writer = begin(url)
        store.log.clear()
        store.inject(FAULTS[fault](), first=number)
        with pytest.raises((RuntimeError, OSError)) as caught:
            writer.publish(changed(model()))
        assert getattr(caught.value, "errno", errno.ENOSPC) == errno.ENOSPC
        created = store.log[number - 1].verb == "put_if_absent" and fault == "raises after it was done"
        assert deltafmt.open(url).latest() == (1 if created else 0)
        store.heal()
        # A create whose outcome was open is settled first: the number is the next one then.
        assert writer.publish(changed(model())) == (2 if created else 1)
        lineage = deltafmt.open(url)
        assert_same(lineage.read(1), changed(model()))
        assert lineage.verify().ok


@pytest.mark.parametrize("fault", ["raises", "disk full"])
def test_any_write_of_the_first_version_may_fail(fault: str) -> None:
    places = writes_of(begin)
    for number in places:
        url, store = faulty(new_root())
        store.inject(FAULTS[fault](), first=number)
        with pytest.raises((RuntimeError, OSError)):
            begin(url)
        store.heal()
        begin(url)
        assert_same(deltafmt.open(url).read(0), model())
        assert deltafmt.open(url).verify().ok


class Forgetful(MemoryStore):
    """Loses the last byte of one piece that is written to a sink, and says nothing."""

    pieces = 0
    loses = 0

    def open_sink(self, key: str) -> Sink:
        return _ForgetfulSink(self, super().open_sink(key))


class _ForgetfulSink:
    def __init__(self, store: Forgetful, inner: Sink) -> None:
        self._store, self._inner = store, inner
        self.close, self.abort = inner.close, inner.abort

    def write(self, data: Buffer) -> None:
        self._store.pieces += 1
        self._inner.write(memoryview(data)[:-1] if self._store.pieces == self._store.loses else data)


def test_a_short_write_is_found_before_the_commit() -> None:
    store = Forgetful()
    register_protocol("forgetful", lambda rest, options: store)
    writer = begin("forgetful://")
    state = model()
    state = changed(state)
    store.pieces = 0
    writer.publish(state)
    pieces = store.pieces
    assert pieces > 3
    for piece in range(1, pieces + 1):
        state = changed(state)
        version = deltafmt.open("forgetful://").latest()
        assert version is not None
        store.loses = store.pieces + piece
        with pytest.raises(StoreError) as caught:
            writer.publish(state)
        assert caught.value.kind == "short-write"
        assert deltafmt.open("forgetful://").latest() == version
        assert writer.publish(state) == version + 1
        assert_same(deltafmt.open("forgetful://").read(), state)
    assert deltafmt.open("forgetful://").verify().ok


@contextmanager
def room_for(nbytes: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_system_that_takes_no_more(tmp_path: Path) -> None:
    """The kernel itself cuts a write short and refuses the next one."""
    url = str(tmp_path / "run")
    writer = begin(url)
    generator = torch.Generator().manual_seed(1)
    large = {"w": torch.randint(0, 1 << 15, (1 << 20,), dtype=torch.int16, generator=generator)}
    before = {entry.key for entry in LocalStore(url).entries("data")}
    with room_for(100_000), pytest.raises(StoreError) as caught:
        writer.publish_anchor(large)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EFBIG
    assert deltafmt.open(url).latest() == 0
    assert {entry.key for entry in LocalStore(url).entries("data")} == before, "nothing is left of it"
    assert list(LocalStore(url).remnants()) == []
    assert writer.publish_anchor(large) == 1
    assert_same(deltafmt.open(url).read(), large)


def test_an_exception_of_the_caller_publishes_nothing() -> None:
    """Leaving an open file is closing it, elsewhere."""
    url = new_root()
    writer = begin(url)

    class Broken:
        def __iter__(self) -> Iterator[Any]:
            yield from list(changed(model()).items())[:2]
            raise RuntimeError("the trainer failed")

    with pytest.raises(RuntimeError, match="the trainer failed"):
        writer.publish(Broken())
    assert deltafmt.open(url).latest() == 0
    assert list(open_store(url).entries("data/00000000000000000001")) == []
