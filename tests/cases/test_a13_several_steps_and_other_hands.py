"""A13: several steps per publish, and parameters that something else than the optimizer changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import deltafmt
from tests.cases.common import assert_same, new_root

ELEMENTS = 50_000


class Run:
    """A trainer of a few parameters and a buffer, published as BF16 by an `AdamWDetector`."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.weights = torch.nn.Parameter(torch.randn(ELEMENTS) * 0.02)
        self.other = torch.nn.Parameter(torch.randn(300, 40) * 0.02)
        self.frozen = torch.nn.Parameter(torch.randn(2000) * 0.02, requires_grad=False)
        self.bias = torch.zeros(64)
        self.named = {
            "w": self.weights,
            "other": self.other,
            "frozen": self.frozen,
            "router.bias": self.bias,
        }
        self.optimizer = torch.optim.AdamW(
            [self.weights, self.other, self.frozen], lr=1e-6, betas=(0.9, 0.95), weight_decay=0.01
        )
        self.detector = deltafmt.AdamWDetector(self.optimizer, self.named, **options)
        self.root = new_root()
        self.writer = deltafmt.Writer(
            self.root,
            detector=self.detector,
            publish_dtype="bfloat16",
            options=deltafmt.WriterOptions(domain_elements=16384),
        )
        self.writer.publish_anchor(self.named)
        self.lineage = deltafmt.open(self.root)

    def step(self, *, without: str = "") -> None:
        for name in ("w", "other"):
            parameter = self.named[name]
            parameter.grad = None if name == without else torch.randn(parameter.shape) * 1e-3
        self.optimizer.step()

    def publish(self) -> int:
        version = self.writer.publish(self.named)
        expected = {name: tensor.detach().bfloat16() for name, tensor in self.named.items()}
        assert_same(self.lineage.read(version), expected)
        return version


def test_steps_add_up() -> None:
    run = Run()
    for step in range(24):
        run.step()
        if step % 4 == 3:
            run.publish()
    assert run.detector.report.lost == 0


def test_a_buffer_without_gradient_and_a_frozen_parameter() -> None:
    run = Run()
    run.step()
    run.bias += 0.25
    run.publish()
    with torch.no_grad():
        run.frozen[7] = 1.0
    run.step()
    version = run.publish()
    assert run.lineage.manifest(version).changed is None
    run.frozen.data[9] = 2.0
    version = run.publish()
    assert run.lineage.manifest(version).changed == 1, "found from storage, so that old bits are known"


@pytest.mark.parametrize("when", ["before a step", "after a step", "between two"])
@pytest.mark.parametrize("how", ["data", "counted", "storage", "numpy"])
def test_a_parameter_that_is_loaded_anew(how: str, when: str) -> None:
    run = Run()
    run.step()
    run.publish()

    def load() -> None:
        fresh = run.weights.detach() + (torch.arange(ELEMENTS) % 97 == 0) * 0.125
        if how == "data":
            run.weights.data.copy_(fresh)
        elif how == "counted":
            with torch.no_grad():
                run.weights.copy_(fresh)
        elif how == "storage":
            run.weights.data = fresh
        else:
            run.weights.detach().numpy()[:] = fresh.numpy()

    if when != "before a step":
        run.step()
    load()
    if when != "after a step":
        run.step()
    run.publish()
    assert run.detector.report.lost >= 1
    run.step()
    run.publish()


def test_a_step_that_is_skipped_or_has_no_gradient() -> None:
    run = Run()
    run.step(without="other")
    run.publish()
    version = run.publish()
    assert run.lineage.manifest(version).listed == 0
    run.step()
    run.publish()
    run.step(without="w")
    run.publish()
    assert run.detector.report.lost == 0


def test_a_loss_scaler_that_finds_infinities_skips_the_step() -> None:
    run = Run()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for overflow in (False, True, False):
        loss = (run.weights * 1e-3).sum() + (run.other * 1e-3).sum()
        run.optimizer.zero_grad()
        scaler.scale(loss).backward()
        if overflow:
            assert run.weights.grad is not None
            run.weights.grad[3] = torch.inf
        scaler.step(run.optimizer)
        scaler.update()
        run.publish()
    assert run.detector.report.steps == 2
    assert run.detector.report.lost == 0


def test_steps_before_the_first_publish_and_after_resuming() -> None:
    run = Run()
    run.step()
    run.publish()
    run.writer.close()
    run.step()
    writer = deltafmt.Writer(run.root, detector=run.detector, publish_dtype="bfloat16")
    run.writer = writer
    run.step()
    run.publish()
    run.step()
    run.publish()


def test_an_optimizer_state_that_is_loaded_between_steps() -> None:
    run = Run()
    empty = copy.deepcopy(run.optimizer.state_dict())
    for state in (empty, None, empty):
        for _ in range(2):
            run.step()
        kept = copy.deepcopy(run.optimizer.state_dict())
        run.optimizer.load_state_dict(kept if state is None else copy.deepcopy(state))
        run.step(without="other")
        run.publish()
    run.step()
    run.publish()


def test_a_failed_publish_keeps_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.step()
    store = run.writer._store if hasattr(run.writer, "_store") else run.writer._history.store
    with monkeypatch.context() as patch:
        patch.setattr(store, "put_if_absent", _fail)
        with pytest.raises(deltafmt.StoreError):
            run.writer.publish(run.named)
    run.step()
    run.publish()


def _fail(*_: object) -> None:
    raise deltafmt.StoreError("no", kind="store-failed")


def test_what_cannot_be_undone_is_refused() -> None:
    narrow = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    for optimizer in (torch.optim.AdamW([narrow]), torch.optim.SGD([narrow], lr=1.0)):
        with pytest.raises(deltafmt.UnsupportedError, match="SnapshotDetector") as caught:
            deltafmt.AdamWDetector(optimizer, {"w": narrow})
        assert caught.value.kind == "detector-unsupported"
