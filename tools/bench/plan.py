"""Metadata at scale: opening a lineage and planning a version over many tensors and chunks."""

from __future__ import annotations

import argparse
import time
import uuid
from typing import Any

import torch

import deltafmt
from deltafmt.read.chain import cheapest_chain
from deltafmt.read.history import History
from deltafmt.read.options import ReadOptions
from deltafmt.read.replica import Replica
from deltafmt.read.targets import Targets
from deltafmt.store import open_store
from tools.bench.machine import table

ELEMENTS = 256


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tensors", type=int, default=20_000, help="tensors, of two chunks each (default: 20000)"
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    url = f"memory://bench-plan-{uuid.uuid4().hex}"
    flat = torch.zeros(options.tensors * ELEMENTS, dtype=torch.bfloat16)
    tensors = dict(
        zip((f"layers.{k}.weight" for k in range(options.tensors)), torch.split(flat, ELEMENTS), strict=True)
    )
    writer = deltafmt.Writer(url, options=deltafmt.WriterOptions(domain_elements=ELEMENTS // 2))
    writer.publish_anchor(tensors)
    publishing = []
    for _ in range(2):
        flat.view(torch.int16)[:: ELEMENTS // 4] += 1
        began = time.perf_counter()
        writer.publish(tensors)
        publishing.append(time.perf_counter() - began)
    _first(url, tensors)  # Imports, and what is compiled or cached on first use.
    first, replica, history = _first(url, tensors)
    began = time.process_time()
    chunks = _plan(replica, history, 1, 2)
    later = time.process_time() - began
    stored = history.first_way(2)
    size = history.store.size(stored.key)
    return {
        "tensors": options.tensors,
        "chunks": chunks,
        "manifest_bytes": size,
        "open_latest_plan_cpu_seconds": first,
        "later_version_cpu_seconds": later,
        "publish_seconds": min(publishing),
    }


def _first(url: str, tensors: dict[str, torch.Tensor]) -> tuple[float, Replica, History]:
    """CPU seconds from nothing known to a plan for version 1, and what is known then."""
    began = time.process_time()
    history = History(open_store(url))
    history.latest()
    replica = Replica(history, Targets(tensors), options=ReadOptions())
    _plan(replica, history, 0, 1)
    return time.process_time() - began, replica, history


def _plan(replica: Replica, history: History, held: int, wanted: int) -> int:
    """Number of chunks that are to be fetched."""
    path = cheapest_chain(history, held, wanted)
    links = replica.links(path, history.first_way(held) if held else None)
    return sum(len(link.plan.rows) for link in links)


def render(result: dict[str, Any]) -> list[str]:
    rows = [
        ("tensors", f"{result['tensors']:,}"),
        ("chunks", f"{result['chunks']:,}"),
        ("manifest", f"{result['manifest_bytes']:,} bytes"),
        ("open, latest, plan (CPU)", f"{result['open_latest_plan_cpu_seconds']:.3f} s"),
        ("plan of a later version (CPU)", f"{result['later_version_cpu_seconds']:.3f} s"),
        ("publish", f"{result['publish_seconds']:.2f} s"),
    ]
    return table(("", "measured"), rows)
