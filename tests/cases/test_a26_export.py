"""A26: an exported file must be a true safetensors file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file

import deltafmt
from deltafmt import safetensors_file
from deltafmt.errors import SchemaError
from deltafmt.safetensors_file import split_files
from deltafmt.schema import Schema, TensorSpec
from tests.cases.common import assert_same, new_root, of_bits


def named_to_length(target: int) -> dict[str, torch.Tensor]:
    """Tensors whose names make the padded header exactly `target` bytes long."""
    long = "n" * 3000
    tensors = {f"{long}{k}": torch.tensor([float(k)]) for k in range(target // 3100)}
    for extra in range(1, 3100):
        trial = {**tensors, "x" * extra: torch.tensor([0.5])}
        layout = safetensors_file.file_layout(list(Schema.of(trial)))
        if len(layout.head) - 8 == target:
            return trial
    raise AssertionError(target)


@pytest.mark.parametrize("length", [99_992, 100_000, 100_008])
def test_headers_around_a_hundred_thousand_bytes(length: int, tmp_path: Path) -> None:
    root, tensors = new_root(), named_to_length(length)
    deltafmt.Writer(root).publish_anchor(tensors)
    deltafmt.open(root).export(0, tmp_path / "out")
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert int.from_bytes(data[:8], "little") == length
    assert (8 + length) % 8 == 0
    assert_same(load(data), tensors)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), tensors)


def test_every_export_has_the_same_bytes(tmp_path: Path) -> None:
    root = new_root()
    tensors = {
        "b": torch.randn(5, 3).bfloat16(),
        "a": torch.arange(7),
        "e": torch.zeros(0, 4),
        "s": torch.ones(()),
    }
    deltafmt.Writer(root).publish_anchor(tensors)
    for folder in ("one", "two"):
        deltafmt.open(root).export(0, tmp_path / folder)
    first, second = (tmp_path / folder / "model.safetensors" for folder in ("one", "two"))
    assert first.read_bytes() == second.read_bytes()


def test_wide_elements_are_aligned_whatever_stands_before_them(tmp_path: Path) -> None:
    root = new_root()
    tensors = {
        "flag": torch.tensor([True]),
        "half": torch.ones(3).half(),
        "byte": of_bits("float8_e4m3fn", [1, 2, 3]),
        "wide": torch.ones(2, dtype=torch.float64),
        "single": torch.ones(1),
    }
    deltafmt.Writer(root).publish_anchor(tensors)
    deltafmt.open(root).export(0, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    assert_same(load_file(path), tensors)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name, tensor in tensors.items():
        start, stop = header[name]["data_offsets"]
        assert (8 + length + start) % tensor.element_size() == 0
        assert stop - start == tensor.nbytes


def test_the_reserved_name_is_refused_at_publish() -> None:
    root = new_root()
    with pytest.raises(SchemaError) as caught:
        deltafmt.Writer(root).publish_anchor({"__metadata__": torch.ones(1)})
    assert caught.value.kind == "name-reserved"
    assert "__metadata__" in str(caught.value)
    with pytest.raises(deltafmt.NotFoundError):
        deltafmt.open(root)


def test_over_the_header_limit_the_export_is_an_indexed_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_file, "MAX_HEADER_BYTES", 4000)
    root = new_root()
    tensors = {f"layer.{k}.weight": torch.tensor([float(k)]) for k in range(100)}
    deltafmt.Writer(root).publish_anchor(tensors)
    files = deltafmt.open(root).export(0, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == 400
    shards = [path for path in files if path.suffix == ".safetensors"]
    assert len(shards) > 1
    found: dict[str, Any] = {}
    for path in shards:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                assert index["weight_map"][name] == path.name
                found[name] = file.get_tensor(name)
        assert int.from_bytes(path.read_bytes()[:8], "little") <= 4000
    assert_same({name: found[name] for name in tensors}, tensors)


def test_a_header_is_never_larger_than_the_library_opens() -> None:
    specs = [TensorSpec(f"{k:04d}" + "\x01" * 4000, "uint8", (1,)) for k in range(100)]
    for file in split_files(specs, file_bytes=1 << 40):
        assert len(file.head) <= safetensors_file.MAX_HEADER_BYTES


def test_side_files_and_tied_names(tmp_path: Path) -> None:
    root = new_root()
    embed = torch.randn(4, 2)
    writer = deltafmt.Writer(root)
    writer.publish_anchor({"embed": embed, "lm_head": embed}, files={"config.json": b"{}", "a/b.txt": b"x"})
    embed[3] += 1
    writer.publish({"embed": embed, "lm_head": embed})
    deltafmt.open(root).export(None, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_bytes() == b"{}"
    assert (tmp_path / "out" / "a" / "b.txt").read_bytes() == b"x"
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert_same(found, {"embed": embed, "lm_head": embed})


def test_a_failed_export_leaves_nothing_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = new_root()
    tensors = {f"w{k}": torch.randn(50) for k in range(4)}
    deltafmt.Writer(root).publish_anchor(tensors)
    lineage = deltafmt.open(root)
    with monkeypatch.context() as patch:

        def broken(*_: object) -> Any:
            yield "w0", tensors["w0"]
            raise OSError(28, "No space left on device")

        patch.setattr(lineage, "_stream", broken)
        with pytest.raises(deltafmt.StoreError, match="No space left"):
            lineage.export(0, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    lineage.export(0, tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), tensors)
    with pytest.raises(deltafmt.StoreError):
        lineage.export(0, tmp_path / "out")
