"""What a receiver holds after each call, whatever goes wrong in it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from deltafmt import (
    BaseMismatchError,
    ChecksumError,
    LayoutError,
    NotFoundError,
    Receiver,
    StoreError,
)
from deltafmt.format import keys
from deltafmt.read import apply as apply_module
from deltafmt.read import prepared as prepared_module
from deltafmt.read import replica as replica_module
from deltafmt.read.options import ReadOptions
from deltafmt.read.pool import run_bounded
from tests.reading import Course, Tensors, blank, copied, same, wrapped


@pytest.fixture
def course() -> Course:
    torch.manual_seed(1)
    made = Course({"a": torch.randn(40, 9).bfloat16(), "b": torch.randn(77), "c": torch.arange(9)})
    made.anchor()
    for seed in range(4):
        made.step(seed=seed)
    return made


@pytest.fixture
def live(course: Course) -> Tensors:
    return blank(course.tensors)


def test_a_cold_start_then_every_version(course: Course, live: Tensors) -> None:
    with Receiver(course.root, live) as receiver:
        assert receiver.version is None
        for version in (0, 1, 2, 4):
            assert receiver.advance(version) == receiver.version == version
            assert same(live, course.versions[version])
            proof = receiver.verify()
            assert (proof.complete, proof.proven_elements) == (True, 40 * 9 + 77 + 9)
        assert receiver.advance() == 4, "there is nothing newer"
        assert receiver.advance(1) == 1, "an older one is reached from the anchor"
        assert same(live, course.versions[1])


def test_a_late_joiner_starts_at_the_newest(course: Course, live: Tensors) -> None:
    assert Receiver(course.root, live).advance() == 4
    assert same(live, course.versions[4])


def test_live_bits_are_adopted_only_if_they_are_the_version(course: Course, live: Tensors) -> None:
    receiver = Receiver(course.root, live)
    with pytest.raises(BaseMismatchError) as caught:
        receiver.adopt(2)
    assert caught.value.kind == "content-mismatch"
    assert receiver.version is None
    for name, tensor in course.versions[2].items():
        live[name].copy_(tensor)
    store = wrapped(receiver)
    assert receiver.adopt(2) == receiver.version == 2
    assert not store.reads, "no weights are read"
    receiver.advance()
    assert same(live, course.versions[4])


def test_an_anchor_without_data_serves_only_who_has_adopted_it(live: Tensors) -> None:
    made = Course(blank(live))
    made.anchor(store_data=False, meta={"hint": "hub/model"})
    made.step(seed=1)
    with pytest.raises(NotFoundError, match="hub/model"):
        Receiver(made.root, live).advance()
    mine = copied(made.versions[0])
    receiver = Receiver(made.root, mine)
    receiver.adopt(0)
    assert receiver.advance() == 1
    assert same(mine, made.versions[1])


def test_prefetched_bytes_are_used_once_and_dropped_by_anything_else(course: Course, live: Tensors) -> None:
    receiver = Receiver(course.root, live)
    receiver.advance(1)
    store = wrapped(receiver)
    assert receiver.prefetch(3) == 3
    assert same(live, course.versions[1])
    read = store.bytes_read
    assert read > 0
    assert receiver.advance() == 3, "what was prefetched, not the newest"
    assert store.bytes_read == read
    assert same(live, course.versions[3])
    assert receiver.advance() == 4
    receiver.prefetch(2)
    assert receiver.advance(4) == 4, "another version drops it"
    receiver.prefetch(2)
    receiver.adopt(4)
    assert receiver.advance() == 4
    receiver.prefetch(2)
    receiver.invalidate()
    assert receiver.advance() == 4
    assert same(live, course.versions[4])


def test_a_step_in_parts_is_kept_or_taken_back(course: Course, live: Tensors) -> None:
    receiver = Receiver(course.root, live)
    receiver.advance(1)
    step = receiver.prepare(3)
    assert (step.version, step.reversible, receiver.version) == (3, True, 1)
    assert same(live, course.versions[1])
    step.apply()
    assert receiver.version == 3
    assert same(live, course.versions[3])
    step.rollback()
    assert receiver.version == 1
    assert same(live, course.versions[1])
    step = receiver.prepare()
    step.apply()
    step.keep()
    assert receiver.version == 4
    assert same(live, course.versions[4])


@pytest.mark.parametrize(
    "calls",
    [["keep"], ["rollback"], ["apply", "apply"], ["apply", "keep", "rollback"], ["apply", "keep", "keep"]],
)
def test_parts_out_of_order_are_refused(course: Course, live: Tensors, calls: list[str]) -> None:
    receiver = Receiver(course.root, live)
    receiver.advance(1)
    step = receiver.prepare(3)
    *fine, wrong = calls
    for call in fine:
        getattr(step, call)()
    with pytest.raises(BaseMismatchError) as caught:
        getattr(step, wrong)()
    assert caught.value.kind == "receiver-state"


def test_a_prepared_step_goes_stale(course: Course, live: Tensors) -> None:
    receiver = Receiver(course.root, live)
    receiver.advance(1)
    step = receiver.prepare(3)
    receiver.advance(2)
    with pytest.raises(BaseMismatchError):
        step.apply()
    assert same(live, course.versions[2])


def test_what_was_prefetched_from_another_version_is_fetched_anew(course: Course, live: Tensors) -> None:
    receiver = Receiver(course.root, live)
    receiver.advance(1)
    step = receiver.prepare(2)
    receiver.prefetch(3)
    step.apply()
    step.keep()
    assert receiver.advance(3) == 3
    assert same(live, course.versions[3])


def failing(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The domain written after so many others is written, and then fails."""
    real: Callable[..., None] = apply_module.apply_domain
    calls = iter(range(1000))

    def apply_domain(*arguments: Any) -> None:
        real(*arguments)
        if next(calls) >= after:
            raise OSError("out of luck")

    monkeypatch.setattr(replica_module, "apply_domain", apply_domain)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize("wanted", [2, 4])
def test_a_failure_inside_apply_restores_every_bit(
    course: Course, live: Tensors, monkeypatch: pytest.MonkeyPatch, after: int, wanted: int, streaming: bool
) -> None:
    receiver = Receiver(course.root, live)
    receiver.advance(1)
    with monkeypatch.context() as patch:
        failing(patch, after)
        with pytest.raises(OSError, match="out of luck"):
            receiver.advance(wanted, streaming=streaming)
    assert receiver.version == 1
    assert same(live, course.versions[1])
    assert receiver.advance(wanted) == wanted
    assert same(live, course.versions[wanted])


def test_going_back_over_an_anchor_restores_every_bit_too(
    course: Course, live: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = Receiver(course.root, live)
    receiver.advance(3)
    with monkeypatch.context() as patch:
        failing(patch, 2)
        with pytest.raises(OSError, match="out of luck"):
            receiver.advance(1)
    assert receiver.version == 3
    assert same(live, course.versions[3])


@pytest.mark.parametrize("wanted", [0, 3])
def test_without_room_for_old_bits_the_version_is_unknown_from_the_first_write(
    course: Course, live: Tensors, monkeypatch: pytest.MonkeyPatch, wanted: int
) -> None:
    receiver = Receiver(course.root, live, options=ReadOptions(undo_bytes=10))
    receiver.advance(1)
    step = receiver.prepare(wanted)
    assert not step.reversible
    assert receiver.version == 1
    with monkeypatch.context() as patch:
        failing(patch, 3)
        with pytest.raises(OSError, match="out of luck"):
            step.apply()
    assert receiver.version is None
    receiver.advance(wanted)
    assert same(live, course.versions[wanted])
    step = receiver.prepare(4)
    step.apply()
    step.rollback()
    assert receiver.version is None, "there is nothing to go back to"


def test_a_failed_cold_start_leaves_no_version(
    course: Course, live: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = Receiver(course.root, live)
    with monkeypatch.context() as patch:
        failing(patch, 4)
        with pytest.raises(OSError, match="out of luck"):
            receiver.advance()
    assert receiver.version is None
    receiver.advance()
    assert same(live, course.versions[4])


def flip(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("change", [flip, lambda data: data[:-1], lambda data: data + b"\0"])
def test_a_read_that_goes_wrong_once_is_repeated(
    course: Course, live: Tensors, change: Callable[[bytes], bytes], streaming: bool
) -> None:
    receiver = Receiver(course.root, live)
    receiver.advance(1)
    times = iter(range(1000))
    store = wrapped(receiver, lambda key, start, data: change(data) if next(times) == 0 else data)
    receiver.advance(3, streaming=streaming)
    assert same(live, course.versions[3])
    assert len(store.reads) >= 2


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("change", "error"),
    [(flip, ChecksumError), (lambda data: data[:-1], StoreError), (lambda data: data + b"\0", StoreError)],
)
def test_a_read_that_stays_wrong_never_reaches_a_live_tensor(
    course: Course, live: Tensors, change: Callable[[bytes], bytes], error: type[Exception], streaming: bool
) -> None:
    receiver = Receiver(course.root, live)
    receiver.advance(1)
    last = keys.shard_key(
        version=3,
        base=2,
        attempt=course.writer._history.first_way(3).manifest.attempt,
        writer=0,
        further=False,
    )
    wrapped(receiver, lambda key, start, data: change(data) if key == last else data)
    with pytest.raises(error):
        receiver.advance(3, streaming=streaming)
    assert receiver.version == 1
    assert same(live, course.versions[1])


def test_tampered_bits_are_found_by_a_scan_and_repaired(course: Course, live: Tensors) -> None:
    receiver = Receiver(course.root, live)
    receiver.advance(2)
    live["b"][5] += 1
    with pytest.raises(ChecksumError, match="'b'") as caught:
        receiver.verify()
    assert caught.value.kind == "content-mismatch"
    assert receiver.version is None
    receiver.advance()
    assert same(live, course.versions[4])
    assert receiver.verify().complete


def test_a_closed_receiver_does_nothing(course: Course, live: Tensors) -> None:
    with Receiver(course.root, live) as receiver:
        receiver.advance()
    for call in (receiver.advance, receiver.prefetch, receiver.prepare, receiver.verify):
        with pytest.raises(BaseMismatchError) as caught:
            call()
        assert caught.value.kind == "receiver-state"
    assert same(live, course.versions[4])


def test_what_does_not_exist_is_said(course: Course, live: Tensors) -> None:
    with pytest.raises(NotFoundError) as caught:
        Receiver(course.root + "-nowhere", live)
    assert caught.value.kind == "lineage-missing"
    with pytest.raises(NotFoundError) as caught:
        Receiver(course.root, live).advance(99)
    assert caught.value.kind == "version-missing"


def test_misfits_are_refused_when_opening(course: Course, live: Tensors) -> None:
    misfits: list[tuple[str, Tensors]] = [
        ("target-unfilled", {**live, "z": torch.zeros(3)}),
        ("shape-mismatch", {**live, "a": torch.zeros(9, 40, dtype=torch.bfloat16)}),
        ("dtype-mismatch", {**live, "b": torch.zeros(77, dtype=torch.float16)}),
    ]
    for kind, tensors in misfits:
        with pytest.raises(LayoutError) as caught:
            Receiver(course.root, tensors)
        assert caught.value.kind == kind


def test_memory_that_was_exchanged_is_not_written_to(course: Course, live: Tensors) -> None:
    receiver = Receiver(course.root, live)
    receiver.advance(1)
    live["b"].data = torch.zeros(77)
    with pytest.raises(LayoutError) as caught:
        receiver.advance()
    assert caught.value.kind == "target-moved"


def test_a_cut_manifest_is_not_committed(course: Course, live: Tensors) -> None:
    receiver = Receiver(course.root, live)
    store = receiver._history.store
    store.put(keys.version_key(5), store.read(keys.version_key(4))[:50])
    store.put(keys.version_key(6), b"")
    store.put("versions/notes.txt", b"noise")
    assert receiver.advance() == 4


def test_an_interrupt_while_a_failed_step_is_undone(
    course: Course, live: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = Receiver(course.root, live, options=ReadOptions(threads=1))
    receiver.advance(1)
    before = copied(live)
    done: list[int] = []
    undo, real = apply_module.Undo.run, apply_module.apply_domain

    def interrupted(self: apply_module.Undo) -> None:
        if not done:
            done.append(1)
            self.actions.pop()()
            raise KeyboardInterrupt
        undo(self)

    def failing(*arguments: Any) -> None:
        real(*arguments)
        if len(done) == 0 and len(arguments[-1].actions) > 1:
            raise RuntimeError

    monkeypatch.setattr(apply_module.Undo, "run", interrupted)
    monkeypatch.setattr(replica_module, "apply_domain", failing)
    with pytest.raises(KeyboardInterrupt):
        receiver.advance(3)
    assert done
    assert receiver.version == 1
    assert same(live, before)
    monkeypatch.undo()
    receiver.advance(3)
    assert same(live, course.versions[3])


def test_an_interrupt_when_all_is_written(
    course: Course, live: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = Receiver(course.root, live)
    receiver.advance(1)
    before = copied(live)
    whole = prepared_module.Step.apply

    def late(self: prepared_module.Step, replica: Any) -> None:
        whole(self, replica)
        raise KeyboardInterrupt

    monkeypatch.setattr(prepared_module.Step, "apply", late)
    with pytest.raises(KeyboardInterrupt):
        receiver.advance(3)
    assert receiver.version == 1
    assert same(live, before)


def test_what_is_under_way_ends_before_an_interrupt_is_told() -> None:
    running, ended = threading.Event(), threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def work(_: int) -> None:
        running.set()
        for _ in range(3):
            time.sleep(0.1)
            signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.1)
        ended.set()

    def items() -> Iterator[int]:
        yield 0
        running.wait()
        raise StoreError("gone", kind="store-failed")

    # What is started in the background of a shell is deaf to this signal otherwise.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_bounded(work, items(), threads=1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.is_set()


def test_a_worker_that_the_pool_does_not_know_does_nothing_after_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when the interrupt arrives while the pool waits for its thread to have started."""
    start, done, gate = threading.Thread.start, [], threading.Event()

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("deltafmt-work"):
            raise KeyboardInterrupt

    def work(number: int) -> None:
        gate.wait(0.2)
        done.append(number)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_bounded(work, range(4), threads=2)
    monkeypatch.undo()
    after = list(done)
    time.sleep(0.5)
    assert done == after, "nothing is written beside what undoes it"
