"""A receiver that follows: new versions are staged behind the engine's back, whatever storage does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from deltafmt import BaseMismatchError, Receiver
from deltafmt.read.follow import Pace
from deltafmt.testing.faulty import FaultyStore, unreachable
from tests.reading import Course, Tensors, blank, copied, same, wrapped

POLL = 0.005
LONG = 60.0
"""Far more than any wait here takes."""


@pytest.fixture
def course() -> Course:
    torch.manual_seed(1)
    made = Course({"a": torch.randn(40, 9).bfloat16(), "b": torch.randn(77)})
    made.anchor()
    return made


@pytest.fixture
def receiver(course: Course) -> Iterator[Receiver]:
    with Receiver(course.root, blank(course.tensors)) as made:
        made.advance()
        yield made


def live(receiver: Receiver) -> Tensors:
    return receiver._replica.views.targets.tensors


def test_versions_are_staged_and_then_applied_without_reading(course: Course, receiver: Receiver) -> None:
    store = wrapped(receiver)
    before = copied(live(receiver))
    with receiver.follow(poll_seconds=POLL) as follower:
        assert follower.version is None
        course.step(seed=1)
        assert follower.wait(1, LONG) == 1
        assert same(live(receiver), before), "live tensors are untouched until advance"
        read = store.bytes_read
        assert receiver.advance() == 1
        assert store.bytes_read == read
        course.step(seed=2)
        assert follower.wait(2, LONG) == 2
        assert receiver.advance() == 2
    assert same(live(receiver), course.versions[2])
    assert not follower.running


def test_an_engine_may_advance_from_the_call(course: Course, receiver: Receiver) -> None:
    seen: list[int] = []
    reached = threading.Event()

    def on_version(version: int) -> None:
        seen.append(receiver.advance())
        assert seen[-1] == version
        if version == 3:
            reached.set()

    with receiver.follow(poll_seconds=POLL, on_version=on_version):
        for seed in range(3):
            course.step(seed=seed)
        assert reached.wait(LONG)
    assert seen == sorted(set(seen)), "each version at most once, in order"
    assert same(live(receiver), course.versions[3])


def test_what_is_staged_is_not_fetched_again(course: Course, receiver: Receiver) -> None:
    store = wrapped(receiver)
    with receiver.follow(poll_seconds=POLL) as follower:
        for version in (1, 2, 3):
            course.step(seed=version)
            follower.wait(version, LONG)
        # Which versions are skipped over is a matter of time, but no shard is read twice.
        assert len(store.reads) == len(set(store.reads))
        assert receiver.advance() == 3
    assert same(live(receiver), course.versions[3])


def test_a_cold_start_is_announced(course: Course) -> None:
    tensors = blank(course.tensors)
    with Receiver(course.root, tensors) as receiver, receiver.follow(poll_seconds=POLL) as follower:
        assert follower.wait(0, LONG) == 0
        assert receiver.advance() == 0
        assert same(tensors, course.versions[0])


def test_it_recovers_by_itself_when_storage_comes_back(
    course: Course, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    store = FaultyStore(receiver._history.store)
    receiver._history.store = store
    failed = threading.Semaphore(0)

    def noticed(call: object, action: Callable[[], object]) -> object:
        failed.release()
        return unreachable()(call, action)  # type: ignore[arg-type]

    store.inject(noticed, times=10_000)
    course.step(seed=1)
    with receiver.follow(poll_seconds=POLL) as follower:
        for _ in range(12):
            assert failed.acquire(timeout=LONG)
        assert follower.wait(1, 0) is None
        assert follower.running
        assert "connection is gone" in str(follower.error)
        store.heal()
        assert follower.wait(1, LONG) == 1
        assert receiver.advance() == 1
    assert same(live(receiver), course.versions[1])
    complaints = [record for record in caplog.records if "following goes on" in record.message]
    assert len(complaints) == 1, "one for the outage, not one for each look"


def test_a_failing_call_ends_nothing(course: Course, receiver: Receiver) -> None:
    called = threading.Semaphore(0)

    def on_version(_version: int) -> None:
        called.release()
        raise RuntimeError("the engine is busy")

    with receiver.follow(poll_seconds=POLL, on_version=on_version) as follower:
        for seed in (1, 2):
            version = course.step(seed=seed)
            assert called.acquire(timeout=LONG)
            assert follower.wait(version, LONG) == version
        assert receiver.advance() == 2


def test_a_call_that_failed_is_made_again(course: Course) -> None:
    """A cold start reads only when it is applied: an outage then must not leave the engine waiting for a version."""
    tensors = blank(course.tensors)
    with Receiver(course.root, tensors) as receiver:
        store = FaultyStore(receiver._history.store)
        receiver._history.store = store
        calls: list[int] = []

        def on_version(version: int) -> None:
            calls.append(version)
            if len(calls) == 1:
                store.inject(unreachable(), times=10_000)
            elif len(calls) == 3:
                store.heal()
            receiver.advance(version)
            advanced.set()

        advanced = threading.Event()
        with receiver.follow(poll_seconds=POLL, on_version=on_version) as follower:
            for _ in range(2000):
                if advanced.wait(POLL):
                    break
                if len(calls) == 1 and follower.error is not None:
                    store.heal()
            assert advanced.is_set()
            assert calls[:2] == [0, 0]
            assert len(calls) == 2, "a call that has returned is not made again"
        assert same(tensors, course.versions[0])


def test_another_advance_meanwhile_makes_it_start_over(course: Course, receiver: Receiver) -> None:
    """The version held changes while chunks are on their way: they do not fit any more, and are not used."""
    course.step(seed=1)
    started, go_on = threading.Event(), threading.Event()

    def hold(key: str, start: int, data: bytes) -> bytes:
        if threading.current_thread().name == "deltafmt-follow" and not started.is_set():
            started.set()
            assert go_on.wait(LONG)
        return data

    wrapped(receiver, hold)
    with receiver.follow(poll_seconds=POLL) as follower:
        assert started.wait(LONG)
        assert receiver.advance(1) == 1, "calls are served while weights are fetched"
        course.step(seed=2)
        go_on.set()
        assert follower.wait(2, LONG) == 2
        assert receiver.advance() == 2
    assert same(live(receiver), course.versions[2])


def test_stopping(course: Course) -> None:
    receiver = Receiver(course.root, blank(course.tensors))
    follower = receiver.follow(poll_seconds=3600)
    with pytest.raises(BaseMismatchError) as caught:
        receiver.follow()
    assert caught.value.kind == "receiver-state"
    follower.stop()
    follower.stop()
    inside: list[bool] = []

    def stop_here(_version: int) -> None:
        receiver.close()
        inside.append(True)

    again = receiver.follow(poll_seconds=POLL, on_version=stop_here)
    again._thread.join(LONG)
    assert inside
    assert not again.running
    with pytest.raises(BaseMismatchError):
        receiver.follow()
    assert again.wait(99, LONG) is None, "nobody waits for a follower that has stopped"


def test_pauses_grow_while_looks_fail_and_vary() -> None:
    pace = Pace(2.0)
    usual = {pace.succeeded() for _ in range(50)}
    assert len(usual) > 40, "readers do not look in step"
    assert all(1.0 <= pause <= 3.0 for pause in usual)
    growing = [pace.failed() for _ in range(60)]
    for number, pause in enumerate(growing, 1):
        middle = min(60.0, 2.0 * 2**number)
        assert middle / 2 <= pause <= middle * 1.5
    assert 1.0 <= pace.succeeded() <= 3.0
    assert Pace(300.0).failed() >= 150.0, "never sooner than when all is well"
    with pytest.raises(ValueError, match="positive"):
        Pace(0)
