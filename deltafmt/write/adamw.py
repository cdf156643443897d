"""Detection by undoing AdamW: no copy of anything, one bit per element."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from deltafmt.errors import UnsupportedError
from deltafmt.given import named_pairs
from deltafmt.kernels.adamw import Step, mark
from deltafmt.kernels.intrinsics import LANES
from deltafmt.kernels.marks import Words
from deltafmt.tensors import local_part
from deltafmt.write.marked import Marks
from deltafmt.write.marks import MarkDetector
from deltafmt.write.options import WriterOptions
from deltafmt.write.watch import Watched, by_chunks, chunk_of, print_of_chunk, sum_of

_MOST_DECAY = 0.25
"""Share that weight decay may take in a step, for the guard band to hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWReport:
    """What an `AdamWDetector` has seen since it was made.

    `changed` elements have certainly got another BF16 value in some step, `unsure` ones were marked to be
    safe; an element counts once per step. `lost` says how often a tensor had to be compared with storage,
    since somebody else had written to it, or a step could not be undone.
    """

    steps: int
    changed: int
    unsure: int
    lost: int


@dataclass(slots=True)
class _Parameter:
    """One parameter, and how many steps it had made when it was looked at last."""

    marks: Marks
    watched: Watched
    parameter: torch.Tensor
    step: int


class AdamWDetector(MarkDetector):
    """Finds what each step of torch's AdamW or Adam changed in FP32 parameters that are published as BF16.

    After every step the value before it is computed anew from the parameter and the optimizer's moments,
    with a guard band for all roundings; an element is marked where its BF16 value may have changed. Steps
    add up. Nothing is missed, and a few elements are published that have not changed.

    Keep the detector from before the first anchor on: steps that it has not seen cannot be undone.
    `named_parameters` names what is published; what the optimizer does not hold costs nothing in a step and
    is held against the base by digest. Each step costs a read of 12 bytes per
    element, and of 4 more to notice what others have written; with `audit_every` N only every N-th
    parameter is read for that before a step (all are before a publish), beside torch's own counter of writes.

    Raises `UnsupportedError` (`detector-unsupported`) for an optimizer whose steps cannot be undone, and for
    parameters of another dtype than FP32: `CastDetector` and `SnapshotDetector` serve those.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        *,
        audit_every: int = 1,
        threads: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            raise UnsupportedError(
                "only steps of torch's Adam and AdamW can be undone; use CastDetector or SnapshotDetector",
                kind="detector-unsupported",
                where=type(optimizer).__name__,
            )
        if audit_every < 1:
            raise ValueError(f"audit_every is at least 1: {audit_every}")
        self._optimizer, self._audit_every = optimizer, audit_every
        self._threads = threads or WriterOptions().workers
        self._turn = 0
        self._steps = self._changed = self._unsure = 0
        names = {id(parameter): name for name, parameter in named_pairs(named_parameters)}
        self._parameters: dict[int, _Parameter] = {}
        for parameter in _held(optimizer):
            if id(parameter) in names:
                self._add(names[id(parameter)], parameter)
        if not self._parameters:
            raise UnsupportedError(
                "the optimizer holds none of the parameters named; CastDetector serves copies of masters",
                kind="detector-unsupported",
                where="named_parameters",
                found=f"{len(names)} parameters",
            )
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._before()),
            optimizer.register_step_post_hook(lambda *_: self._after()),
        ]

    @property
    def report(self) -> AdamWReport:
        """What was seen since the detector was made."""
        return AdamWReport(steps=self._steps, changed=self._changed, unsure=self._unsure, lost=self.lost)

    def close(self) -> None:
        """Take the hooks off the optimizer; the detector then knows of nothing any more."""
        for hook in self._hooks:
            hook.remove()
        self.drop()

    def settle(self) -> None:
        """Look for writes of others since the last step."""
        for own in self._parameters.values():
            self._audit(own, thorough=True)

    def _add(self, name: str, parameter: torch.Tensor) -> None:
        local = local_part(parameter)
        if local.dtype is not torch.float32 or not local.is_contiguous():
            raise UnsupportedError(
                "only contiguous FP32 parameters can be undone; use CastDetector or SnapshotDetector",
                kind="detector-unsupported",
                where=repr(name),
                expected="torch.float32",
                found=str(local.dtype),
            )
        each = Marks.of(name, local, dtype="bfloat16")
        self._marks[id(parameter)] = each
        self._parameters[id(parameter)] = _Parameter(
            marks=each,
            watched=Watched(parameter, self._threads),
            parameter=parameter,
            step=_count(self._optimizer.state.get(parameter, {})),
        )

    def _before(self) -> None:
        self._turn += 1
        for number, own in enumerate(self._parameters.values()):
            self._audit(own, thorough=(number + self._turn) % self._audit_every == 0)

    def _audit(self, own: _Parameter, *, thorough: bool) -> None:
        why = own.watched.written(thorough=thorough)
        if why is not None:
            own.marks.tensor = own.watched.local
            self._lose(own.marks, why)

    def _after(self) -> None:
        self._steps += 1
        decoupled = isinstance(self._optimizer, torch.optim.AdamW)
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                own = self._parameters.get(id(parameter))
                if own is not None:
                    self._undo(own, group, decoupled=group.get("decoupled_weight_decay", decoupled))

    def _undo(self, own: _Parameter, group: dict[str, Any], *, decoupled: bool) -> None:
        state = self._optimizer.state.get(own.parameter, {})
        count = _count(state)
        taken, own.step = count - own.step, count
        if taken == 0:
            own.watched.accept()
            return
        local, found = own.watched.local, None
        step = _step(group, state, decoupled=decoupled) if taken == 1 else None
        if step is None:
            self._lose(own.marks, "a step cannot be undone")
        else:
            moment = local_part(state["exp_avg"])
            square = local_part(state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"])
            if any(t.dtype is not torch.float32 or not t.is_contiguous() for t in (local, moment, square)):
                self._lose(own.marks, "the optimizer keeps its moments in another form")
            else:
                found = self._mark(local, moment, square, step, own.marks.words)
        own.watched.accept(found)

    def _mark(
        self, local: torch.Tensor, moment: torch.Tensor, square: torch.Tensor, step: Step, words: Words
    ) -> int:
        """Mark what a step has changed; returns the parameter's fingerprint."""

        def work(chunk: slice) -> tuple[int, int, int]:
            p, m, v = (chunk_of(tensor, chunk).numpy() for tensor in (local, moment, square))
            counts = mark(p, m, v, step, words[chunk.start // LANES : chunk.stop // LANES])
            return *counts, print_of_chunk(p, chunk)

        found = list(by_chunks(local.numel(), self._threads, work))
        self._changed += sum(changed for changed, _, _ in found)
        self._unsure += sum(unsure for _, unsure, _ in found)
        return sum_of(part for *_, part in found)


def _held(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _count(state: Mapping[str, Any]) -> int:
    """Steps that a parameter has made."""
    return int(state.get("step", 0))


def _step(group: dict[str, Any], state: Mapping[str, Any], *, decoupled: bool) -> Step | None:
    """The scalars of a step; None where they are beyond what the guard band allows for."""
    lr, decay = float(group["lr"]), float(group["weight_decay"]) if decoupled else 0.0
    if abs(lr * decay) > _MOST_DECAY:
        return None
    # A capturable optimizer computes the corrections from its tensor, in FP32: so do we, bit for bit.
    count = state["step"] if group.get("capturable") else _count(state)
    corrections = [float(1 - beta**count) for beta in group["betas"]]
    return Step(
        lr=lr,
        correction1=corrections[0],
        correction2=corrections[1],
        eps=float(group["eps"]),
        weight_decay=decay,
    )
