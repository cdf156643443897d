"""Layouts traced through the conversions of transformers: experts fused, names changed, heads tied."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deltafmt
from deltafmt.tracing.recorded import layout_by_records
from tests.cases.common import assert_same, new_root

transformers = pytest.importorskip("transformers", minversion="5")

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def models() -> dict[str, tuple[Any, Any]]:
    return {
        "mixtral, tied": (
            transformers.MixtralForCausalLM,
            transformers.MixtralConfig(
                **COMMON, intermediate_size=48, num_local_experts=4, tie_word_embeddings=True
            ),
        ),
        "qwen3 moe": (
            transformers.Qwen3MoeForCausalLM,
            transformers.Qwen3MoeConfig(**COMMON, moe_intermediate_size=24, num_experts=4, head_dim=8),
        ),
        "llama": (
            transformers.LlamaForCausalLM,
            transformers.LlamaConfig(**COMMON, intermediate_size=48),
        ),
    }


CONVERTED = {
    "olmoe": "experts, one by one, into stacks",
    "phimoe": "experts and other names",
    "hrm_text": "gates and heads fused in the checkpoint",
    "sarvam_moe": "fused heads, and a router kept in float32",
    "kimi_k25": "fused, split, permuted for rotary embeddings",
    "gpt_oss": "stacks as they are",
}


def of_type(kind: str) -> Any:
    """A small model of one of transformers' types."""
    small = {
        **COMMON,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "head_dim": 8,
    }
    try:
        config = transformers.AutoConfig.for_model(kind)
    except ValueError:
        pytest.skip(f"this release of transformers has no {kind}")
    for part in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
        for name, value in small.items():
            if part is not None and hasattr(part, name):
                setattr(part, name, value)
    torch.manual_seed(0)
    try:
        return transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    except ValueError:
        return transformers.AutoModel.from_config(config).bfloat16()


@pytest.mark.parametrize("kind", CONVERTED)
def test_conversions_are_recorded(kind: str) -> None:
    from transformers.core_model_loading import revert_weight_conversion

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = of_type(kind)
    live = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    checkpoint = {name: t.clone() for name, t in revert_weight_conversion(model, dict(live)).items()}
    before = {name: tensor.clone() for name, tensor in live.items()}

    def load(named: Any) -> None:
        loaded = type(model).from_pretrained(
            None, config=model.config, state_dict=dict(named), dtype=torch.bfloat16
        )
        for key, tensor in loaded.state_dict().items():
            live[key].copy_(tensor)

    schema = deltafmt.Schema.of(checkpoint)
    layout = deltafmt.trace_layout(load, schema, live)
    assert_same(live, before)
    recorded = layout_by_records(load, schema, live, frozenset())
    assert recorded.placements == layout.placements
    assert {placement.source for placement in layout.placements} == set(checkpoint)
    if kind != "gpt_oss":
        assert checkpoint.keys() != live.keys()
    # The checkpoint goes through the layout into the model that it was made from.
    for name, tensor in live.items():
        tensor.zero_()
        for p in layout.placements:
            if p.target == name:
                box = checkpoint[p.source][p.source_box.slices()]
                tensor.as_strided(box.shape, p.strides, tensor.storage_offset() + p.offset).copy_(box)
    assert_same(live, before)


@pytest.mark.parametrize("name", ["mixtral, tied", "qwen3 moe", "llama"])
def test_a_checkpoint_into_a_model(name: str) -> None:
    from transformers.core_model_loading import revert_weight_conversion

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind, config = models()[name]
    torch.manual_seed(0)
    model = kind(config).bfloat16()
    live = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    checkpoint = {name: t.clone() for name, t in revert_weight_conversion(model, dict(live)).items()}
    if config.tie_word_embeddings:
        checkpoint["lm_head.weight"] = checkpoint["model.embed_tokens.weight"]

    def load(named: Any) -> None:
        loaded = kind.from_pretrained(None, config=config, state_dict=dict(named), dtype=torch.bfloat16)
        for key, tensor in loaded.state_dict().items():
            live[key].copy_(tensor)

    layout = deltafmt.trace_layout(load, deltafmt.Schema.of(checkpoint), live)
    sources = {placement.source for placement in layout.placements}
    assert len(sources) == len(checkpoint) - config.tie_word_embeddings
    assert len({placement.target for placement in layout.placements}) == len(live)
    assert len(sources) > len(live) or name == "llama"
    root = new_root()
    writer = deltafmt.Writer(root)
    writer.publish_anchor(checkpoint)
    for tensor in {tensor.data_ptr(): tensor for tensor in checkpoint.values()}.values():
        tensor.view(torch.int16).reshape(-1)[::11] += 1
    writer.publish(checkpoint)
    followed = {key: torch.zeros_like(tensor) for key, tensor in live.items()}
    receiver = deltafmt.Receiver(root, followed, layout=layout)
    receiver.advance(0)
    receiver.advance(1)
    load(checkpoint.items())
    assert_same(followed, live)
