"""A squash does what the run of ways does that it replaces, whatever these are made of."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deltafmt
from deltafmt.format.constants import DENSE, SET, STEP
from deltafmt.read.materialize import follow
from deltafmt.tensors import numpy_bits
from tests.conformance.reference import load_refdump
from tests.reading import Tensors, copied, same

refdump = load_refdump()


def change(tensors: Tensors, kind: str, random: np.random.Generator) -> None:
    """Changes that writers store as steps, as new bits, or as all elements; some go back to what was."""
    for tensor in tensors.values():
        live = numpy_bits(tensor)
        chosen = random.random(live.shape) < (1.0 if kind == "dense" else 0.15)
        if kind == "step":
            move = random.choice([1, 1, 2, 300, -1, -1], live.shape).astype(live.dtype)
            live[...] = np.where(chosen, live + move, live)
        elif kind == "back":
            live[...] = np.where(chosen, 0, live)
        else:
            values = np.frombuffer(random.bytes(live.nbytes), live.dtype).reshape(live.shape)
            live[...] = np.where(chosen, values, live)


def other_schema(tensors: Tensors, verb: str) -> None:
    if verb == "drop" and len(tensors) > 1:
        tensors.pop(next(iter(tensors)))
    elif verb == "add":
        tensors[f"new{len(tensors)}"] = torch.arange(20, dtype=torch.bfloat16)
    elif verb == "reshape":
        tensors["w"] = torch.arange(35, dtype=torch.bfloat16).reshape(5, 7)
    elif verb == "tie":
        tensors["tied"] = next(iter(tensors.values()))


KINDS = ["step", "step", "set", "dense", "back", "nothing"]
BREAKS = ["drop", "add", "reshape", "tie", "anchor", "recut"]


@settings(max_examples=settings().max_examples // 4)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), broken=st.booleans())
def test_a_squash_is_the_run_that_it_replaces(data: st.DataObject, seed: int, broken: bool) -> None:
    random = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        tensors = {"w": torch.ones(60, dtype=torch.bfloat16), "x": torch.ones(4, 9), "y": torch.tensor(3)}
        elements = data.draw(st.sampled_from([8, 40, 1000]))
        writer = deltafmt.Writer(folder, options=deltafmt.WriterOptions(domain_elements=elements, threads=1))
        writer.publish_anchor(tensors)
        versions = [copied(tensors)]
        for _ in range(data.draw(st.integers(2, 6))):
            change(tensors, data.draw(st.sampled_from(KINDS)), random)
            stop = data.draw(st.sampled_from(BREAKS)) if broken and data.draw(st.booleans()) else ""
            other_schema(tensors, stop)
            if stop == "recut":
                options = deltafmt.WriterOptions(domain_elements=elements // 2, threads=1)
                writer = deltafmt.Writer(folder, options=options)
            (writer.publish_anchor if stop == "anchor" else writer.publish)(tensors)
            versions.append(copied(tensors))
        lineage = deltafmt.open(folder)
        for _ in range(data.draw(st.integers(1, 3))):
            base = data.draw(st.integers(0, len(versions) - 2))
            version = data.draw(st.integers(base + 1, len(versions) - 1))
            lineage.squash(base, version)
            check(lineage, versions, base, version)
        report = lineage.verify()
        assert report.ok, report.problems


def check(lineage: deltafmt.Lineage, versions: list[Tensors], base: int, version: int) -> None:
    history = lineage.history
    stored = next(way for way in history.ways(version) if way.manifest.base == base)
    found, wanted = start(versions[base], versions[version]), versions[version]
    follow(history, stored, found)
    assert same(found, wanted)
    if stored.manifest.changed is not None and versions[base].keys() == wanted.keys():
        differ = [differing(versions[base][name], tensor) for name, tensor in owners(wanted).items()]
        assert stored.manifest.changed == sum(differ)
    rebuilt = refdump.Root(Path(lineage.url)).tensors(version, str(base))
    schema = lineage.schema(version)
    assert {spec.name: rebuilt[schema.resolve(spec.name).name].tobytes() for spec in schema} == {
        name: numpy_bits(tensor).tobytes() for name, tensor in wanted.items()
    }


def owners(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != "tied"}


def start(base: Tensors, wanted: Tensors) -> Tensors:
    """Tensors like those wanted, with the base's elements where the base has them."""
    found = {}
    for name, tensor in owners(wanted).items():
        old = base.get(name)
        fits = old is not None and (old.dtype, old.shape) == (tensor.dtype, tensor.shape)
        found[name] = old.clone() if fits and old is not None else torch.full_like(tensor, 9)
    if "tied" in wanted:
        found["tied"] = next(iter(found.values()))
    return found


def differing(old: torch.Tensor, new: torch.Tensor) -> int:
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        return new.numel()
    return int((numpy_bits(old) != numpy_bits(new)).sum())


def test_the_kinds_of_change_are_stored_as_what_they_are_called(tmp_path: Path) -> None:
    """The property above meets all operations, and pairs of `set` and `step` in one domain."""
    random = np.random.default_rng(1)
    tensors = {"w": torch.ones(4000, dtype=torch.float32), "x": torch.ones(500)}
    writer = deltafmt.Writer(str(tmp_path), options=deltafmt.WriterOptions(domain_elements=1000))
    writer.publish_anchor(tensors)
    for kind in ("step", "set", "step", "dense"):
        change(tensors, kind, random)
        writer.publish(tensors)
    lineage = deltafmt.open(str(tmp_path))
    operations = [set(lineage.manifest(version).chunks.operation.tolist()) for version in range(1, 5)]
    assert operations == [{STEP}, {SET}, {STEP}, {DENSE}]
    squashed = lineage.squash(0, 3)
    assert squashed.chunks.operation.tolist() == [SET, STEP] * len(squashed.domains)
    assert squashed.changed is None
