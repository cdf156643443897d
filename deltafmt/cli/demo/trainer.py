"""The trainer: a policy learns a rule by example, then goes on by reward at a small learning rate."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from deltafmt.cli.demo.model import SHAPES, Policy

USED_TOKENS = 64
"""Tokens that occur in the data; as in practice, most rows of the embedding see no gradient."""
BATCH, LENGTH = 4, 48
WARM_UP_RATE, RATE = 1e-3, 3e-6


class Trainer:
    """FP32 weights under AdamW; `publishable` are the tensors that a version holds."""

    def __init__(self, size: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Policy(SHAPES[size])
        self._random = torch.Generator().manual_seed(seed)
        # The rule: each token is followed by one other.
        self._next = torch.randperm(USED_TOKENS, generator=self._random)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=WARM_UP_RATE, betas=(0.9, 0.999))

    def warm_up(self, steps: int) -> float:
        """Learn from examples; returns the last loss."""
        loss = torch.tensor(0.0)
        for _ in range(steps):
            tokens = self._contexts()
            logits = self.model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            self._update(loss)
        for group in self._optimizer.param_groups:
            group["lr"] = RATE
        return loss.item()

    def step(self) -> float:
        """One policy-gradient step: act, be rewarded for keeping the rule, reinforce; returns the mean reward."""
        tokens = self._contexts()
        logs = self.model(tokens).log_softmax(-1)
        with torch.no_grad():
            actions = torch.multinomial(logs.flatten(0, 1).exp(), 1, generator=self._random).view(
                tokens.shape
            )
            rewards = (actions == self._next[tokens]).float()
            advantages = rewards - rewards.mean()
        chosen = logs.gather(-1, actions[..., None])[..., 0]
        self._update(-(advantages * chosen).mean())
        return rewards.mean().item()

    def publishable(self) -> dict[str, torch.Tensor]:
        """The FP32 masters under the names of a checkpoint; the tied head appears under both its names."""
        return dict(self.model.state_dict())

    def cast(self) -> dict[str, torch.Tensor]:
        """What a version must hold: the masters rounded to BF16."""
        return {name: tensor.to(torch.bfloat16) for name, tensor in self.publishable().items()}

    def _contexts(self) -> torch.Tensor:
        columns = [torch.randint(USED_TOKENS, (BATCH,), generator=self._random)]
        for _ in range(LENGTH - 1):
            columns.append(self._next[columns[-1]])
        return torch.stack(columns, 1)

    def _update(self, loss: torch.Tensor) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
