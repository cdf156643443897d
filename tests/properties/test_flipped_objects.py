"""Any object of a root, with bytes flipped, cut, repeated or exchanged: its bits come out right, or an error by name."""

from __future__ import annotations

import struct
from functools import cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deltafmt
from deltafmt.errors import DeltafmtError
from deltafmt.format import keys
from deltafmt.format.checksum import crc32c
from deltafmt.format.constants import ENVELOPE_BYTES
from deltafmt.store import MemoryStore
from deltafmt.testing.strategies import Tensors, copied, same
from tests.cases.common import new_root

NEWEST = 2


@cache
def lineage() -> tuple[dict[str, bytes], Tensors]:
    """All objects of a root with an anchor, two deltas and a further anchor, and the newest version."""
    root = new_root()
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(30, 7).bfloat16(),
        "b": torch.arange(20, dtype=torch.int8),
        "e": torch.empty(0, 3),
        "c": torch.randn(9),
    }
    tensors["tied"] = tensors["a"]
    writer = deltafmt.Writer(root, options=deltafmt.WriterOptions(domain_elements=64))
    writer.publish_anchor(tensors, meta={"k": 1}, files={"c.json": b"{}"})
    tensors["a"].view(torch.int16)[::3, 2] += 1
    tensors["b"][3:] = tensors["b"][3:].flip(0)
    writer.publish(tensors, step=1)
    tensors["a"].view(torch.int16)[1, 1] += 900
    tensors["c"][2] = 7
    writer.publish(tensors, step=2)
    deltafmt.open(root).add_anchor(1)
    return dict(MemoryStore.named(root.removeprefix("memory://")).objects), copied(tensors)


def spoiled(data: bytes, draw: st.DataObject, others: list[bytes]) -> bytes:
    way = draw.draw(
        st.sampled_from(("flip", "flip", "flip", "flip and seal", "flip and seal", "cut", "longer", "other"))
    )
    if way == "cut":
        return data[: draw.draw(st.integers(0, len(data) - 1))]
    if way == "longer":
        return data + draw.draw(st.sampled_from((b"\0", b"\xff" * 99, data)))
    if way == "other":
        return draw.draw(st.sampled_from(others))
    sealed = way == "flip and seal" and len(data) > ENVELOPE_BYTES
    at = draw.draw(st.integers(ENVELOPE_BYTES if sealed else 0, len(data) - 1))
    changed = bytearray(data)
    changed[at] ^= 1 << draw.draw(st.integers(0, 7))
    if sealed:
        checksum = crc32c(bytes(changed[ENVELOPE_BYTES:]), crc32c(bytes(changed[8:20])))
        changed[20:24] = struct.pack("<I", checksum)
    return bytes(changed)


@settings(max_examples=5 * settings().max_examples)
@given(st.data())
def test_right_bits_or_an_error_by_name(draw: st.DataObject) -> None:
    objects, expected = lineage()
    key = draw.draw(st.sampled_from(sorted(objects)))
    root = new_root()
    store = MemoryStore.named(root.removeprefix("memory://"))
    store.objects.update(objects)
    store.objects[key] = spoiled(objects[key], draw, sorted(objects.values()))
    live = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    try:
        opened = deltafmt.open(root)
        newest = opened.latest()
        # A manifest that is cut may be on its way still; nothing else hides a version.
        assert newest == NEWEST or (newest == NEWEST - 1 and key == keys.version_key(NEWEST))
        assert newest < NEWEST or same(opened.read(NEWEST), expected)
        receiver = deltafmt.Receiver(root, live)
        receiver.advance(NEWEST)
        assert same(live, expected)
    except DeltafmtError as error:
        assert str(error)
