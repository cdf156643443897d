"""What a writer stores is what it was given: every dtype, shape, stride and change of schema."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import deltafmt
from deltafmt import Box, Layout, Placement, SchemaError, WriterOptions
from deltafmt.dtypes import DTYPES
from deltafmt.format.constants import DENSE, SET, STEP
from deltafmt.tensors import numpy_bits, torch_dtype

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def url() -> str:
    return f"memory://writer/{uuid.uuid4().hex}"


def same(found: Tensors, expected: Tensors) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        np.testing.assert_array_equal(numpy_bits(found[name]), numpy_bits(tensor), err_msg=name)


def publish_all(url: str, versions: Iterator[Tensors] | list[Tensors], **options: Any) -> deltafmt.Lineage:
    """Publish each, the first as an anchor, then read each back and verify all."""
    writer = deltafmt.Writer(url, **options)
    copies = []
    for number, tensors in enumerate(versions):
        publish = writer.publish if number else writer.publish_anchor
        assert publish(tensors) == number
        copies.append({name: tensor.clone() for name, tensor in tensors.items()})
    lineage = deltafmt.open(url)
    for number, tensors in enumerate(copies):
        same(lineage.read(number), tensors)
    report = lineage.verify()
    assert report.ok, report.problems
    return lineage


def bump(tensor: torch.Tensor, *at: int, by: int = 1) -> None:
    """Change elements, named by their logical flat index, as integers."""
    bits = numpy_bits(tensor)
    for flat in at:
        index = np.unravel_index(flat, bits.shape)
        bits[index] = bits.dtype.type(int(bits[index]) + by & (1 << 8 * bits.itemsize) - 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: str, url: str) -> None:
    random = np.random.default_rng(1)
    size = 3000 * DTYPES[dtype].width
    raw = random.integers(0, 2 if dtype == "bool" else 256, size, np.uint8)
    tensor = torch.from_numpy(raw).view(torch_dtype(dtype)).reshape(30, 100)

    def versions() -> Iterator[Tensors]:
        yield {"w": tensor, "s": tensor[0, 0].clone(), "e": tensor[:0].clone()}
        if dtype == "bool":
            tensor[3, 5] = ~tensor[3, 5]
        else:
            bump(tensor, 0, 305, 2999)
        yield {"w": tensor, "s": tensor[0, 0].clone(), "e": tensor[:0].clone()}
        yield {"w": tensor, "s": tensor[0, 0].clone(), "e": tensor[:0].clone()}

    publish_all(url, versions(), options=WriterOptions(domain_elements=1000))


def test_logical_order_counts_not_memory_order(url: str) -> None:
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    views = {
        "t": base.T,
        "s": base[:, ::2],
        "x": base[:1].expand(3, 4),
        "f": torch.from_numpy(np.asfortranarray(base.numpy())),
        "zero": base[0, 1],
    }
    writer = deltafmt.Writer(url)
    writer.publish_anchor(views)
    same(deltafmt.open(url).read(0), {name: view.contiguous() for name, view in views.items()})
    base[2, 1] += 100
    base[0, 3] += 1
    writer.publish(views)
    same(deltafmt.open(url).read(1), {name: view.contiguous() for name, view in views.items()})
    changed = {
        (row["tensor"], row["index"]) for batch in deltafmt.open(url).changes(1) for row in batch.to_pylist()
    }
    assert changed == {("t", 5), ("t", 9), ("x", 3), ("x", 7), ("x", 11)}


def test_numpy_arrays_are_taken_as_well(url: str) -> None:
    array = np.arange(10, dtype=np.int32)
    writer = deltafmt.Writer(url)
    writer.publish_anchor([("a", array)])
    array[4] = -1
    writer.publish({"a": array})
    assert deltafmt.open(url).read()["a"].tolist() == array.tolist()


def test_boxes_that_are_no_runs(url: str) -> None:
    """Receivers' layouts cut by columns: elements of a domain then lie apart."""
    tensor = torch.randn(64, 300).bfloat16()
    halves = [
        Layout([Placement("w", Box((0, 150 * r), (64, 150 * r + 150)), "w", 0, (150, 1))]) for r in range(2)
    ]
    options = WriterOptions(tile_for=halves, domain_elements=4096)

    def versions() -> Iterator[Tensors]:
        for step in range(3):
            bump(tensor, *range(step, 19200, 97))
            yield {"w": tensor, "n": torch.ones(7)}

    lineage = publish_all(url, versions(), options=options)
    tiling = lineage.history.tiling(lineage.manifest().tiling, lineage.manifest().schema)
    assert {tuple(box) for box in tiling.box_stop[:, 1:].tolist()} >= {(150,), (300,)}


def test_nothing_changed_is_a_version_without_a_shard(url: str) -> None:
    lineage = publish_all(url, [{"w": torch.ones(100)}] * 3)
    info = lineage.log()[2]
    assert (info.changed, info.stored_bytes, len(lineage.manifest(2).domains)) == (0, 0, 0)


def test_bits_are_compared_not_numbers(url: str) -> None:
    bits = torch.tensor([0x00000000, 0x7FC00001, 0x3F800000], dtype=torch.int32)
    tensors = {"w": bits.view(torch.float32)}
    writer = deltafmt.Writer(url)
    writer.publish_anchor(tensors)
    bits[0] = -(2**31)
    writer.publish(tensors)
    assert deltafmt.open(url).manifest(1).changed == 1
    bits[1] += 1
    writer.publish(tensors)
    lineage = deltafmt.open(url)
    assert lineage.manifest(2).changed == 1
    same(lineage.read(2), tensors)


def test_dense_where_that_is_smaller(url: str) -> None:
    random = torch.Generator().manual_seed(0)
    writer = deltafmt.Writer(url)
    tensors = {
        "noise": torch.randint(-(2**31), 2**31 - 1, (5000,), dtype=torch.int64, generator=random).int(),
        "quiet": torch.zeros(5000, dtype=torch.uint8),
    }
    writer.publish_anchor(tensors)
    tensors["noise"].random_(generator=random)
    tensors["quiet"][17] = 1
    writer.publish(tensors)
    lineage = deltafmt.open(url)
    assert sorted(lineage.manifest(1).chunks.operation.tolist()) == [STEP, DENSE]
    same(lineage.read(1), tensors)
    assert lineage.verify().ok


def test_new_bits_where_they_are_smaller_than_steps(url: str) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(20_000)
    live = tensor.clone()
    writer = deltafmt.Writer(url)
    writer.publish_anchor({"w": tensor})
    tensor[::50] = 0
    writer.publish({"w": tensor})
    tensor[1::50] *= 1.0001
    writer.publish({"w": tensor})
    lineage = deltafmt.open(url)
    assert lineage.manifest(1).chunks.operation.tolist() == [SET]
    same(lineage.read(), {"w": tensor})
    receiver = deltafmt.Receiver(url, {"w": live})
    receiver.adopt(0)
    receiver.advance()
    assert torch.equal(live, tensor)


def test_masters_are_published_as_their_cast(url: str) -> None:
    torch.manual_seed(0)
    tensors = {"w": torch.randn(300, 40), "b": torch.randn(9).bfloat16(), "n": torch.arange(4)}
    options, copy = WriterOptions(domain_elements=2000), deltafmt.SnapshotDetector()
    writer = deltafmt.Writer(url, publish_dtype="bfloat16", detector=copy, options=options)
    for step in range(3):
        (writer.publish if step else writer.publish_anchor)(tensors)
        expected = {"w": tensors["w"].bfloat16(), "b": tensors["b"], "n": tensors["n"]}
        same(deltafmt.open(url).read(step), expected)
        tensors["w"] *= 1.001
    assert copy.nbytes == 300 * 40 * 2 + 18 + 32


def test_patterns_choose_what_is_cast(url: str) -> None:
    tensors = {"a.weight": torch.ones(3), "a.bias": torch.ones(3), "b": torch.ones(2, dtype=torch.float64)}
    deltafmt.Writer(url, publish_dtype={"*.weight": "bfloat16"}).publish_anchor(tensors)
    assert [spec.dtype for spec in deltafmt.open(url).schema()] == ["bfloat16", "float32", "float64"]
    with pytest.raises(SchemaError) as caught:
        deltafmt.Writer(f"{url}2", publish_dtype={"b": "bfloat16"}).publish_anchor(tensors)
    assert caught.value.kind == "dtype-mismatch"


def test_ties_form_and_break(url: str) -> None:
    def versions() -> Iterator[Tensors]:
        embed, head = torch.randn(8, 4), torch.randn(8, 4)
        yield {"embed": embed, "head": embed}
        embed[3] += 1
        yield {"embed": embed, "head": embed}
        yield {"embed": embed, "head": head}
        head[1] += 1
        yield {"embed": embed, "head": head}
        yield {"embed": embed, "head": embed}

    lineage = publish_all(url, versions())
    assert [lineage.schema(v)["head"].alias_of for v in range(5)] == ["embed", "embed", None, None, "embed"]
    assert lineage.manifest(0).listed == 32


def test_the_order_of_names_is_no_change(url: str) -> None:
    a, b = torch.ones(5), torch.zeros(6)
    writer = deltafmt.Writer(url)
    writer.publish_anchor({"a": a, "b": b})
    writer.publish({"b": b, "a": a})
    lineage = deltafmt.open(url)
    assert lineage.manifest(1).schema == lineage.manifest(0).schema
    assert lineage.manifest(1).changed == 0


def test_tensors_come_go_and_change_their_shape(url: str) -> None:
    torch.manual_seed(0)
    stays = torch.randn(2000)

    def versions() -> Iterator[Tensors]:
        yield {"stays": stays, "goes": torch.randn(10), "grows": torch.randn(8)}
        stays[5] += 1
        yield {"stays": stays, "comes": torch.randn(3, 3), "grows": torch.randn(9)}
        stays[7] += 1
        yield {"stays": stays, "comes": torch.randn(3, 3), "grows": torch.randn(9)}

    lineage = publish_all(url, versions(), options=WriterOptions(domain_elements=500))
    assert lineage.manifest(1).changed == 1 + 9 + 9


def test_a_dtype_changes_only_by_an_anchor(url: str) -> None:
    writer = deltafmt.Writer(url)
    writer.publish_anchor({"w": torch.ones(4)})
    with pytest.raises(SchemaError) as caught:
        writer.publish({"w": torch.ones(4).double()})
    assert caught.value.kind == "dtype-mismatch"
    assert writer.publish_anchor({"w": torch.ones(4).double()}) == 1
    assert writer.publish({"w": torch.zeros(4).double()}) == 2
    same(deltafmt.open(url).read(), {"w": torch.zeros(4).double()})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda: {"w": torch.zeros(3, device="meta")},
        lambda: {"w": torch.zeros(3).to_sparse()},
        lambda: {"w": torch.zeros(3, dtype=torch.complex64).conj()},
        lambda: {"__metadata__": torch.zeros(3)},
        lambda: {"w": torch.zeros(3, dtype=torch.complex128)},
        lambda: [("w", torch.zeros(3)), ("w", torch.ones(3))],
    ],
)
def test_what_cannot_be_published_is_refused_before_anything_is_written(
    spoil: Callable[[], Any], url: str
) -> None:
    with pytest.raises(SchemaError):
        deltafmt.Writer(url).publish_anchor(spoil())
    with pytest.raises(deltafmt.NotFoundError):
        deltafmt.open(url)


def test_a_given_schema_is_held_to(url: str) -> None:
    schema = deltafmt.Schema.of({"w": torch.ones(3)})
    writer = deltafmt.Writer(url, schema=schema)
    with pytest.raises(SchemaError) as caught:
        writer.publish_anchor({"w": torch.ones(4)})
    assert caught.value.kind == "schema-differs"
    assert writer.publish_anchor({"w": torch.ones(3)}) == 0


def test_labels_and_side_files(url: str, tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    tensors = {"w": torch.ones(3)}
    writer = deltafmt.Writer(url)
    files = {"config.json": tmp_path / "config.json", "tok/vocab.txt": b"a"}
    writer.publish_anchor(tensors, step=5, meta={"reward": 0.25, "tags": ["a"]}, files=files)
    writer.publish(tensors)
    writer.publish(tensors, files={"config.json": b"{1}"})
    lineage = deltafmt.open(url)
    assert (lineage.log()[0].step, lineage.log()[0].meta["reward"]) == (5, 0.25)
    assert lineage.files(1) == {"config.json": b"{}", "tok/vocab.txt": b"a"}
    assert lineage.files(2) == {"config.json": b"{1}"}
    for meta in ({1: "x"}, {"x": object()}, {"x": "y" * (2 << 20)}):
        with pytest.raises(SchemaError) as caught:
            writer.publish(tensors, meta=meta)  # type: ignore[arg-type]
        assert caught.value.kind == "meta-invalid"
    with pytest.raises(deltafmt.FormatError):
        writer.publish(tensors, files={"../x": b""})
    assert deltafmt.open(url).latest() == 2


def test_anchors_behind_deltas(url: str) -> None:
    tensor = torch.randn(500)
    writer = deltafmt.Writer(url, options=WriterOptions(anchor_every=2))
    writer.publish_anchor({"w": tensor})
    for _ in range(4):
        bump(tensor, 3)
        writer.publish({"w": tensor})
    lineage = deltafmt.open(url)
    assert [info.ways for info in lineage.log()] == [(None,), (0,), (1, None), (2,), (3, None)]
    assert lineage.verify().ok
    lineage.add_anchor(4)
    lineage.add_anchor(3)
    assert deltafmt.open(url).log()[3].ways == (2, None)


def test_an_anchor_without_data_is_a_base(url: str) -> None:
    tensor = torch.randn(500)
    writer = deltafmt.Writer(url)
    live = tensor.clone()
    writer.publish_anchor({"w": tensor}, store_data=False, meta={"hint": "a public checkpoint"})
    bump(tensor, 8)
    writer.publish({"w": tensor})
    with pytest.raises(deltafmt.NotFoundError):
        deltafmt.open(url).read(1)
    receiver = deltafmt.Receiver(url, {"w": live})
    assert receiver.adopt(0) == 0
    assert receiver.advance() == 1
    assert torch.equal(live, tensor)


def test_publish_before_an_anchor_says_what_to_do(url: str) -> None:
    with pytest.raises(deltafmt.NotFoundError, match="publish_anchor"):
        deltafmt.Writer(url).publish({"w": torch.ones(3)})


@pytest.mark.parametrize("field", ["domain_elements", "anchor_every", "squash", "threads"])
def test_options_must_be_positive(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        WriterOptions(**{field: 0})  # type: ignore[arg-type]


def test_more_than_a_reader_takes_is_refused_before_anything_is_written(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltafmt.write import commit

    tensors = {f"w{k}": torch.ones(1) for k in range(9)}
    with monkeypatch.context() as patch:
        patch.setattr(commit, "MAX_TENSORS", 8)
        with pytest.raises(SchemaError, match="more tensors"):
            deltafmt.Writer(url).publish_anchor(tensors)
        with pytest.raises(SchemaError, match="more tensors"):
            deltafmt.create(url, deltafmt.Schema.of(tensors))
    with monkeypatch.context() as patch:
        patch.setattr(commit, "MAX_OBJECT_BYTES", 100)
        with pytest.raises(SchemaError, match="metadata"):
            deltafmt.Writer(url).publish_anchor(tensors)
    with pytest.raises(deltafmt.NotFoundError):
        deltafmt.open(url)
