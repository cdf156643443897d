"""A11: experts' gate, up and down projections in the stacked tensors of tensor-parallel engines."""

from __future__ import annotations

import pytest
import torch

from deltafmt import Box, Layout, LayoutError, Placement, Receiver
from tests.reading import Course, Tensors, copied, same

EXPERTS, INNER, HIDDEN, RANKS = 2, 4, 3, 2
PART = INNER // RANKS


def experts() -> Tensors:
    torch.manual_seed(11)
    return {
        f"experts.{e}.{name}": torch.randn(shape).bfloat16()
        for e in range(EXPERTS)
        for name, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER)))
    }


def layout(rank: int, *, up_first: bool) -> Layout:
    """`w13` (expert, 2 * part, hidden) holds gate and up rows, `w2` (expert, hidden, part) down columns."""
    placements = []
    for e in range(EXPERTS):
        rows = Box((PART * rank, 0), (PART * rank + PART, HIDDEN))
        columns = Box((0, PART * rank), (HIDDEN, PART * rank + PART))
        for name, second in (("gate", up_first), ("up", not up_first)):
            at = e * 2 * PART * HIDDEN + second * PART * HIDDEN
            placements.append(Placement(f"experts.{e}.{name}", rows, "w13", at, (HIDDEN, 1)))
        placements.append(Placement(f"experts.{e}.down", columns, "w2", e * HIDDEN * PART, (PART, 1)))
    return Layout(placements)


def local() -> Tensors:
    return {
        "w13": torch.zeros(EXPERTS, 2 * PART, HIDDEN, dtype=torch.bfloat16),
        "w2": torch.zeros(EXPERTS, HIDDEN, PART, dtype=torch.bfloat16),
    }


def expected(tensors: Tensors, rank: int, *, up_first: bool) -> Tensors:
    order = ("up", "gate") if up_first else ("gate", "up")
    rows = [
        torch.cat([tensors[f"experts.{e}.{n}"].chunk(RANKS)[rank] for n in order]) for e in range(EXPERTS)
    ]
    columns = [tensors[f"experts.{e}.down"].chunk(RANKS, dim=1)[rank] for e in range(EXPERTS)]
    return {"w13": torch.stack(rows), "w2": torch.stack(columns)}


@pytest.mark.parametrize("hinted", [False, True])
@pytest.mark.parametrize("up_first", [False, True])
def test_changes_land_in_the_declared_halves(up_first: bool, hinted: bool) -> None:
    tensors = experts()
    layouts = [layout(rank, up_first=up_first) for rank in range(RANKS)]
    course = Course(tensors, tile_for=layouts if hinted else ())
    course.anchor()
    live = [local() for _ in range(RANKS)]
    receivers = [Receiver(course.root, mine, layout=own) for mine, own in zip(live, layouts, strict=True)]
    for receiver in receivers:
        receiver.advance()
    before = [copied(mine) for mine in live]
    tensors["experts.1.up"][3, 2] = 100
    tensors["experts.0.gate"][1, 0] = 200
    tensors["experts.0.down"][2, 1] = 300
    tensors["experts.1.down"][0, 2] = 400
    course.publish()
    for receiver in receivers:
        receiver.advance()
    changed = {
        (rank, name, *index): float(mine[name][tuple(index)])
        for rank, (mine, old) in enumerate(zip(live, before, strict=True))
        for name in mine
        for index in (mine[name] != old[name]).nonzero().tolist()
    }
    up, gate = (1, 3) if up_first else (3, 1)
    assert changed == {
        (1, "w13", 1, up, 2): 100.0,
        (0, "w13", 0, gate, 0): 200.0,
        (0, "w2", 0, 2, 1): 300.0,
        (1, "w2", 1, 0, 0): 400.0,
    }
    for rank, mine in enumerate(live):
        assert same(mine, expected(tensors, rank, up_first=up_first))


def test_a_tensor_of_undeclared_shape_is_refused_not_guessed() -> None:
    course = Course(experts())
    course.anchor()
    live = {**local(), "packed": torch.zeros(1, 2, 2, 3, dtype=torch.bfloat16)}
    with pytest.raises(LayoutError, match="packed") as caught:
        Receiver(course.root, live, layout=layout(0, up_first=False))
    assert caught.value.kind == "target-unfilled"
    live = {**local(), "w13": torch.zeros(1, EXPERTS, 2 * PART + 1, HIDDEN, dtype=torch.bfloat16)}
    with pytest.raises(LayoutError):
        Receiver(course.root, live, layout=layout(0, up_first=False))
    assert not any(tensor.any() for tensor in live.values()), "nothing was written"
