"""A8: tied embedding and head."""

from __future__ import annotations

import pytest
import torch

import deltafmt
from deltafmt.errors import LayoutError
from tests.cases.common import assert_same, new_root


def published() -> tuple[str, torch.Tensor, torch.Tensor]:
    root = new_root()
    first = torch.arange(8.0).reshape(4, 2)
    second = first.clone()
    second[3] += 10
    writer = deltafmt.Writer(root)
    writer.publish_anchor({"embed": first, "lm_head": first})
    writer.publish({"embed": second, "lm_head": second})
    return root, first, second


def test_stored_once_and_readable_under_both_names() -> None:
    root, first, second = published()
    lineage = deltafmt.open(root)
    assert lineage.schema()["lm_head"].alias_of == "embed"
    for version, tensor in enumerate((first, second)):
        assert_same(lineage.read(version), {"embed": tensor, "lm_head": tensor})
        assert_same(lineage.read(version, ["lm_head"]), {"lm_head": tensor})
    assert lineage.info(0).listed == 8
    assert lineage.info(1).changed == 2


@pytest.mark.parametrize("kind", ["both tied", "only the head", "only the embedding", "both untied"])
def test_every_kind_of_receiver(kind: str) -> None:
    root, first, second = published()
    one = torch.zeros(4, 2)
    live = {
        "both tied": {"embed": one, "lm_head": one},
        "only the head": {"lm_head": one},
        "only the embedding": {"embed": one},
        "both untied": {"embed": one, "lm_head": torch.zeros(4, 2)},
    }[kind]
    receiver = deltafmt.Receiver(root, live)
    for version, tensor in enumerate((first, second)):
        receiver.advance(version)
        assert_same(live, dict.fromkeys(live, tensor))
        receiver.verify()


def test_a_local_tensor_that_no_stored_name_fills_is_an_error() -> None:
    root, _, _ = published()
    with pytest.raises(LayoutError, match="extra"):
        deltafmt.Receiver(root, {"embed": torch.zeros(4, 2), "extra": torch.zeros(1)}).advance()


def test_ties_break_and_form() -> None:
    root, _, second = published()
    writer = deltafmt.Writer(root)
    head = second.clone()
    head[0] = -1
    writer.publish({"embed": second, "lm_head": head})
    lineage = deltafmt.open(root)
    assert lineage.schema(2)["lm_head"].alias_of is None
    assert_same(lineage.read(2), {"embed": second, "lm_head": head})
    writer.publish({"embed": head, "lm_head": head})
    assert lineage.schema(3)["lm_head"].alias_of == "embed"
    assert_same(lineage.read(3), {"embed": head, "lm_head": head})
    one = torch.zeros(4, 2)
    tied = deltafmt.Receiver(root, {"embed": one, "lm_head": one})
    tied.advance(1)
    # Two different tensors cannot both live in one.
    with pytest.raises(LayoutError):
        tied.advance(2)
    assert torch.equal(one, second)
    assert tied.version == 1
