"""transformers' Trainer publishes through the callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import deltafmt
from deltafmt.integrations.transformers import PublishCallback
from tests.ranks import assert_holds


def trainer(folder: Path, callback: PublishCallback, steps: int) -> Trainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    tokens = torch.randint(32, (8, 6))
    arguments: dict[str, Any] = {
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return Trainer(
        LlamaForCausalLM(config),
        TrainingArguments(
            str(folder), max_steps=steps, per_device_train_batch_size=2, learning_rate=1e-4, **arguments
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[callback],
    )


def test_every_so_many_steps_and_the_last_one(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    seen: list[dict[str, torch.Tensor]] = []

    class Kept(PublishCallback):
        def _publish(self, model: torch.nn.Module, step: int) -> None:
            super()._publish(model, step)
            seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})

    trainer(tmp_path, Kept(deltafmt.Writer(root), every_steps=2), 5).train()
    infos = deltafmt.open(root).log()
    assert [info.step for info in infos] == [0, 2, 4, 5]
    assert [info.base for info in infos] == [None, 0, 1, 2]
    for version, state in enumerate(seen):
        assert_holds(root, version, state)
    # Another run on the same root goes on, from whatever it starts with.
    trainer(tmp_path, Kept(deltafmt.Writer(root), every_steps=3), 2).train()
    infos = deltafmt.open(root).log()[4:]
    assert [(info.base, info.step) for info in infos] == [(3, 0), (4, 2)]
    assert_holds(root, 5, seen[-1])


def test_steps_are_counted_from_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every_steps"):
        PublishCallback(deltafmt.Writer(str(tmp_path / "run")), every_steps=0)
