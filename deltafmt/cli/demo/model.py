"""A decoder-only transformer in plain torch, with the names and shapes that checkpoints usually have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the model; query heads are grouped on fewer key and value heads."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int


SHAPES = {
    "small": Shape(vocabulary=8192, width=384, layers=6, heads=6, kv_heads=2, head_width=64, hidden=1024),
    "tiny": Shape(vocabulary=512, width=64, layers=2, heads=4, kv_heads=2, head_width=16, hidden=128),
}


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        query, key = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        self.q_proj = nn.Linear(shape.width, query, bias=False)
        self.k_proj = nn.Linear(shape.width, key, bias=False)
        self.v_proj = nn.Linear(shape.width, key, bias=False)
        self.o_proj = nn.Linear(query, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        split = (batch, length, -1, self.shape.head_width)
        q, k, v = (proj(x).view(split).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        group = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width)
        self.mlp = Mlp(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Policy(nn.Module):
    """The whole model; the head is tied to the embedding. Positions need no code: causal attention tells them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.lm_head(self.norm(x))
        return logits
