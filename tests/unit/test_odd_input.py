"""What callers hand in by mistake or by habit: taken as it is meant, or refused by name before anything is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deltafmt
from deltafmt.errors import DeltafmtError, FormatError, LayoutError, SchemaError, UnsupportedError


def published(root: Path, tensors: Any, **arguments: Any) -> dict[str, torch.Tensor]:
    deltafmt.Writer(root).publish_anchor(tensors, **arguments)
    return deltafmt.open(root).read()


def given_back(count: int) -> torch.Tensor:
    """A tensor whose storage was freed, as sharded modules do between steps."""
    tensor = torch.ones(count)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(3, 4)[::-1, ::-2],
        np.arange(12, dtype=">f4").reshape(3, 4),
        np.arange(12, dtype=">i8")[::-3],
        np.broadcast_to(np.arange(4, dtype="<u2"), (3, 4)),
        np.array(2.5, np.float16),
    ],
)
def test_arrays_of_any_strides_and_byte_order_are_sources(tmp_path: Path, array: np.ndarray) -> None:
    found = published(tmp_path / "run", {"w": array})["w"].numpy()
    assert found.dtype == array.dtype.newbyteorder("=")
    assert found.tolist() == array.tolist()
    assert deltafmt.Schema.of({"w": array}) == deltafmt.open(tmp_path / "run").schema()


@pytest.mark.parametrize(
    "tensor",
    [
        given_back(3),
        torch.ones(8).as_strided((4,), (2,)).untyped_storage().resize_(4) and given_back(4),
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
    ids=["freed", "cut", "sparse", "meta", "nested"],
)
def test_tensors_without_elements_in_memory_are_refused(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(SchemaError) as caught:
        published(tmp_path / "run", {"w": tensor})
    assert caught.value.kind == "dtype-mismatch"
    assert not (tmp_path / "run").exists()


def test_a_target_whose_storage_was_freed_is_refused(tmp_path: Path) -> None:
    published(tmp_path / "run", {"w": torch.ones(3)})
    with pytest.raises(UnsupportedError):
        deltafmt.Receiver(tmp_path / "run", {"w": given_back(3)})
    live = torch.zeros(3)
    receiver = deltafmt.Receiver(tmp_path / "run", {"w": live})
    live.untyped_storage().resize_(0)
    with pytest.raises(LayoutError) as caught:
        receiver.advance()
    assert caught.value.kind == "target-moved"


def test_a_model_is_no_mapping_of_tensors(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    for attempt in (
        lambda: published(tmp_path / "run", model),
        lambda: deltafmt.Schema.of(model),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match="state_dict"):
            attempt()
    assert published(tmp_path / "run", model.named_parameters()).keys() == {"weight", "bias"}


@pytest.mark.parametrize("value", [[1, 2], None, 2.5, np.float32(1)])
def test_what_is_no_tensor_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(SchemaError):
        published(tmp_path / "run", {"w": value})


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(-3), -3),
        (torch.tensor(1.5), 1.5),
        ({"loss": torch.tensor(2), "all": (1, [np.uint8(7)])}, {"loss": 2, "all": [1, [7]]}),
        (float("inf"), float("inf")),
        (b"\x00", b"\x00"),
        (2**64 - 1, 2**64 - 1),
    ],
)
def test_labels_of_training_loops(tmp_path: Path, value: object, kept: object) -> None:
    published(tmp_path / "run", {"w": torch.ones(1)}, meta={"a": value})
    assert deltafmt.open(tmp_path / "run").log()[0].meta == {"a": kept}


@pytest.mark.parametrize(
    "arguments",
    [
        {"meta": "text"},
        {"meta": [1]},
        {"meta": {1: 2}},
        {"meta": {"a": 2**64}},
        {"meta": {"a": np.zeros(3)}},
        {"meta": {"a": {1, 2}}},
        {"meta": {"a": "x" * 2**20}},
        {"meta": {"step": "late"}},
        {"step": 1.5},
        {"step": "7"},
        {"step": float("nan")},
        {"step": torch.tensor(0.5)},
        {"step": -(2**63) - 1},
    ],
)
def test_labels_that_cannot_be_kept(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(SchemaError) as caught:
        published(tmp_path / "run", {"w": torch.ones(1)}, **arguments)
    assert caught.value.kind == "meta-invalid"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step", [-1, np.int64(7), torch.tensor(7), 2**63])
def test_steps_are_whole_numbers(tmp_path: Path, step: Any) -> None:
    published(tmp_path / "run", {"w": torch.ones(1)}, step=step)
    assert deltafmt.open(tmp_path / "run").log()[0].step == int(step)


@pytest.mark.parametrize(
    "names",
    [
        ["model.safetensors"],
        ["Model.safetensors"],
        ["model.safetensors.index.json"],
        ["model-00001-of-00002.safetensors"],
        ["a", "a/b"],
        ["a/b/c", "a/b"],
        [5],
    ],
)
def test_side_files_that_no_export_could_write(tmp_path: Path, names: list[Any]) -> None:
    with pytest.raises(FormatError) as caught:
        published(tmp_path / "run", {"w": torch.ones(1)}, files=dict.fromkeys(names, b"x"))
    assert caught.value.kind == "key-unsafe"
    assert not list((tmp_path / "run").glob("files/*"))


def test_side_files_from_any_bytes(tmp_path: Path) -> None:
    files: Any = {
        "a": bytearray(b"1"),
        "b": memoryview(b"22"),
        "sub/model.safetensors.index.json": b"",
        "a.b": b"3",
    }
    published(tmp_path / "run", {"w": torch.ones(1)}, files=files)
    deltafmt.open(tmp_path / "run").export(0, tmp_path / "out")
    assert {name: (tmp_path / "out" / name).read_bytes() for name in files} == {
        name: bytes(content) for name, content in files.items()
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, {"w*": torch.bfloat16}, "bfloat16"])
def test_a_published_dtype_by_its_name_or_by_torchs(tmp_path: Path, dtype: Any) -> None:
    deltafmt.Writer(tmp_path, publish_dtype=dtype).publish_anchor(
        {"w": torch.ones(3), "n": torch.ones(1).int()}
    )
    schema = deltafmt.open(tmp_path).schema()
    assert [spec.dtype for spec in schema] == ["bfloat16", "int32"]


@pytest.mark.parametrize("dtype", ["float64", "int8", torch.int16, "float7", {"w": "float64"}])
def test_other_published_dtypes_are_refused(tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(SchemaError) as caught:
        deltafmt.Writer(tmp_path, publish_dtype=dtype).publish_anchor({"w": torch.ones(3)})
    assert "float32, found float32" not in str(caught.value)


def test_roots_are_named_by_text_or_path(tmp_path: Path) -> None:
    published(tmp_path / "run", {"w": torch.ones(1)})
    for root in (tmp_path / "run", str(tmp_path / "run"), f"file://{tmp_path}/run"):
        assert deltafmt.open(root).latest() == 0
    with pytest.raises(UnsupportedError):
        deltafmt.open("")
    with pytest.raises(TypeError):
        deltafmt.open(None)  # type: ignore[arg-type]


def test_versions_are_whole_numbers_and_one_name_is_one_name(tmp_path: Path) -> None:
    published(tmp_path / "run", {"weight": torch.ones(1)})
    lineage = deltafmt.open(tmp_path / "run")
    assert list(lineage.read(np.int64(0), "weight")) == ["weight"]  # type: ignore[arg-type]
    for version in ("latest", 0.0):
        with pytest.raises(TypeError):
            lineage.read(version)  # type: ignore[arg-type]


def test_a_cast_of_no_local_tensor_is_refused(tmp_path: Path) -> None:
    published(tmp_path / "run", {"w": torch.ones(1)})
    schema = deltafmt.open(tmp_path / "run").schema()
    layout = deltafmt.Layout(deltafmt.Layout.identity(schema).placements, casts={"v": "bfloat16"})
    with pytest.raises(LayoutError) as caught:
        deltafmt.Receiver(tmp_path / "run", {"w": torch.zeros(1)}, layout=layout)
    assert caught.value.kind == "name-unknown"


def test_a_folder_that_cannot_be_made_is_a_failure_of_storage() -> None:
    with pytest.raises(DeltafmtError) as caught:
        published(Path("/proc/no-such-folder"), {"w": torch.ones(1)})
    assert caught.value.kind == "store-failed"


def test_a_root_that_lost_its_descriptor_is_not_begun_anew(tmp_path: Path) -> None:
    root, tensors = tmp_path / "run", {"w": torch.ones(3)}
    published(root, tensors)
    (root / "lineage.dfm").unlink()
    schema = deltafmt.Schema.of(tensors)
    for attempt in (
        lambda: deltafmt.open(root),
        lambda: deltafmt.create(root, schema),
        lambda: deltafmt.Writer(root).publish_anchor(tensors),
        lambda: deltafmt.Writer(root).publish(tensors),
    ):
        with pytest.raises(DeltafmtError, match="descriptor is gone"):
            attempt()
    assert not (root / "lineage.dfm").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("elements", [8, 1 << 22])
def test_casts_of_nans_do_not_depend_on_how_tensors_are_cut(
    tmp_path: Path, dtype: str, elements: int
) -> None:
    random = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (64, 48), generator=random).to(torch.int32)
    bits[::3] |= 0x7F800000
    masters = bits.view(torch.float32)
    tensors = {
        "c": masters,
        "t": masters.t(),
        "s": masters[:, ::2],
        "d": masters[3, 5].clone(),
        "r": masters[5:, :1],
    }
    writer = deltafmt.Writer(
        tmp_path, publish_dtype=dtype, options=deltafmt.WriterOptions(domain_elements=elements)
    )
    writer.publish_anchor(tensors)
    first = bits_of(deltafmt.open(tmp_path).read())
    cast = getattr(torch, dtype)
    assert first == bits_of({name: tensor.contiguous().to(cast) for name, tensor in tensors.items()})
    assert torch.equal(
        deltafmt.open(tmp_path).read()["c"].view(torch.int16), masters.to(cast).view(torch.int16)
    )
    version = writer.publish(tensors)
    assert deltafmt.open(tmp_path).manifest(version).changed == 0
    bits[7:20, 3:9] ^= 0x00410000
    version = writer.publish(tensors)
    assert bits_of(deltafmt.open(tmp_path).read(version)) == bits_of(
        {name: tensor.contiguous().to(cast) for name, tensor in tensors.items()}
    )


def bits_of(tensors: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    return {
        name: tensor.contiguous().view(torch.int16).flatten().tolist() for name, tensor in tensors.items()
    }
