"""The library against the second reader over lineages that grow at random: every byte of every version."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deltafmt
from deltafmt.dtypes import DTYPES
from deltafmt.tensors import bits, empty, numpy_bits
from tests.conformance.reference import load_refdump

refdump = load_refdump()
Tensors = dict[str, torch.Tensor]
SHAPES = st.sampled_from([(), (1,), (7,), (0, 3), (4, 5), (2, 3, 4), (33,), (70,)])
NAMES = ["a", "b.weight", "../c", "d\n", "\N{GREEK SMALL LETTER DELTA}"]


class Trainer:
    """Tensors that change at random, and what they were at each version."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.random = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
        self.tensors: Tensors = {}
        for name in data.draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True), label="names"):
            self.tensors[name] = self.fresh(data.draw(st.sampled_from(list(DTYPES)), label="dtype"))
        self.versions: list[dict[str, bytes]] = []

    def fresh(self, dtype: str) -> torch.Tensor:
        tensor = empty(dtype, self.data.draw(SHAPES, label="shape"))
        self.scramble(tensor, 1.0)
        return tensor

    def scramble(self, tensor: torch.Tensor, share: float) -> None:
        live = numpy_bits(tensor).reshape(-1)
        values = np.frombuffer(self.random.bytes(live.nbytes), live.dtype)
        chosen = self.random.random(live.size) < share
        numpy_bits(tensor)[...] = np.where(chosen, values, live).reshape(tensor.shape)

    def nudge(self, tensor: torch.Tensor, share: float) -> None:
        live = numpy_bits(tensor)
        steps = self.random.choice([1, 1, 1, 2, 300], live.shape).astype(live.dtype)
        live[...] += np.where(self.random.random(live.shape) < share, steps, 0).astype(live.dtype)

    def train(self) -> None:
        for tensor in self.tensors.values():
            self.nudge(tensor, self.data.draw(st.sampled_from([0.0, 0.03, 0.3]), label="nudged"))
        if self.data.draw(st.booleans(), label="scramble"):
            name = self.data.draw(st.sampled_from(list(self.tensors)))
            self.scramble(self.tensors[name], 0.2)

    def change_schema(self) -> None:
        name = self.data.draw(st.sampled_from(NAMES), label="name")
        other = self.data.draw(st.sampled_from(list(self.tensors)), label="other")
        verb = self.data.draw(st.sampled_from(["drop", "reshape", "tie", "untie"]), label="verb")
        old = self.tensors.get(name)
        if verb == "drop" and old is not None and len(self.tensors) > 1:
            del self.tensors[name]
        elif verb == "untie" and old is not None:
            self.tensors[name] = old.clone()
        elif verb == "tie" and (old is None or old.dtype == self.tensors[other].dtype):
            self.tensors[name] = self.tensors[other]
        elif verb == "reshape":
            dtype = str((self.tensors[other] if old is None else old).dtype).removeprefix("torch.")
            self.tensors[name] = self.fresh(dtype)

    def remember(self) -> None:
        self.versions.append({name: contents(tensor) for name, tensor in self.tensors.items()})


def contents(tensor: torch.Tensor) -> bytes:
    return numpy_bits(tensor).tobytes()


@settings(max_examples=settings().max_examples // 2)
@given(st.data())
def test_library_and_refdump_agree(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(data)
        elements = data.draw(st.sampled_from([5, 16, 64, 1000]), label="domain elements")
        every = data.draw(st.sampled_from([None, 2]), label="anchor every")
        options = deltafmt.WriterOptions(domain_elements=elements, anchor_every=every, threads=2)
        writer = deltafmt.Writer(folder, options=options)
        writer.publish_anchor(trainer.tensors)
        trainer.remember()
        for _ in range(data.draw(st.integers(1, 4), label="versions")):
            trainer.train()
            verb = data.draw(st.sampled_from(["publish", "publish", "schema", "anchor"]), label="verb")
            if verb == "schema":
                trainer.change_schema()
            publish = writer.publish_anchor if verb == "anchor" else writer.publish
            publish(trainer.tensors)
            trainer.remember()
        compare(Path(folder), trainer.versions)


def compare(root: Path, versions: list[dict[str, bytes]]) -> None:
    lineage, reference = deltafmt.open(str(root)), refdump.Root(root)
    assert lineage.verify().problems == ()
    for version, expected in enumerate(versions):
        found = lineage.read(version)
        assert {name: contents(tensor) for name, tensor in found.items()} == expected
        schema = lineage.schema(version)
        for base in lineage.info(version).ways:
            rebuilt = reference.tensors(version, refdump.way_name(base))
            assert {
                spec.name: rebuilt[schema.resolve(spec.name).name].tobytes() for spec in schema
            } == expected


def test_a_value_that_was_never_written_is_seen(tmp_path: Path) -> None:
    """The comparison above would notice: the second reader reads what is there, not what should be."""
    tensor = torch.arange(50, dtype=torch.float32)
    deltafmt.Writer(str(tmp_path)).publish_anchor({"w": tensor})
    bits(tensor)[7] += 1
    assert refdump.Root(tmp_path).tensors(0)["w"].tobytes() != contents(tensor)
