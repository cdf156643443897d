"""Which detector suits a trainer."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from deltafmt.errors import UnsupportedError
from deltafmt.tensors import local_part, torch_dtype
from deltafmt.write.adamw import AdamWDetector
from deltafmt.write.cast import CastDetector
from deltafmt.write.detector import Detector
from deltafmt.write.snapshot import SnapshotDetector

_LOG = logging.getLogger("deltafmt")


def detector_for(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    memory_budget: int | None = None,
    *,
    masters: Mapping[str, torch.Tensor] | None = None,
    publish_dtype: str = "bfloat16",
) -> Detector:
    """The fastest detector that needs at most `memory_budget` bytes (None: whatever it takes).

    FP32 parameters count as published in `publish_dtype`. What was chosen and why is logged (INFO), and the
    detector's `reason`. `masters` as for `CastDetector`. Raises `UnsupportedError` (`detector-unsupported`)
    where none fits.
    """
    chosen, reason = _choose(model, optimizer, memory_budget, masters, publish_dtype)
    chosen.reason = reason
    _LOG.info("%s: %s", type(chosen).__name__, reason)
    return chosen


def _choose(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    budget: int | None,
    masters: Mapping[str, torch.Tensor] | None,
    publish_dtype: str,
) -> tuple[SnapshotDetector | AdamWDetector | CastDetector, str]:
    published = [local_part(tensor) for tensor in {id(t): t for t in model.state_dict().values()}.values()]
    width = torch_dtype(publish_dtype).itemsize
    copy = sum(t.numel() * (width if t.dtype is torch.float32 else t.element_size()) for t in published)
    if budget is None or copy <= budget:
        within = "" if budget is None else f", within the budget of {_mib(budget)}"
        return SnapshotDetector(), f"a copy of what is published takes {_mib(copy)}{within}"
    bits = 2 * sum(t.numel() for t in published) // 8
    too_large = f"a copy of what is published would take {_mib(copy)} of {_mib(budget)}"
    if bits > budget:
        raise UnsupportedError(
            f"no detector does with so little memory: {too_large}",
            kind="detector-unsupported",
            where="memory_budget",
            expected=f"{bits} bytes for marks, at least",
            found=budget,
        )
    named = dict(model.named_parameters())
    try:
        if publish_dtype != "bfloat16":
            raise UnsupportedError(f"{publish_dtype} is published", kind="detector-unsupported")
        return AdamWDetector(
            optimizer, named
        ), f"{too_large}; steps of AdamW can be undone, with {_mib(bits)} of marks"
    except UnsupportedError as error:
        why = error.message
    detector = CastDetector(optimizer, named, masters=masters, publish_dtype=publish_dtype)
    if detector.transient > budget:
        detector.close()
        raise UnsupportedError(
            f"no detector does with so little memory: {too_large}, and while the optimizer steps as much would be held",
            kind="detector-unsupported",
            where="memory_budget",
            expected=f"{detector.transient} bytes, or FP32 masters",
            found=budget,
        )
    return (
        detector,
        f"{too_large}; {why}; casts can be compared as they are overwritten, with {_mib(bits)} of marks",
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB"
