"""A directory of safetensors as named tensors and side files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deltafmt.cli.failures import UsageError
from deltafmt.format.keys import check_name

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
WEIGHT_SUFFIXES = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"}
)
"""Files that hold weights; they are no side files of a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a directory (or one file) holds: tensors mapped from disk, and the files beside them by name."""

    tensors: dict[str, torch.Tensor]
    files: dict[str, Path]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read_checkpoint(path: Path) -> Checkpoint:
    """Open a safetensors file, or a directory with one or with an index of several.

    Tensors are mapped, not read: their pages come from the files when they are used.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file, names in _weight_files(path).items():
        try:
            held = load_file(file)
        except SafetensorError as error:
            raise UsageError(
                f"{file} is no safetensors file: {error}", "give a checkpoint in safetensors"
            ) from error
        for name in sorted(names) if names else held:
            if name in tensors or name not in held:
                problem = (
                    "stands in two files" if name in tensors else f"is not in {file.name}, as the index says"
                )
                raise UsageError(f"tensor {name!r} {problem}", "repair the checkpoint or its index")
            tensors[name] = held[name]
    if not tensors:
        raise UsageError(f"{path} holds no tensor", "give a directory with *.safetensors files")
    return Checkpoint(tensors=tensors, files=_side_files(path))


def _weight_files(path: Path) -> dict[Path, set[str] | None]:
    """The files that hold the weights, each with the names that the index puts there (None: all)."""
    if path.is_file():
        return {path: None}
    if not path.is_dir():
        raise UsageError(f"{path} does not exist", "give a safetensors file, or a directory of them")
    index = path / INDEX
    if index.is_file():
        return _indexed(path, index)
    found: dict[Path, set[str] | None] = dict.fromkeys(sorted(path.glob("*.safetensors")))
    if not found:
        raise UsageError(f"{path} has no *.safetensors file", "give the directory that save_pretrained wrote")
    return found


def _indexed(folder: Path, index: Path) -> dict[Path, set[str] | None]:
    try:
        places = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{index} has no weight_map ({error})", "write the checkpoint again") from error
    names: dict[str, set[str]] = {}
    for tensor, file in places.items():
        names.setdefault(check_name(str(file), where=index), set()).add(str(tensor))
    for file in names:
        if not (folder / file).is_file():
            raise UsageError(f"{index.name} names {file}, which is not there", "complete the checkpoint")
    return {folder / file: members for file, members in sorted(names.items())}


def _side_files(path: Path) -> dict[str, Path]:
    """Config, tokenizer and the like: every other visible file, by its name below the directory."""
    if path.is_file():
        return {}
    result = {}
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path)
        hidden = any(part.startswith(".") for part in name.parts)
        index = len(name.parts) == 1 and file.name.lower().endswith(".safetensors.index.json")
        if file.is_file() and not hidden and file.suffix not in WEIGHT_SUFFIXES and not index:
            result[check_name(name.as_posix(), where=path)] = file
    return result
