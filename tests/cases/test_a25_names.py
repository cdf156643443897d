"""A25: names of side files never leave a root or a folder; names of tensors are no paths and stay free."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import deltafmt
from deltafmt.errors import FormatError
from deltafmt.format import keys
from deltafmt.format.checksum import blake2b
from deltafmt.tensors import numpy_bits
from tests.formats import edited

UNSAFE = [
    "../x",
    "a/../../x",
    "/etc/passwd",
    "s3://other/x",
    "file:///etc/passwd",
    "C:\\x",
    "..\\x",
    "%2e%2e/x",
    "x\0y",
    "",
    ".",
]


def weights() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(6, dtype=torch.float32)}


def everything(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    writer = deltafmt.Writer(str(tmp_path / "root"))
    writer.publish_anchor(weights(), files={"config.json": b"{}"})
    return tmp_path / "root"


USES: dict[str, Callable[[deltafmt.Lineage, Path], object]] = {
    "manifest": lambda lineage, folder: lineage.manifest(0),
    "read": lambda lineage, folder: lineage.read(0),
    "log": lambda lineage, folder: lineage.log(),
    "export": lambda lineage, folder: lineage.export(0, folder / "out"),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", UNSAFE)
def test_a_manifest_with_an_unsafe_name_is_refused(root: Path, tmp_path: Path, use: str, name: str) -> None:
    path = root / keys.version_key(0)
    path.write_bytes(edited(path.read_bytes(), lambda body: body.update(files={name: [blake2b(b"{}"), 2]})))
    before = everything(tmp_path)
    with pytest.raises(FormatError) as caught:
        USES[use](deltafmt.open(str(root)), tmp_path)
    assert caught.value.kind == "key-unsafe"
    assert [name for name in everything(tmp_path) if name not in before] in ([], ["out"])


@pytest.mark.parametrize("name", UNSAFE)
def test_an_unsafe_name_is_not_published(root: Path, tmp_path: Path, name: str) -> None:
    before = everything(tmp_path)
    writer = deltafmt.Writer(str(root))
    with pytest.raises(FormatError) as caught:
        writer.publish_anchor(weights(), files={"good": b"x", name: b"y"})
    assert caught.value.kind == "key-unsafe"
    assert deltafmt.open(str(root)).latest() == 0
    assert [path for path in everything(tmp_path) if path not in before] == []


def test_names_of_tensors_are_no_paths(tmp_path: Path) -> None:
    names = ["../x", "/etc/passwd", "s3://b/x", "C:\\x", "%2e%2e/x", "a\0b", "", ".", "a b\n", "\u202egro"]
    tensors = {name: torch.full((3,), float(k)) for k, name in enumerate(names)}
    root = tmp_path / "root"
    writer = deltafmt.Writer(str(root))
    writer.publish_anchor(tensors)
    tensors["../x"][1] = 9
    writer.publish(tensors)
    lineage = deltafmt.open(str(root))
    found = lineage.read(1)
    assert list(found) == names
    assert all((numpy_bits(found[name]) == numpy_bits(tensors[name])).all() for name in names)
    assert lineage.verify().ok
    lineage.export(1, tmp_path / "out")
    assert everything(tmp_path / "out") == ["model.safetensors", "model.safetensors.index.json"]
    assert not (tmp_path / "x").exists()
