"""A callback with which transformers' `Trainer`, and trainers made from it such as TRL's, publish as they train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deltafmt.shards import Shards, shards_of
from deltafmt.write.writer import Writer

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "this integration needs transformers and accelerate: pip install 'deltafmt[transformers]'"
    ) from error


class PublishCallback(TrainerCallback):  # type: ignore[misc]
    """Publishes the model every so many optimizer steps, and once more at the end of training.

    `writer` is this process's writer: of a sharded model every rank has one, of a replicated model (DDP) only
    those that have one publish. `select` gives what to publish of the model, by default all parameters and
    persistent buffers as this rank holds them. The first version of a root is an anchor, whenever it comes;
    the trainer's global step is the step of each version. What publishing raises ends the training.
    """

    def __init__(
        self,
        writer: Writer,
        *,
        every_steps: int = 1,
        select: Callable[[torch.nn.Module], Shards] = shards_of,
    ) -> None:
        if every_steps < 1:
            raise ValueError(f"every_steps must be at least 1, not {every_steps}")
        self.writer = writer
        self._every, self._select = every_steps, select
        self._published: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:  # noqa: ARG002
        """Publish what training starts from."""
        self._publish(model, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:  # noqa: ARG002
        """Publish after the optimizer's step, if it is its turn."""
        if state.global_step % self._every == 0:
            self._publish(model, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:  # noqa: ARG002
        """Publish the last step, unless it is published."""
        if self._published != state.global_step:
            self._publish(model, state.global_step)

    def _publish(self, model: torch.nn.Module, step: int) -> None:
        held = self._select(model)
        if self.writer.next_version == 0:
            self.writer.publish_anchor(held, step=step)
        else:
            self.writer.publish(held, step=step)
        self._published = step
