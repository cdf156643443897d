"""Mistakes of callers are told in their own words, before anything is written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import deltafmt
from deltafmt.cli import main
from deltafmt.errors import LayoutError, NotFoundError, UnsupportedError

WEIGHTS = {"w": torch.zeros(4, 4, dtype=torch.bfloat16), "b": torch.zeros(4)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    deltafmt.Writer(tmp_path / "run").publish_anchor(WEIGHTS)
    return tmp_path / "run"


def detector(given: Any) -> object:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    return deltafmt.AdamWDetector(optimizer, given)


@pytest.mark.parametrize(
    "given",
    [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).parameters(), [1, 2], None, torch.zeros(2)],
    ids=["model", "parameters", "numbers", "nothing", "tensor"],
)
def test_what_are_no_named_tensors(root: Path, given: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: deltafmt.Receiver(root, given),
        lambda: deltafmt.Writer(root).publish(given),
        lambda: deltafmt.Schema.of(given),
        lambda: detector(given),
    ]
    if isinstance(given, torch.nn.Module):
        calls.append(lambda: deltafmt.LayoutBuilder(deltafmt.Schema.of(WEIGHTS), cast("Any", given)))
    else:
        calls.append(lambda: deltafmt.shards_of(given))
    for call in calls:
        # An iterator that a call has begun is shorter for the next one.
        if not hasattr(given, "__next__") or call is calls[0]:
            with pytest.raises(TypeError, match=r"model\.state_dict\(\)"):
                call()
    assert deltafmt.open(root).latest() == 0


@pytest.mark.parametrize("given", [{"threads": 2}, deltafmt.WriterOptions, "fast"])
def test_what_are_no_options_no_layout_no_schema(root: Path, given: Any) -> None:
    for call, name in (
        (lambda: deltafmt.Writer(root, options=given), "WriterOptions"),
        (lambda: deltafmt.Receiver(root, WEIGHTS, options=given), "ReadOptions"),
        (lambda: deltafmt.Writer(root, layout=given), "Layout"),
        (lambda: deltafmt.Receiver(root, WEIGHTS, layout=given), "Layout"),
        (lambda: deltafmt.Writer(root, schema=given), "Schema.of"),
        (lambda: deltafmt.create(root.parent / "other", given), "Schema.of"),
    ):
        with pytest.raises(TypeError, match=name):
            call()
    with pytest.raises(TypeError, match=r"SnapshotDetector\(\)"):
        deltafmt.Writer(root, detector=deltafmt.SnapshotDetector)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["latest", 0.5, "0", b"0"])
def test_what_is_no_version(root: Path, given: Any) -> None:
    lineage, receiver = deltafmt.open(root), deltafmt.Receiver(root, WEIGHTS)
    for call in (
        lineage.read,
        lineage.schema,
        lineage.info,
        receiver.advance,
        receiver.adopt,
        receiver.prefetch,
    ):
        with pytest.raises(TypeError, match="whole number"):
            call(given)


def test_a_version_below_zero_never_was(root: Path) -> None:
    lineage, receiver = deltafmt.open(root), deltafmt.Receiver(root, WEIGHTS)
    for call in (
        lambda: lineage.read(-1),
        lambda: lineage.diff(-1, 0),
        lambda: lineage.squash(-1, 0),
        lambda: receiver.advance(-1),
        lambda: receiver.adopt(-1),
    ):
        with pytest.raises(NotFoundError) as caught:
            call()
        assert (type(caught.value), caught.value.kind) == (NotFoundError, "version-missing")


@pytest.mark.parametrize("given", ["key.pem", ["key.pem"], [b"0" * 64], deltafmt.HmacKey(b"0" * 32)])
def test_what_are_no_keys(root: Path, given: Any) -> None:
    for call in (
        lambda: deltafmt.open(root, trust=given),
        lambda: deltafmt.ReadOptions(trust=given),
        lambda: deltafmt.WriterOptions(trust=given),
    ):
        with pytest.raises(UnsupportedError) as caught:
            call()
        assert caught.value.kind == "key-unfit"
        assert "key.pem" not in str(caught.value)
    with pytest.raises(UnsupportedError, match="load_key"):
        deltafmt.WriterOptions(sign_with="key.pem")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given", [{"threads": 0}, {"undo_bytes": -1}, {"audit_domains": -1}, {"lease_seconds": 0}]
)
def test_read_options_have_ranges(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        deltafmt.ReadOptions(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_side_files_that_cannot_be_read(root: Path, name: str) -> None:
    writer = deltafmt.Writer(root)
    files: dict[str, bytes | Path] = {"a.json": b"{}", "config.json": root.parent / name}
    with pytest.raises(NotFoundError) as caught:
        writer.publish(WEIGHTS, files=files)
    assert caught.value.kind == "file-unreadable"
    assert "config.json" in str(caught.value)
    assert not (root / "files").exists(), "nothing was stored"
    assert writer.publish(WEIGHTS, files={"a.json": b"{}"}) == 1
    with pytest.raises(TypeError, match="path to read"):
        writer.publish(WEIGHTS, files={"a.json": 3})  # type: ignore[dict-item]


def test_a_file_where_a_root_is_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UnsupportedError) as caught:
            deltafmt.Writer(path).publish_anchor(WEIGHTS)
        assert caught.value.where == str(tmp_path / "file")
        with pytest.raises(NotFoundError):
            deltafmt.open(path)
    assert (tmp_path / "file").read_text() == "x"
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "deltafmt create" in err


def test_what_is_shown_of_a_writer_and_a_receiver(root: Path) -> None:
    writer, receiver = deltafmt.Writer(root), deltafmt.Receiver(root, WEIGHTS)
    receiver.advance()
    writer.publish(WEIGHTS)
    assert repr(writer) == f"Writer({str(root)!r}, version 1)"
    assert repr(receiver) == f"Receiver({str(root)!r}, version 0)"


def test_an_engine_of_another_dtype_is_told_of_casts(root: Path) -> None:
    with pytest.raises(LayoutError, match=r"LayoutBuilder\.cast"):
        deltafmt.Receiver(root, {"w": torch.zeros(4, 4)})


def test_names_of_another_model(root: Path) -> None:
    with pytest.raises(LayoutError, match=r"one of 'w', 'b'") as caught:
        deltafmt.Receiver(root, {"model.w": WEIGHTS["w"]})
    assert caught.value.kind == "target-unfilled"


def test_packages_that_are_not_installed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = root.parent / "key.pem"
    key.write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("cryptography", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "deltafmt.integrations.transformers", raising=False)
    for call in (
        lambda: deltafmt.load_key(key),
        lambda: deltafmt.SigningKey(bytes(32)),
        lambda: deltafmt.VerifyKey(bytes(32)),
    ):
        with pytest.raises(UnsupportedError, match=r"deltafmt\[sign\]") as caught:
            call()
        assert caught.value.kind == "extra-missing"
    with pytest.raises(ImportError, match=r"deltafmt\[transformers\]"):
        import_module("deltafmt.integrations.transformers")
    assert main(["log", str(root), "--trust", str(key)]) == 2
