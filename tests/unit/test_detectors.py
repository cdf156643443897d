"""Detectors that mark changes, on a transformer that is really trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import deltafmt
from deltafmt.errors import UnsupportedError
from deltafmt.write import marked
from tests.cases.common import assert_same, new_root

OPTIONS = deltafmt.WriterOptions(domain_elements=8192)


class Model(nn.Module):
    """A small transformer with a tied head and a buffer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(64, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))
        self.to(dtype)

    def loss(self, step: int) -> torch.Tensor:
        tokens = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(step))
        logits = self.head(self.layer(self.embed(tokens[:, :-1])))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def narrow(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach().bfloat16() if tensor.dtype is torch.float32 else tensor.detach().clone()
        for name, tensor in model.state_dict().items()
    }


def scheduled(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))


def train(
    model: Model,
    optimizer: Any,
    detector: Any,
    *,
    after: Callable[[], None] = lambda: None,
    per_publish: int = 1,
    publish_dtype: Any = "bfloat16",
) -> None:
    """Twelve steps, each version held against the model bit for bit."""
    root, scheduler = new_root(), scheduled(optimizer)
    writer = deltafmt.Writer(root, detector=detector, publish_dtype=publish_dtype, options=OPTIONS)
    writer.publish_anchor(model.state_dict())
    lineage = deltafmt.open(root)
    for step in range(12):
        optimizer.zero_grad()
        model.loss(step).backward()
        optimizer.step()
        after()
        scheduler.step()
        if step % per_publish == per_publish - 1:
            version = writer.publish(model.state_dict())
            assert_same(lineage.read(version), narrow(model))
    assert lineage.verify().ok


def adamw(model: nn.Module, lr: float = 1e-4, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr, **options)


@pytest.mark.parametrize("per_publish", [1, 4])
def test_undoing_the_steps_of_a_transformer(per_publish: int) -> None:
    model = Model()
    optimizer = adamw(model)
    detector = deltafmt.AdamWDetector(optimizer, model.named_parameters(), audit_every=2)
    train(model, optimizer, detector, per_publish=per_publish)
    assert detector.lost == 0
    assert detector.nbytes < sum(t.numel() for t in model.parameters()) / 3


@pytest.mark.parametrize("per_publish", [1, 4])
@pytest.mark.parametrize("make", [adamw, lambda model: torch.optim.SGD(model.parameters(), lr=1e-2)])
def test_comparing_casts_of_parameters_that_are_their_own_masters(make: Any, per_publish: int) -> None:
    model = Model()
    optimizer = make(model)
    detector = deltafmt.CastDetector(optimizer, model.named_parameters())
    train(model, optimizer, detector, per_publish=per_publish)
    assert detector.lost == 0


def test_comparing_narrow_parameters_without_masters() -> None:
    model = Model(torch.bfloat16)
    optimizer = adamw(model, lr=1e-3)
    detector = deltafmt.CastDetector(optimizer, model.named_parameters())
    assert detector.transient == 2 * sum(p.numel() for p in model.parameters())
    train(model, optimizer, detector, publish_dtype=None)
    assert detector.lost == 0


class Masters:
    """A BF16 model whose optimizer has FP32 masters, as mixed precision has it."""

    def __init__(self) -> None:
        self.model = Model(torch.bfloat16)
        self.copies = list(self.model.parameters())
        self.masters = [nn.Parameter(p.detach().float()) for p in self.copies]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-4)
        # The gradients of the copies are the masters'.
        self.optimizer.register_step_pre_hook(lambda *_: self.hand_over())

    def hand_over(self) -> None:
        for copy, master in zip(self.copies, self.masters, strict=True):
            master.grad = None if copy.grad is None else copy.grad.float()
            copy.grad = None

    def refresh(self) -> None:
        with torch.no_grad():
            for copy, master in zip(self.copies, self.masters, strict=True):
                copy.copy_(master)


@pytest.mark.parametrize("per_publish", [1, 3])
def test_comparing_masters_with_their_copies(per_publish: int) -> None:
    kit = Masters()
    detector = deltafmt.CastDetector(kit.optimizer, kit.model.named_parameters())
    assert detector.transient == 0
    train(kit.model, kit.optimizer, detector, after=kit.refresh, per_publish=per_publish, publish_dtype=None)
    assert detector.lost == 0


def test_copies_that_are_refreshed_within_the_step_or_written_to_by_others() -> None:
    kit = Masters()
    kit.optimizer.register_step_post_hook(lambda *_: kit.refresh())
    detector = deltafmt.CastDetector(kit.optimizer, kit.model.named_parameters())
    train(kit.model, kit.optimizer, detector, publish_dtype=None)
    assert detector.lost > 0, "the old bits were gone before the detector saw them"
    kit = Masters()
    detector = deltafmt.CastDetector(kit.optimizer, kit.model.named_parameters())

    def spoil() -> None:
        kit.refresh()
        kit.copies[1].data.view(-1)[5] += 1

    train(kit.model, kit.optimizer, detector, after=spoil, publish_dtype=None)
    assert detector.lost > 0


def test_masters_by_name_and_masters_that_do_not_fit() -> None:
    kit = Masters()
    named = dict(kit.model.named_parameters())
    masters: dict[str, torch.Tensor] = dict(zip(named, kit.masters, strict=True))
    detector = deltafmt.CastDetector(kit.optimizer, named, masters=masters)
    train(kit.model, kit.optimizer, detector, after=kit.refresh, publish_dtype=None)
    fewer = torch.optim.SGD(kit.masters[1:], lr=1.0)
    with pytest.raises(UnsupportedError, match="masters") as caught:
        deltafmt.CastDetector(fewer, named)
    assert caught.value.kind == "detector-unsupported"
    masters[next(iter(masters))] = torch.zeros(3)
    with pytest.raises(UnsupportedError, match="contiguous"):
        deltafmt.CastDetector(kit.optimizer, named, masters=masters)


def test_fp32_that_is_published_as_it_is_is_not_taken_for_bf16() -> None:
    weights = nn.Parameter(torch.randn(5000))
    optimizer = torch.optim.AdamW([weights], lr=1e-7)
    detector = deltafmt.AdamWDetector(optimizer, {"w": weights})
    root = new_root()
    writer = deltafmt.Writer(root, detector=detector)
    writer.publish_anchor({"w": weights})
    for _ in range(2):
        weights.grad = torch.randn(5000)
        optimizer.step()
        version = writer.publish({"w": weights})
        assert_same(deltafmt.open(root).read(version), {"w": weights.detach()})


def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the base was read from storage")

    monkeypatch.setattr(marked, "stored_bits", refuse)


def test_parameters_that_are_views_of_one_flat_one(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = nn.Parameter(torch.randn(9000) * 0.02)
    optimizer = torch.optim.AdamW([flat], lr=1e-5)
    detector = deltafmt.AdamWDetector(optimizer, {"flat": flat})
    root = new_root()
    writer = deltafmt.Writer(root, detector=detector, publish_dtype="bfloat16")

    def parts() -> dict[str, torch.Tensor]:
        first, second = flat.detach()[:4000].view(40, 100), flat.detach()[4000:].view(50, 100)
        return {"a": first, "b": second.T, "c": second[::2, 10:20]}

    writer.publish_anchor(parts())
    no_reading(monkeypatch)
    for _ in range(3):
        flat.grad = torch.randn(9000)
        optimizer.step()
        version = writer.publish(parts())
        found = deltafmt.open(root).read(version)
        assert_same(found, {name: part.bfloat16() for name, part in parts().items()})


def test_a_buffer_beside_marked_tensors_costs_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    optimizer = adamw(model)
    detector = deltafmt.AdamWDetector(optimizer, model.named_parameters())
    no_reading(monkeypatch)
    train(model, optimizer, detector)


def test_the_tensors_may_change_while_a_version_is_stored_in_the_background() -> None:
    model = Model()
    optimizer = adamw(model, lr=1e-3)
    detector = deltafmt.AdamWDetector(optimizer, model.named_parameters())
    root = new_root()
    writer = deltafmt.Writer(root, detector=detector, publish_dtype="bfloat16", options=OPTIONS)
    writer.publish_anchor(model.state_dict())
    pending = []
    for step in range(4):
        model.loss(step).backward()
        optimizer.step()
        pending.append((writer.publish_async(model.state_dict()), narrow(model)))
        model.loss(step + 10).backward()
        optimizer.step()
    for version, expected in pending:
        assert_same(deltafmt.open(root).read(version.result()), expected)


def test_no_anchor_is_made_of_tensors_that_may_have_moved_on(caplog: pytest.LogCaptureFixture) -> None:
    weights = nn.Parameter(torch.randn(9000))
    detector = deltafmt.AdamWDetector(torch.optim.AdamW([weights]), {"w": weights})
    root = new_root()
    options = deltafmt.WriterOptions(anchor_every=1)
    writer = deltafmt.Writer(root, detector=detector, publish_dtype="bfloat16", options=options)
    writer.publish_anchor({"w": weights})
    lineage = deltafmt.open(root)
    weights.data[0] += 1
    assert writer.publish({"w": weights}) == 1
    assert lineage.log()[-1].ways == (0, None)
    caplog.clear()
    weights.data[0] += 1
    pending = writer.publish_async({"w": weights})
    weights.data += 1
    assert pending.result() == 2
    assert lineage.log()[-1].ways == (1,)
    assert "add_anchor reads them from storage" in caplog.text
    assert lineage.verify().ok


def test_a_closed_detector_has_no_hooks_and_knows_nothing() -> None:
    model = Model()
    optimizer = adamw(model)
    for kind in (deltafmt.AdamWDetector, deltafmt.CastDetector):
        detector: Any = kind(optimizer, model.named_parameters())
        assert len(optimizer._optimizer_step_post_hooks) == 1
        detector.close()
        assert not optimizer._optimizer_step_post_hooks
        assert not optimizer._optimizer_step_pre_hooks


def test_the_choice_goes_by_memory_and_by_what_the_optimizer_allows() -> None:
    model = Model()
    elements = sum(t.numel() for t in model.parameters())
    for budget, kind in ((None, deltafmt.SnapshotDetector), (4 * elements, deltafmt.SnapshotDetector)):
        chosen: Any = deltafmt.detector_for(model, adamw(model), budget)
        assert isinstance(chosen, kind)
        assert "MiB" in str(chosen.reason)
    assert isinstance(deltafmt.detector_for(model, adamw(model), elements), deltafmt.AdamWDetector)
    kit = Masters()
    chosen = deltafmt.detector_for(kit.model, kit.optimizer, elements)
    assert isinstance(chosen, deltafmt.CastDetector)
    with pytest.raises(UnsupportedError, match="while the optimizer steps"):
        deltafmt.detector_for(model, torch.optim.SGD(model.parameters(), lr=1.0), elements)
    with pytest.raises(UnsupportedError, match="so little memory") as caught:
        deltafmt.detector_for(model, adamw(model), 10)
    assert caught.value.kind == "detector-unsupported"
