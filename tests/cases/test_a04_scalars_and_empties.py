"""A4: scalars and empty tensors."""

from __future__ import annotations

import pytest
import torch

import deltafmt
from tests.cases.common import assert_same, blank, new_root


def versions() -> list[dict[str, torch.Tensor]]:
    def make(s: float, w: float) -> dict[str, torch.Tensor]:
        return {
            "s": torch.tensor(s),
            "s2": torch.tensor(1.0).to(torch.float8_e4m3fn),
            "e1": torch.empty(0),
            "e2": torch.empty((0, 7), dtype=torch.bfloat16),
            "e3": torch.empty((3, 0, 2), dtype=torch.int8),
            "w": torch.tensor([1.0, w]),
        }

    return [make(3.5, 2), make(4.5, 2), make(4.5, 3)]


@pytest.mark.parametrize("names", [["w"], ["s", "e2"], ["s", "s2", "e1", "e2", "e3", "w"]])
def test_every_name_in_every_version(names: list[str]) -> None:
    root = new_root()
    writer = deltafmt.Writer(root)
    writer.publish_anchor(versions()[0])
    for tensors in versions()[1:]:
        writer.publish(tensors)
    lineage = deltafmt.open(root)
    assert [spec.alias_of for spec in lineage.schema()] == [None] * 6
    live = blank({name: versions()[0][name] for name in names})
    receiver = deltafmt.Receiver(root, live)
    for version, tensors in enumerate(versions()):
        assert_same(lineage.read(version), tensors)
        receiver.advance(version)
        assert_same(live, {name: tensors[name] for name in names})
    assert [info.changed for info in lineage.log()] == [None, 1, 1]


def test_a_policy_of_nothing_but_empties() -> None:
    root = new_root()
    writer = deltafmt.Writer(root)
    writer.publish_anchor({"e": torch.empty(0, 3)})
    writer.publish({"e": torch.empty(0, 3)})
    assert_same(deltafmt.open(root).read(), {"e": torch.empty(0, 3)})
    assert deltafmt.open(root).verify().ok
