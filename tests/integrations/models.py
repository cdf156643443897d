"""A small policy with what real ones have: a tied head, norms, a buffer, layers that are alike."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(F.silu(self.up(self.norm(x))))
        return found


class Policy(nn.Module):
    scale: torch.Tensor

    def __init__(self, *, vocabulary: int, width: int, layers: int = 2, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(x) * self.scale
        return found


def loss_of(model: nn.Module, vocabulary: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (2, 9), generator=random)
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
