"""What is published: synthetic updates, a recorded training trace, or a small model trained here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltafmt.dtypes import SIGN_MAGNITUDE
from deltafmt.kernels.steps import add_step
from deltafmt.tensors import numpy_bits

ROOT = Path(__file__).resolve().parents[2]
TRACE_FOLDERS = (ROOT / "shared" / "traces", ROOT.parent / "shared" / "traces")
"""Where recorded traces are looked for unless a folder is given."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Live tensors, and what turns them, in place, into the next version's; ends when there is no next."""

    name: str
    tensors: dict[str, torch.Tensor]
    steps: Callable[[], Iterator[None]]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def synthetic(size_bytes: int, share: float, versions: int, seed: int = 0, columns: int = 4096) -> Workload:
    """BF16 matrices in which a share of the elements moves: 90 % by one ULP, 8 % by two, the rest by 3 to 16."""
    random = np.random.default_rng(seed)
    tensors: dict[str, torch.Tensor] = {}
    rows = max(1, size_bytes // 2 // columns)
    for first in range(0, rows, 4 * columns):
        shape = (min(4 * columns, rows - first), columns)
        values = random.standard_normal(shape, np.float32) * np.float32(0.02)
        tensors[f"layers.{len(tensors)}.weight"] = torch.from_numpy(values).to(torch.bfloat16)

    def steps() -> Iterator[None]:
        for _ in range(versions):
            for tensor in tensors.values():
                _move(numpy_bits(tensor).reshape(-1), share, random)
            yield

    return Workload(name=f"synthetic {100 * share:g} %", tensors=tensors, steps=steps)


def _move(bits: npt.NDArray[Any], share: float, random: np.random.Generator) -> None:
    count = int(len(bits) * share * 1.2) + 16
    at = np.cumsum(random.geometric(share, count)) - 1
    at = at[at < len(bits)]
    kind = random.random(len(at))
    size = np.where(kind < 0.90, 1, np.where(kind < 0.98, 2, random.integers(3, 17, len(at))))
    step = np.where(random.random(len(at)) < 0.5, size, -size).astype(np.int16).view(np.uint16)
    bits[at] = add_step(bits[at], step, SIGN_MAGNITUDE)


def trace_folders(given: Path | None) -> list[Path]:
    """Folders that hold a trace: `base.safetensors` and `step1.npz`, `step2.npz`, ... ."""
    tops = [given] if given is not None else [folder for folder in TRACE_FOLDERS if folder.is_dir()]
    found = [path.parent for top in tops for path in sorted(top.rglob("base.safetensors"))]
    return list(dict.fromkeys(found))


def trace(folder: Path) -> Workload:
    """A recorded training run: real weights, and what really changed."""
    from safetensors.torch import load_file

    held = load_file(folder / "base.safetensors")
    order = [name for name, _ in json.loads((folder / "tensors.json").read_text())]
    tensors = {name: held[name].clone() for name in order}
    ends = np.cumsum([tensor.numel() for tensor in tensors.values()])

    def steps() -> Iterator[None]:
        for file in sorted(folder.glob("step*.npz")):
            update = np.load(file)
            index, new = update["index"].astype(np.int64), update["bits"]
            cuts = np.searchsorted(index, np.concatenate(([0], ends)))
            for number, tensor in enumerate(tensors.values()):
                here = slice(cuts[number], cuts[number + 1])
                first = int(ends[number]) - tensor.numel()
                numpy_bits(tensor).reshape(-1)[index[here] - first] = new[here]
            yield

    return Workload(name=f"trace {folder.name}", tensors=tensors, steps=steps)


def trained(versions: int, *, size: str = "small", warm_up: int = 30, seed: int = 0) -> Workload:
    """The demo's small transformer under AdamW, where no trace is at hand."""
    from deltafmt.cli.demo.trainer import Trainer

    trainer = Trainer(size, seed)
    trainer.warm_up(warm_up)
    tensors = trainer.cast()
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"]

    def steps() -> Iterator[None]:
        for _ in range(versions):
            trainer.step()
            for name, tensor in trainer.cast().items():
                tensors[name].copy_(tensor)
            yield

    return Workload(name="trained here", tensors=tensors, steps=steps)
