"""A6 in full: tensors of more than 2^31 and 2^32 elements through the whole path, where memory allows.

These take up to 18 GiB of memory and some minutes, and run where `DELTAFMT_LARGE=1` asks for them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import deltafmt
from deltafmt.errors import NotFoundError

GIB = 1 << 30


def available() -> int:
    """Bytes of memory that are free for the taking; 0 where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


@pytest.mark.skipif(not os.environ.get("DELTAFMT_LARGE"), reason="asked for by DELTAFMT_LARGE=1")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("shape", "changed"),
    [
        ((2**31 + 8,), [0, 2**31 + 7]),
        ((2**16 + 2, 2**16), [0, 2**31 - 1, 2**31, 2**31 + 7, 2**32, 2**32 + 15, 2**32 + 2**17 - 1]),
    ],
)
def test_changes_at_the_ends_and_around_the_borders(
    tmp_path: Path, shape: tuple[int, ...], changed: list[int]
) -> None:
    live = torch.zeros(shape, dtype=torch.int8)
    if available() < 3 * live.nbytes + 2 * GIB:
        pytest.skip("not enough memory")
    writer = deltafmt.Writer(tmp_path)
    writer.publish_anchor({"w": live})
    flat = live.view(-1)
    flat[changed] = torch.arange(1, len(changed) + 1, dtype=torch.int8)
    assert writer.publish({"w": live}) == 1
    writer.close()
    lineage = deltafmt.open(tmp_path)
    assert lineage.manifest(1).changed == len(changed)
    found = torch.full(shape, 7, dtype=torch.int8)
    receiver = deltafmt.Receiver(tmp_path, {"w": found})
    receiver.advance(0)
    assert not found.any()
    receiver.advance(1)
    assert torch.equal(found, live)
    assert receiver.verify().complete
    receiver.advance(0)
    assert not found.any()
    receiver.close()
    del found
    rows = lineage.changes(1).read_all()
    assert rows["index"].to_pylist() == changed
    assert rows["new"].to_pylist() == list(range(1, len(changed) + 1))


@pytest.mark.skipif(not os.environ.get("DELTAFMT_LARGE"), reason="asked for by DELTAFMT_LARGE=1")
@pytest.mark.timeout(1800)
def test_a_rank_of_two_holds_its_half(tmp_path: Path) -> None:
    rows, columns = 2**16 + 2, 2**16
    half = rows // 2
    live = torch.zeros((rows, columns), dtype=torch.int8)
    if available() < 3 * live.nbytes + 2 * GIB:
        pytest.skip("not enough memory")
    schema = deltafmt.Schema.of({"w": live})
    local = {"w": torch.full((half, columns), 3, dtype=torch.int8)}
    layouts = [
        deltafmt.LayoutBuilder(schema, local, rank=r, world=2).shard("w", "w", dim=0).build()
        for r in range(2)
    ]
    writer = deltafmt.Writer(tmp_path, options=deltafmt.WriterOptions(tile_for=layouts))
    writer.publish_anchor({"w": live})
    changed = [(0, 0), (half - 1, columns - 1), (half, 0), (half, 7), (rows - 1, columns - 1)]
    for number, (row, column) in enumerate(changed, 1):
        live[row, column] = number
    writer.publish({"w": live})
    writer.close()
    for rank, layout in enumerate(layouts):
        local["w"].fill_(3)
        receiver = deltafmt.Receiver(tmp_path, local, layout=layout)
        receiver.advance(0)
        receiver.advance(1)
        assert torch.equal(local["w"], live[half * rank : half * rank + half])
        assert receiver.verify().complete
        receiver.close()
    with pytest.raises(NotFoundError):
        deltafmt.open(tmp_path).read(2)
