"""Detectors at a trainer's side: what each adds to an optimizer step, and what a publish then costs.

Marking is given as a share of the bandwidth at which two arrays are read side by side, counting the 12 bytes
per element that undoing AdamW needs (parameter and two moments); what hooks add, as a share of torch's step.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import deltafmt
from deltafmt.kernels.adamw import Step, mark
from deltafmt.kernels.marks import words_for
from tools.bench.machine import MIB, best_of, table, two_stream_bandwidth

_STEPS, _WARM = 4, 20


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, default=128, metavar="MIB", help="FP32 parameters (default: 128)")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate (default: 1e-6)")
    parser.add_argument(
        "--audit-every", type=int, default=1, metavar="N", help="see AdamWDetector (default: 1)"
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of torch and of hooks")


def run(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    elements = options.size * MIB // 4
    bandwidth = two_stream_bandwidth(256 * MIB, 1)
    rows = []
    for form in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        bare = _Trainer(elements, options.lr, form)
        plain = bare.seconds()
        for kind in ("adamw", "cast", "cast with masters"):
            trainer = _Trainer(elements, options.lr, form, masters=kind == "cast with masters")
            detector = trainer.watched(kind, options)
            rows.append(
                {
                    "step": next(iter(form)) + ("" if form != {"foreach": False} else " off"),
                    "detector": kind,
                    "added_share": trainer.seconds() / plain - 1,
                    "plain_seconds": plain,
                    "bytes_per_element": detector.nbytes / elements,
                    "lost": detector.lost,
                }
            )
            detector.close()
    return {
        "elements": elements,
        "threads": options.threads,
        "two_stream_bytes_per_second": bandwidth,
        "marking_share": _marking(elements, options.lr) / bandwidth,
        "hooks": rows,
        "publishes": [_published(kind, elements, options) for kind in ("snapshot", "adamw", "cast")],
    }


class _Trainer:
    """One large FP32 parameter, or such a master with its BF16 copy, and its optimizer."""

    def __init__(self, elements: int, lr: float, form: dict[str, Any], *, masters: bool = False) -> None:
        torch.manual_seed(0)
        self.parameter = nn.Parameter(torch.randn(elements) * 0.02)
        self.copy = nn.Parameter(self.parameter.detach().bfloat16()) if masters else None
        self.optimizer = torch.optim.AdamW([self.parameter], lr=lr, betas=(0.9, 0.95), **form)
        self.parameter.grad = torch.randn(elements) * 1e-3
        self.step()

    def step(self) -> None:
        self.optimizer.step()
        if self.copy is not None:
            with torch.no_grad():
                self.copy.copy_(self.parameter)

    def seconds(self) -> float:
        """Of the optimizer's own step; refreshing a copy of a master is the trainer's affair."""
        best = float("inf")
        for _ in range(_STEPS):
            began = time.perf_counter()
            self.optimizer.step()
            best = min(best, time.perf_counter() - began)
            if self.copy is not None:
                with torch.no_grad():
                    self.copy.copy_(self.parameter)
        return best

    def watched(self, kind: str, options: argparse.Namespace) -> Any:
        published = {"w": self.parameter if self.copy is None else self.copy}
        if kind == "adamw":
            return deltafmt.AdamWDetector(
                self.optimizer, published, threads=options.threads, audit_every=options.audit_every
            )
        return deltafmt.CastDetector(self.optimizer, published, threads=options.threads)


def _marking(elements: int, lr: float) -> float:
    """Bytes per second of marking alone, once the moments are those of a trainer that has been running."""
    trainer = _Trainer(elements, lr, {"fused": True})
    for _ in range(_WARM - 1):
        trainer.parameter.grad = torch.randn(elements) * 1e-3
        trainer.step()
    state = trainer.optimizer.state[trainer.parameter]
    arrays = [t.detach().numpy() for t in (trainer.parameter, state["exp_avg"], state["exp_avg_sq"])]
    step = Step(lr=lr, correction1=1 - 0.9**_WARM, correction2=1 - 0.95**_WARM, eps=1e-8, weight_decay=0.01)
    words = words_for(elements)
    return 12 * elements / best_of(5, lambda: mark(arrays[0], arrays[1], arrays[2], step, words))


def _published(kind: str, elements: int, options: argparse.Namespace) -> dict[str, Any]:
    trainer = _Trainer(elements, options.lr, {"fused": True})
    detector = deltafmt.SnapshotDetector() if kind == "snapshot" else trainer.watched(kind, options)
    with tempfile.TemporaryDirectory(prefix="deltafmt-bench-") as folder:
        writer = deltafmt.Writer(
            Path(folder) / "run",
            detector=detector,
            publish_dtype="bfloat16",
            options=deltafmt.WriterOptions(threads=options.threads),
        )
        named = {"w": trainer.parameter}
        writer.publish_anchor(named)
        seconds = float("inf")
        for _ in range(_STEPS):
            trainer.step()
            began = time.perf_counter()
            version = writer.publish(named)
            seconds = min(seconds, time.perf_counter() - began)
        listed = deltafmt.open(Path(folder) / "run").manifest(version).listed
    return {"detector": kind, "publish_seconds": seconds, "listed_share": listed / elements}


def render(result: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{result['elements'] / 1e6:.1f} M elements, {result['threads']} thread(s), two streams "
        f"{result['two_stream_bytes_per_second'] / 1e9:.1f} GB/s"
    )
    yield f"undoing AdamW reads its 12 bytes per element at {result['marking_share']:.2f} of that"
    yield ""
    yield from table(
        ("torch's step", "detector", "adds", "bytes per element", "lost"),
        [
            (
                row["step"],
                row["detector"],
                f"{row['added_share']:+.0%}",
                f"{row['bytes_per_element']:.3f}",
                str(row["lost"]),
            )
            for row in result["hooks"]
        ],
    )
    yield ""
    yield from table(
        ("detector", "publish", "listed"),
        [
            (row["detector"], f"{1000 * row['publish_seconds']:.0f} ms", f"{row['listed_share']:.3%}")
            for row in result["publishes"]
        ],
    )
