"""Publish and advance over S3, against bare transfers of the same bytes by s3fs to and from the same server.

The server is SeaweedFS, started here. Per number of writer ranks: seconds of `publish_anchor` until every
rank knows the outcome, against a parallel upload of the shards' bytes in pieces of 8 MiB; then seconds of a
cold `Receiver.advance`, and of one from a version to the next, against a parallel download of the same
ranges that decodes them and writes the elements. The bits are random: stored bytes are about the model's.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import deltafmt
from deltafmt.read.decode import decode_chunk, domain_shape
from deltafmt.read.plan import plan_rows
from tools.bench.machine import MIB, best_of, table

if TYPE_CHECKING:
    from deltafmt.testing.servers import SeaweedServer

PIECE = 8 * MIB
STREAMS = 8
"""Requests that the bare transfers have under way."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, default=64, metavar="MIB", help="model (default: 64)")
    parser.add_argument(
        "--ranks", type=int, nargs="*", default=[1, 4], metavar="N", help="writer ranks (default: 1 4)"
    )
    parser.add_argument(
        "--obstore", action="store_true", help="read by obstore (the bare transfers stay with s3fs)"
    )
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="best of so many (default: 3)")


def run(options: argparse.Namespace) -> dict[str, Any]:
    # The other benchmarks run without the extra `test`.
    from deltafmt.testing.servers import SeaweedServer

    with SeaweedServer() as server:
        reading = {"obstore": True} if options.obstore else {}
        rows = [
            _measure(server, options.size * MIB, ranks, options.repeat, reading) for ranks in options.ranks
        ]
    return {"server": server.name, "streams": STREAMS, "rows": rows}


def _measure(
    server: SeaweedServer, size: int, ranks: int, repeat: int, reading: dict[str, Any]
) -> dict[str, Any]:
    url, options = server.url(), server.storage_options
    model = _random_model(size, max(ranks, -(-size // PIECE)))
    parts = [dict(list(model.items())[rank::ranks]) for rank in range(ranks)]
    writers = [
        deltafmt.Writer(url, rank=rank, world_size=ranks, storage_options=options) for rank in range(ranks)
    ]

    def all_ranks(publish: Callable[[deltafmt.Writer, dict[str, torch.Tensor]], int]) -> list[int]:
        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(publish, writers, parts))

    def anchor() -> list[int]:
        return all_ranks(lambda writer, part: writer.publish_anchor(part))

    anchor()
    lineage = deltafmt.open(url, storage_options=options)
    shards = _shards(lineage)
    bare_upload = best_of(repeat, _upload(server, shards))
    publish = best_of(repeat, anchor)

    live = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    receiver = deltafmt.Receiver(url, live, storage_options={**options, **reading})
    receiver.advance()

    def cold() -> None:
        receiver.invalidate()
        receiver.advance()

    newest = lineage.latest()
    assert newest is not None
    bare_cold = best_of(repeat, _download(server, lineage, newest))
    cold_seconds = best_of(repeat, cold)
    deltas = []
    for version in range(newest + 1, newest + 1 + repeat):
        for tensor in model.values():
            tensor[::4] = torch.randint(-(1 << 15), 1 << 15, tensor[::4].shape, dtype=torch.int16)
        all_ranks(lambda writer, part: writer.publish(part))
        deltas.append((best_of(2, _download(server, lineage, version)), best_of(1, receiver.advance)))
    bare_delta, delta = (min(seconds) for seconds in zip(*deltas, strict=True))
    wrong = [name for name in model if not torch.equal(model[name], live[name])]
    for writer in writers:
        writer.close()
    stored = sum(len(data) for data in shards)
    return {
        "ranks": ranks,
        "identical": not wrong,
        "stored_bytes": stored,
        "delta_bytes": lineage.manifest(newest + 1).stored_bytes,
        "bare_upload_seconds": bare_upload,
        "publish_seconds": publish,
        "publish_rate_of_bare": bare_upload / publish,
        "bare_cold_seconds": bare_cold,
        "cold_seconds": cold_seconds,
        "cold_rate_of_bare": bare_cold / cold_seconds,
        "bare_delta_seconds": bare_delta,
        "delta_seconds": delta,
        "delta_rate_of_bare": bare_delta / delta,
    }


def _random_model(size: int, tensors: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (size // 2 // tensors,)
    return {
        f"t{number}": torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, generator=generator)
        for number in range(tensors)
    }


def _shards(lineage: deltafmt.Lineage) -> list[bytes]:
    return [lineage.history.store.read(key) for key in lineage.manifest(0).shard_keys]


def _upload(server: SeaweedServer, shards: list[bytes]) -> Callable[[], None]:
    fs = _bare(server)
    pieces = [memoryview(data)[at : at + PIECE] for data in shards for at in range(0, len(data), PIECE)]

    def put(number: int) -> None:
        name = f"bare/{number}"
        fs.call_s3("put_object", Bucket=server.buckets[0], Key=name, Body=io.BytesIO(pieces[number]))

    def upload() -> None:
        with ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(put, range(len(pieces))))

    return upload


def _bare(server: SeaweedServer) -> Any:
    """s3fs, connected."""
    fs = server.filesystem(config_kwargs={"max_pool_connections": 2 * STREAMS})
    fs.connect()
    return fs


def _download(server: SeaweedServer, lineage: deltafmt.Lineage, version: int) -> Callable[[], None]:
    """Fetches every chunk of a version by a request of its own, decodes and scatters it; the manifest is known."""
    manifest, history = lineage.manifest(version), lineage.history
    plan = plan_rows(manifest, np.arange(len(manifest.chunks)))
    tiling = history.tiling(manifest.tiling, manifest.schema)
    shapes = [domain_shape(tiling, domain) for domain in range(len(tiling.widths))]
    live = [np.zeros(shape.volume, shape.dtype) for shape in shapes]
    chunks = list(zip(plan.heads(), plan.ranges, strict=True))
    fs = _bare(server)
    root = history.store.url.removeprefix("s3://")

    def fetch(number: int) -> None:
        (head, columns), place = chunks[number]
        data = memoryview(fs.cat_file(f"{root}/{place.key}", start=place.start, end=place.stop))
        decoded = decode_chunk(head, columns, data, shapes[head.domain], where=place.key)
        if decoded.positions is None:
            live[head.domain][:] = decoded.values
        else:
            live[head.domain][decoded.positions] = decoded.values

    def download() -> None:
        with ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(fetch, range(len(chunks))))

    return download


def render(result: dict[str, Any]) -> Iterator[str]:
    yield f"{result['server']} on this machine, {result['streams']} bare streams"
    yield ""
    lines: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("shards", lambda r: f"{r['stored_bytes'] / MIB:.0f} MiB"),
        ("bare upload", lambda r: f"{r['bare_upload_seconds']:.2f} s"),
        ("publish", lambda r: f"{r['publish_seconds']:.2f} s"),
        ("  rate of bare", lambda r: f"{r['publish_rate_of_bare']:.2f}"),
        ("bare download", lambda r: f"{r['bare_cold_seconds']:.2f} s"),
        ("advance from nothing", lambda r: f"{r['cold_seconds']:.2f} s"),
        ("  rate of bare", lambda r: f"{r['cold_rate_of_bare']:.2f}"),
        ("delta", lambda r: f"{r['delta_bytes'] / MIB:.0f} MiB"),
        ("bare download", lambda r: f"{r['bare_delta_seconds']:.2f} s"),
        ("advance by one version", lambda r: f"{r['delta_seconds']:.2f} s"),
        ("  rate of bare", lambda r: f"{r['delta_rate_of_bare']:.2f}"),
        ("identical at the end", lambda r: "yes" if r["identical"] else "NO"),
    ]
    header = ("", *(f"{row['ranks']} rank(s)" for row in result["rows"]))
    yield from table(header, [(name, *(cell(row) for row in result["rows"])) for name, cell in lines])
