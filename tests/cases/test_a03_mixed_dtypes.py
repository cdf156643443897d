"""A3: tensors of many dtypes side by side, in domains of any size."""

from __future__ import annotations

import pytest
import torch

import deltafmt
from tests.cases.common import assert_same, blank, copied, new_root

ORDER = [
    ("h", torch.float16, 3),
    ("f", torch.float32, 2),
    ("b", torch.int8, 1),
    ("d", torch.float64, 1),
    ("bf", torch.bfloat16, 5),
    ("t", torch.bool, 3),
    ("l", torch.int64, 1),
    ("c", torch.complex64, 2),
    ("u", torch.uint16, 3),
]


@pytest.mark.parametrize("elements", [1, 2, 7, 8, 4096])
def test_nothing_depends_on_the_neighbours(elements: int) -> None:
    root = new_root()
    tensors = {name: torch.ones(count, dtype=dtype) for name, dtype, count in ORDER}
    later = copied(tensors)
    for tensor in later.values():
        tensor[-1] = 0
    writer = deltafmt.Writer(root, options=deltafmt.WriterOptions(domain_elements=elements))
    writer.publish_anchor(tensors)
    writer.publish(later)
    live = blank(tensors)
    receiver = deltafmt.Receiver(root, live)
    receiver.advance(0)
    assert_same(live, tensors)
    receiver.advance(1)
    assert_same(live, later)
    assert_same(deltafmt.open(root).read(1), later)
    assert deltafmt.open(root).info(1).changed == len(ORDER)
