"""The whole path: publish and advance, against what the machine can do and against full checkpoints.

Per workload: seconds of `Writer.publish` (detect, encode, digest, CRC32C, zstd, fsync, commit) to a local
folder, as a share of the time in which two streams of the model's size can be read; seconds of
`Receiver.prefetch` and `Receiver.advance` against bare decoding and scattering of the same chunks; stored
bits per changed element; memory above what was resident before the call; and saving and loading the whole
model with safetensors.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import deltafmt
from deltafmt.format.constants import STEP
from deltafmt.kernels import apply as kernel
from deltafmt.kernels.digest import zero
from deltafmt.read.decode import decode_chunk
from deltafmt.read.fetch import StagedChunk, fetch_chunks
from deltafmt.read.history import History
from deltafmt.read.options import ReadOptions
from deltafmt.read.plan import plan_link
from deltafmt.read.targets import Targets
from deltafmt.read.views import View, Views
from deltafmt.store import open_store
from tools.bench.machine import MIB, best_of, cores, peak, table, two_stream_bandwidth
from tools.bench.models import Workload, synthetic, trace, trace_folders, trained


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--size", type=int, default=1024, metavar="MIB", help="synthetic model (default: 1024)"
    )
    parser.add_argument(
        "--share",
        type=float,
        nargs="*",
        default=[0.01],
        metavar="S",
        help="shares that change (default: 0.01)",
    )
    parser.add_argument("--versions", type=int, default=5, metavar="N", help="timed versions (default: 5)")
    parser.add_argument("--threads", type=int, default=cores(), help="worker threads (default: all cores)")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder with recorded traces")
    parser.add_argument("--no-traces", action="store_true", help="only the synthetic updates")
    parser.add_argument("--folder", type=Path, help="where to publish (default: a temporary folder)")


def run(options: argparse.Namespace) -> dict[str, Any]:
    size = options.size * MIB
    bandwidth = {n: two_stream_bandwidth(min(size, 512 * MIB), n) for n in sorted({1, options.threads})}
    makers = [partial(synthetic, size, share, options.versions + 1) for share in options.share]
    if not options.no_traces:
        folders = trace_folders(options.traces)
        makers += [partial(trace, folder) for folder in folders] or [partial(trained, options.versions + 1)]
    rows = []
    for make in makers:
        top = Path(tempfile.mkdtemp(prefix="deltafmt-bench-", dir=options.folder))
        try:
            rows.append(_measure(make(), top, options.threads, bandwidth[options.threads]))
        finally:
            shutil.rmtree(top)
        gc.collect()
    return {
        "threads": options.threads,
        "two_stream_bytes_per_second": {str(n): value for n, value in bandwidth.items()},
        "rows": rows,
    }


def _measure(workload: Workload, top: Path, threads: int, bandwidth: float) -> dict[str, Any]:
    url, tensors = str(top / "run"), workload.tensors
    save, load = _checkpoint_seconds(tensors, top / "model.safetensors")
    writer = deltafmt.Writer(url, options=deltafmt.WriterOptions(threads=threads))
    began = time.perf_counter()
    writer.publish_anchor(tensors)
    anchor = time.perf_counter() - began
    live = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    receiver = deltafmt.Receiver(url, live, options=ReadOptions(threads=threads))
    receiver.advance()
    lineage = deltafmt.open(url)
    runs = [_one_version(writer, receiver, lineage, tensors, threads) for _ in workload.steps()]
    # The first one compiles and warms up; a trace of few steps keeps what it has.
    timed = runs[1:] or runs
    wrong = [name for name, tensor in tensors.items() if not _same(tensor, live[name])]
    listed, stored = sum(r["listed"] for r in runs), sum(r["stored_bytes"] for r in runs)
    publish = min(r["publish_seconds"] for r in timed)
    advance = min(r["advance_seconds"] for r in timed)
    bare = min(r["bare_seconds"] for r in timed)
    elements = sum(tensor.numel() for tensor in tensors.values())
    return {
        "workload": workload.name,
        "model_bytes": workload.nbytes,
        "identical": not wrong,
        "changed_share": listed / len(runs) / elements,
        "bits_per_changed": 8 * stored / listed,
        "anchor_seconds": anchor,
        "publish_seconds": publish,
        "publish_median_seconds": median(r["publish_seconds"] for r in timed),
        "publish_share_of_two_streams": 2 * workload.nbytes / publish / bandwidth,
        "prefetch_seconds": min(r["prefetch_seconds"] for r in timed),
        "advance_seconds": advance,
        "bare_seconds": bare,
        "advance_over_bare": advance / bare,
        "whole_advance_over_bare": min(r["prefetch_seconds"] + r["advance_seconds"] for r in timed) / bare,
        "publish_extra_mib": max(r["publish_extra_bytes"] for r in timed) / MIB,
        "advance_extra_mib": max(r["advance_extra_bytes"] for r in timed) / MIB,
        "advance_allowed_mib": 96 + max(r["stored_bytes"] + r["undo_bytes"] for r in timed) / MIB,
        "safetensors_save_seconds": save,
        "safetensors_load_seconds": load,
        "full_over_delta_bytes": workload.nbytes * len(runs) / stored,
    }


def _one_version(
    writer: deltafmt.Writer,
    receiver: deltafmt.Receiver,
    lineage: deltafmt.Lineage,
    tensors: Any,
    threads: int,
) -> dict[str, float]:
    times = [time.perf_counter()]
    with peak() as publishing:
        version = writer.publish(tensors)
    times.append(time.perf_counter())
    with peak() as advancing:
        receiver.prefetch(version)
        times.append(time.perf_counter())
        receiver.advance(version)
        times.append(time.perf_counter())
    manifest = lineage.manifest(version)
    undo = int((manifest.chunks.listed.astype(np.int64) * (4 + manifest.chunks.width)).sum())
    return {
        "publish_seconds": times[1] - times[0],
        "prefetch_seconds": times[2] - times[1],
        "advance_seconds": times[3] - times[2],
        "bare_seconds": bare_seconds(lineage.url, version, threads),
        "publish_extra_bytes": publishing.extra_bytes,
        "advance_extra_bytes": advancing.extra_bytes,
        "listed": manifest.listed,
        "stored_bytes": manifest.stored_bytes,
        "undo_bytes": undo,
    }


def bare_seconds(url: str, version: int, threads: int) -> float:
    """Seconds to decode a version's chunks, in memory already, and to scatter them: no digest, no undo log."""
    history = History(open_store(url))
    stored = history.first_way(version)
    schema = history.schema(stored.manifest.schema)
    scratch = {
        name: torch.zeros(schema[name].shape, dtype=getattr(torch, schema[name].dtype))
        for name in (schema.tensors[row].name for row in schema.owners)
    }
    view = Views(history, Targets(scratch)).view(stored.manifest, stored.manifest.schema)
    uncounted = replace(view, table=replace(view.table, counted=np.zeros(len(view.table.counted), bool)))
    chunks = list(fetch_chunks(history.store, plan_link(stored.manifest, view.table)))
    with ThreadPoolExecutor(threads) as pool:
        return best_of(3, lambda: list(pool.map(lambda chunk: _bare(chunk, uncounted), chunks)))


def _bare(chunk: StagedChunk, view: View) -> None:
    shape = view.shape(chunk.head.domain)
    decoded = decode_chunk(chunk.head, chunk.columns, chunk.data, shape, where=chunk.where)
    live = kernel.DomainView(view.table, chunk.head.domain, view.targets.addresses, shape.width)
    if decoded.positions is None:
        kernel.apply_dense(live, decoded.values)
    elif decoded.operation == STEP:
        kernel.apply_step(live, decoded.positions, decoded.values, decoded.order, None, zero())
    else:
        kernel.apply_set(live, decoded.positions, decoded.values, None, zero())


def _checkpoint_seconds(tensors: dict[str, torch.Tensor], path: Path) -> tuple[float, float]:
    """Seconds to save (flushed) and to load the whole model with safetensors."""
    distinct = {name: tensor.clone() for name, tensor in tensors.items()}

    def save() -> None:
        save_file(distinct, path)
        with path.open("rb+") as file:
            os.fsync(file.fileno())

    saving = best_of(2, save)
    # Mapping alone reads nothing: sum what was loaded.
    loading = best_of(2, lambda: [t.view(torch.uint8).sum() for t in load_file(path).values()])
    path.unlink()
    return saving, loading


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8))) if a.dim() else bool((a == b).all())


def render(result: dict[str, Any]) -> Iterator[str]:
    rates = ", ".join(
        f"{n} thread(s) {v / 1e9:.1f} GB/s" for n, v in result["two_stream_bytes_per_second"].items()
    )
    yield f"two-stream read bandwidth: {rates}"
    yield ""
    rows = result["rows"]
    lines: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("model", lambda r: f"{r['model_bytes'] / MIB:.0f} MiB"),
        ("changed", lambda r: f"{100 * r['changed_share']:.2f} %"),
        ("bits per changed element", lambda r: f"{r['bits_per_changed']:.2f}"),
        ("full bytes / delta bytes", lambda r: f"{r['full_over_delta_bytes']:.0f}"),
        ("publish", lambda r: f"{r['publish_seconds']:.3f} s"),
        ("  share of two-stream bandwidth", lambda r: f"{r['publish_share_of_two_streams']:.2f}"),
        ("  memory above snapshot", lambda r: f"{r['publish_extra_mib']:.0f} MiB"),
        ("prefetch", lambda r: f"{1000 * r['prefetch_seconds']:.0f} ms"),
        ("advance (the pause)", lambda r: f"{1000 * r['advance_seconds']:.0f} ms"),
        ("  prefetch and advance / bare", lambda r: f"{r['whole_advance_over_bare']:.2f}"),
        ("  bare decode and scatter", lambda r: f"{1000 * r['bare_seconds']:.0f} ms"),
        (
            "  memory (allowed)",
            lambda r: f"{r['advance_extra_mib']:.0f} ({r['advance_allowed_mib']:.0f}) MiB",
        ),
        ("safetensors save, all", lambda r: f"{r['safetensors_save_seconds']:.2f} s"),
        ("safetensors load, all", lambda r: f"{r['safetensors_load_seconds']:.2f} s"),
        ("identical at the end", lambda r: "yes" if r["identical"] else "NO"),
    ]
    header = ("", *(row["workload"] for row in rows))
    yield from table(header, [(name, *(cell(row) for row in rows)) for name, cell in lines])
