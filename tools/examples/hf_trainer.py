#!/usr/bin/env python3
"""transformers' Trainer publishes a tiny model after each optimizer step.

    pip install 'deltafmt[transformers]'
    python tools/examples/hf_trainer.py ./run

TRL's trainers take the same callback.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import deltafmt
from deltafmt.integrations.transformers import PublishCallback

VOCABULARY, STEPS = 64, 4


def main(root: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    tokens = torch.randint(VOCABULARY, (16, 12))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    # Published as the BF16 that inference runs in, though the optimizer works on FP32.
    writer = deltafmt.Writer(root, publish_dtype="bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=4,
            learning_rate=1e-5,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        Trainer(model, arguments, train_dataset=data, callbacks=[PublishCallback(writer)]).train()
    for info in deltafmt.open(root).log():
        changed = "all" if info.changed is None else info.changed
        print(f"version {info.version}, step {info.step}: {changed} elements changed")
    stored = deltafmt.open(root).read()
    for name, tensor in model.state_dict().items():
        assert torch.equal(stored[name], tensor.bfloat16()), name
    print("the last version is the model, bit for bit")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1])
