"""Codings of what changed, in bits per changed element and in speed, against what others use.

Bits are compared with the entropy of positions (geometric, per tensor) and steps. Detecting and encoding is
given as a share of the bandwidth at which two arrays are read side by side; decoding and applying as a share
of the rate at which bare values are written at the same positions, indices given as int32. All of it in
memory, with one thread and with many.
"""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deltafmt.dtypes import SIGN_MAGNITUDE
from deltafmt.kernels.steps import step_between
from deltafmt.tensors import numpy_bits
from tools.bench.codings import Coding, changes, codings, cut_flat, scatter
from tools.bench.machine import MIB, best_of, cores, table, two_stream_bandwidth
from tools.bench.models import Workload, synthetic, trace, trace_folders, trained

Bits = npt.NDArray[Any]

_PIECE = 1 << 22
"""Elements coded at a time, as in a domain of the usual size."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, default=512, metavar="MIB", help="synthetic model (default: 512)")
    parser.add_argument(
        "--share",
        type=float,
        nargs="*",
        default=[0.002, 0.01, 0.03],
        metavar="S",
        help="shares that change (default: 0.002 0.01 0.03)",
    )
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="runs, of which the best counts")
    parser.add_argument(
        "--threads",
        type=int,
        nargs="*",
        default=sorted({1, cores()}),
        metavar="N",
        help="thread counts (default: one, and all cores)",
    )
    parser.add_argument("--only", nargs="*", metavar="CODING", help='codings to run, "step" for example')
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder with recorded traces")
    parser.add_argument("--no-traces", action="store_true", help="only the synthetic updates")


def run(options: argparse.Namespace) -> dict[str, Any]:
    makers: list[Callable[[], Workload]] = [
        partial(synthetic, options.size * MIB, share, 1) for share in options.share
    ]
    if not options.no_traces:
        folders = trace_folders(options.traces)
        makers += [partial(trace, folder) for folder in folders] or [partial(trained, 2)]
    workloads = []
    for make in makers:
        workloads.append(_measure(make(), options))
        gc.collect()
    return {"threads": options.threads, "piece_elements": _PIECE, "workloads": workloads}


@dataclass(frozen=True, kw_only=True)
class Model:
    """The last update of a workload, its tensors back to back."""

    name: str
    old: Bits
    new: Bits
    ends: npt.NDArray[np.int64]

    @classmethod
    def of(cls, workload: Workload) -> Model:
        flats = [numpy_bits(tensor).reshape(-1) for tensor in _distinct(workload)]
        old = new = np.concatenate(flats)
        for _ in workload.steps():
            old, new = new, np.concatenate(flats)
        return cls(name=workload.name, old=old, new=new, ends=np.cumsum([len(flat) for flat in flats]))

    def limit_bits(self) -> float:
        """Entropy per changed element of positions, uniform in each tensor, and of steps."""
        positions, old, new = changes(self.old, self.new)
        sizes = np.diff(self.ends, prepend=0)
        counts = np.diff(np.searchsorted(positions, self.ends), prepend=0)
        share = counts / sizes
        index = -(counts * _log2(share)).sum() - ((sizes - counts) * _log2(1 - share)).sum()
        steps = np.unique(step_between(old, new, SIGN_MAGNITUDE), return_counts=True)[1]
        return float((index - (steps * _log2(steps / len(positions))).sum()) / len(positions))


def _distinct(workload: Workload) -> list[Any]:
    """The workload's tensors, tied ones once."""
    return list({tensor.data_ptr(): tensor for tensor in workload.tensors.values()}.values())


def _log2(share: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Logarithms, zero where there is nothing to weigh."""
    return np.log2(share, where=share > 0, out=np.zeros_like(share))


def _measure(workload: Workload, options: argparse.Namespace) -> dict[str, Any]:
    model = Model.of(workload)
    del workload
    live = model.old.copy()
    cut = cut_flat(len(live), _PIECE)
    starts = cut.tiling.box_start[:, 0].tolist()
    pieces = [slice(low, high) for low, high in itertools.pairwise([*starts, len(live)])]
    listed = [changes(model.old[piece], model.new[piece]) for piece in pieces]
    index = [positions.view(np.int32) for positions, _, _ in listed]
    changed = sum(map(len, index))

    def write(piece: int) -> None:
        scatter(live[pieces[piece]], index[piece], listed[piece][2])

    rates = {
        str(n): {
            "two_stream_bytes_per_second": two_stream_bandwidth(
                max(256 * MIB, live.nbytes), n, options.repeat
            ),
            "scatter_elements_per_second": changed / _seconds(write, len(pieces), n, options.repeat),
        }
        for n in options.threads
    }
    limit = model.limit_bits()
    rows = []
    for coding in codings(cut):
        if options.only and coding.name not in options.only:
            continue
        row = _measure_coding(coding, model, live, pieces, options)
        row["bits_per_changed"] = 8 * row.pop("stored_bytes") / changed
        row["over_limit"] = row["bits_per_changed"] / limit
        for n, rate in rates.items():
            encode, apply = row["seconds"][n]["encode"], row["seconds"][n]["apply"]
            row["seconds"][n]["encode_share"] = 2 * live.nbytes / encode / rate["two_stream_bytes_per_second"]
            row["seconds"][n]["apply_share"] = changed / apply / rate["scatter_elements_per_second"]
        rows.append(row)
    return {
        "workload": model.name,
        "elements": len(live),
        "changed": changed,
        "limit_bits": limit,
        "rates": rates,
        "codings": rows,
    }


def _measure_coding(
    coding: Coding, model: Model, live: Bits, pieces: list[slice], options: argparse.Namespace
) -> dict[str, Any]:
    stored: list[Any] = [None] * len(pieces)

    def encode(piece: int) -> None:
        stored[piece] = coding.encode(piece, model.old[pieces[piece]], model.new[pieces[piece]])

    def apply(piece: int) -> None:
        coding.apply(piece, stored[piece], live[pieces[piece]])

    for piece in range(len(pieces)):
        encode(piece)
    live[:] = model.old
    for piece in range(len(pieces)):
        apply(piece)
    # What is applied again and again below does not lead anywhere, but takes as long.
    identical = bool(np.array_equal(live, model.new))
    seconds = {
        str(n): {
            "encode": _seconds(encode, len(pieces), n, options.repeat),
            "apply": _seconds(apply, len(pieces), n, options.repeat),
        }
        for n in options.threads
    }
    return {
        "coding": coding.name,
        "identical": identical,
        "stored_bytes": sum(map(coding.nbytes, stored)),
        "seconds": seconds,
    }


def _seconds(action: Callable[[int], None], pieces: int, threads: int, repeat: int) -> float:
    """Best time of an action on all pieces."""
    if threads == 1:
        return best_of(repeat, lambda: list(map(action, range(pieces))))
    with ThreadPoolExecutor(threads) as pool:
        return best_of(repeat, lambda: list(pool.map(action, range(pieces))))


def render(result: dict[str, Any]) -> Iterator[str]:
    for workload in result["workloads"]:
        share = 100 * workload["changed"] / workload["elements"]
        yield (
            f"{workload['workload']}: {workload['elements'] / 1e6:.1f} M elements, {share:.2f} % changed, "
            f"limit {workload['limit_bits']:.2f} bits"
        )
        for n, rate in workload["rates"].items():
            yield (
                f"  {n} thread(s): two streams {rate['two_stream_bytes_per_second'] / 1e9:.1f} GB/s, "
                f"scatter {rate['scatter_elements_per_second'] / 1e6:.0f} M/s"
            )
        threads = list(workload["rates"])
        shares = [f"{what} x{n}" for what in ("encode", "apply") for n in threads]
        header = ("coding", "bits/changed", "over limit", *shares, "identical")
        yield from table(header, [_cells(row, threads) for row in workload["codings"]])
        yield ""
    yield "encode: detect and encode, share of two-stream read bandwidth; apply: decode and write, share of"
    yield "the bare scatter rate of the same positions; xN: with N threads, against N threads."


def _cells(row: dict[str, Any], threads: list[str]) -> tuple[str, ...]:
    shares = [f"{row['seconds'][n][what]:.2f}" for what in ("encode_share", "apply_share") for n in threads]
    return (
        row["coding"],
        f"{row['bits_per_changed']:.2f}",
        f"{row['over_limit']:.3f}",
        *shares,
        "yes" if row["identical"] else "NO",
    )
