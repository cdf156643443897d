"""Receivers that are behind: bytes and requests with the writer's squashes, against one way over all.

A small model is trained here, by reward, and every step is published with `WriterOptions(squash=...)`. For
each offset a receiver so many versions behind chooses its chain; its bytes are compared with those of one
squash from where it is to where it goes. Seconds of squashing are those of this machine; bytes are not.
"""

from __future__ import annotations

import argparse
import time
import uuid
from collections.abc import Iterator
from statistics import mean
from typing import Any

import deltafmt
from deltafmt.read.chain import cheapest_chain
from deltafmt.read.history import History
from deltafmt.store import open_store
from deltafmt.testing.faulty import FaultyStore
from tools.bench.models import trained


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--squash", type=int, default=64, help="the writer's longest span (default: 64)")
    parser.add_argument(
        "--behind", type=int, default=64, help="versions that receivers are behind (default: 64)"
    )
    parser.add_argument(
        "--versions", type=int, help="versions published (default: twice as many as the longest span, and 8)"
    )
    parser.add_argument(
        "--size", choices=("small", "tiny"), default="small", help="the model (default: small)"
    )
    parser.add_argument("--warm-up", type=int, default=30, help="steps by example before (default: 30)")


def run(options: argparse.Namespace) -> dict[str, Any]:
    versions = options.versions or 2 * options.squash + 8
    url = f"memory://bench-chain-{uuid.uuid4().hex}"
    workload = trained(versions, size=options.size, warm_up=options.warm_up)
    writer = deltafmt.Writer(url, options=deltafmt.WriterOptions(squash=options.squash))
    writer.publish_anchor(workload.tensors)
    began, seconds = time.perf_counter(), 0.0
    for _ in workload.steps():
        began = time.perf_counter()
        writer.publish(workload.tensors)
        seconds += time.perf_counter() - began
    lineage = deltafmt.open(url)
    deltas = [lineage.manifest(version).stored_bytes for version in range(1, versions + 1)]
    further = [
        way.manifest.stored_bytes
        for version in range(1, versions + 1)
        for way in lineage.history.further_ways(version)
    ]
    chains = [_chain(url, wanted - options.behind, wanted) for wanted in range(options.behind, versions + 1)]
    for chain in chains:
        chain["direct_bytes"] = lineage.squash(chain["held"], chain["wanted"]).stored_bytes
        chain["over_direct"] = chain["bytes"] / chain["direct_bytes"]
    run = min(16, versions)
    sixteen = [
        lineage.squash(version - run, version).stored_bytes / sum(deltas[version - run : version])
        for version in range(run, versions + 1, 8)
    ]
    manifests = [lineage.manifest(version) for version in range(1, versions + 1)]
    return {
        "model_bytes": workload.nbytes,
        "versions": versions,
        "squash": options.squash,
        "behind": options.behind,
        "changed_share": 2 * mean(m.listed for m in manifests) / workload.nbytes,
        "delta_bytes": mean(deltas),
        "further_bytes_per_delta_byte": sum(further) / sum(deltas),
        "further_ways_per_version": len(further) / versions,
        "publish_seconds": seconds / versions,
        "direct_16_over_deltas": {"worst": max(sixteen), "mean": mean(sixteen)},
        "over_direct": {
            "worst": max(chain["over_direct"] for chain in chains),
            "mean": mean(chain["over_direct"] for chain in chains),
        },
        "chains": chains,
    }


def _chain(url: str, held: int, wanted: int) -> dict[str, Any]:
    """What a receiver reads to get from one version to another: weights, and what it takes to find them."""
    store = FaultyStore(open_store(url))
    history = History(store)
    held_digest = history.first_way(held).digest
    began = len(store.log)
    path = cheapest_chain(history, held, wanted, held_digest=held_digest)
    calls = store.log[began:]
    read = {
        call.key for call in calls if call.verb == "read_all" and call.key.startswith(("versions/", "ways/"))
    }
    return {
        "held": held,
        "wanted": wanted,
        "ways": len(path),
        "bytes": sum(stored.manifest.stored_bytes for stored in path),
        "manifests_read": len(read),
        "manifest_bytes": sum(store.inner.size(key) for key in read),
        "listings": sum(call.verb == "list" for call in calls),
    }


def render(result: dict[str, Any]) -> Iterator[str]:
    chains = result["chains"]
    worst = max(chains, key=lambda chain: chain["over_direct"])
    yield (
        f"{result['versions']} versions of {result['model_bytes'] / 1e6:.1f} MB, {100 * result['changed_share']:.2f} % "
        f"changed in each; deltas of {result['delta_bytes'] / 1e3:.0f} kB"
    )
    yield (
        f"squash={result['squash']}: {result['further_ways_per_version']:.2f} ways and "
        f"{result['further_bytes_per_delta_byte']:.2f} bytes per byte of deltas beside them, "
        f"publish {result['publish_seconds']:.2f} s"
    )
    sixteen = result["direct_16_over_deltas"]
    yield f"16 deltas as one way: {sixteen['worst']:.2f} of their sum at worst, {sixteen['mean']:.2f} on average"
    over = result["over_direct"]
    yield (
        f"{result['behind']} versions behind, {len(chains)} offsets: {over['worst']:.2f} times the bytes of one way at "
        f"worst (from {worst['held']}), {over['mean']:.2f} on average"
    )
    for name, unit in (("ways", ""), ("manifests_read", ""), ("listings", ""), ("manifest_bytes", " bytes")):
        values = [chain[name] for chain in chains]
        yield f"  {name.replace('_', ' ')}: at most {max(values):,}{unit}, {mean(values):,.1f} on average"
