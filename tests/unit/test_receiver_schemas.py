"""Schemas that change on the way: tensors come and go, ties form and break."""

from __future__ import annotations

import pytest
import torch

import deltafmt
from deltafmt import LayoutError, Receiver
from tests.cases.common import new_root
from tests.reading import Course, Tensors, blank, copied, same


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def grown() -> Course:
    """Version 0 and 1 with `a` and `b`; from 2 on `b` has another shape, and `c` is new."""
    course = Course({"a": rand(30, 8), "b": rand(10)})
    course.anchor()
    course.step(seed=1)
    course.tensors = {"a": course.tensors["a"], "b": rand(12, seed=3), "c": rand(5, 7, seed=4)}
    course.tensors["a"][3, 3] = 1
    course.publish()
    course.step(seed=2)
    return course


def test_a_cold_start_crosses_a_change_of_schema() -> None:
    course = grown()
    live = blank(course.tensors)
    with Receiver(course.root, live) as receiver:
        receiver.advance()
        assert same(live, course.versions[3])
        assert receiver.verify().complete


@pytest.mark.parametrize("streaming", [False, True])
def test_live_tensors_that_stay_follow_over_a_change_of_schema(streaming: bool) -> None:
    course = grown()
    live = blank({"a": course.tensors["a"]})
    with Receiver(course.root, live) as receiver:
        receiver.advance(1)
        assert same(live, {"a": course.versions[1]["a"]})
        receiver.advance(streaming=streaming)
        assert same(live, {"a": course.versions[3]["a"]})
        assert receiver.verify().complete


def test_live_tensors_of_the_old_shape_stay_as_they_are() -> None:
    course = Course({"a": rand(30, 8), "b": rand(10)})
    course.anchor()
    live = blank(course.tensors)
    receiver = Receiver(course.root, live)
    receiver.advance()
    course.tensors = {"a": course.tensors["a"], "b": rand(12, seed=3)}
    course.publish()
    with pytest.raises(LayoutError):
        receiver.advance()
    assert receiver.version == 0
    assert same(live, course.versions[0])


def test_a_tensor_that_vanished_is_not_silently_kept() -> None:
    course = Course({"a": rand(30, 8), "b": rand(10)})
    course.anchor()
    live = blank(course.tensors)
    receiver = Receiver(course.root, live)
    receiver.advance()
    course.tensors = {"a": course.tensors["a"]}
    course.publish()
    with pytest.raises(LayoutError) as caught:
        receiver.advance()
    assert caught.value.kind == "target-unfilled"
    assert receiver.version == 0


def tied(embed: torch.Tensor) -> Tensors:
    return {"embed": embed, "lm_head": embed}


def test_a_tie_that_breaks() -> None:
    course = Course(tied(rand(20, 4)))
    course.anchor()
    untied = blank({name: tensor.clone() for name, tensor in course.tensors.items()})
    together = tied(blank({"t": course.tensors["embed"]})["t"])
    free, bound = Receiver(course.root, untied), Receiver(course.root, together)
    free.advance()
    bound.advance()
    course.tensors = {"embed": course.tensors["embed"], "lm_head": rand(20, 4, seed=5)}
    course.publish()
    free.advance()
    assert same(untied, course.versions[1])
    with pytest.raises(LayoutError) as caught:
        bound.advance()
    assert caught.value.kind == "placement-overlap"
    assert same(together, course.versions[0])


@pytest.mark.parametrize("names", [["embed", "lm_head"], ["lm_head"], ["embed"]])
def test_a_tie_that_forms(names: list[str]) -> None:
    course = Course({"embed": rand(20, 4), "lm_head": rand(20, 4, seed=5), "other": rand(9)})
    course.anchor()
    live = blank({name: course.tensors[name] for name in names})
    receiver = Receiver(course.root, live)
    receiver.advance()
    course.tensors = {**tied(course.tensors["embed"]), "other": course.tensors["other"]}
    course.tensors["embed"][2, 2] = 3
    course.publish()
    receiver.advance()
    expected = {name: course.versions[1][name] for name in names}
    assert same(live, expected), "the old bits of a second name are no base for its owner's delta"
    late = blank(expected)
    Receiver(course.root, late).advance()
    assert same(late, expected)


def test_a_change_of_tiling_is_a_barrier_between_foldings() -> None:
    course = Course({"a": rand(40, 8)}, domain_elements=64)
    course.anchor()
    course.step(seed=1)
    live = blank(course.tensors)
    receiver = Receiver(course.root, live)
    receiver.advance()
    held = copied(live)
    from deltafmt import Writer, WriterOptions

    course.writer = Writer(course.root, options=WriterOptions(domain_elements=100))
    course.step(seed=2)
    course.step(seed=3)
    tilings = {receiver._history.first_way(v).manifest.tiling for v in range(4)}
    step = receiver.prepare()
    step.apply()
    assert same(live, course.versions[3])
    step.rollback()
    assert same(live, held)
    receiver.advance()
    assert same(live, course.versions[3])
    assert len(tilings) == 2


def test_a_model_that_was_empty_for_a_while() -> None:
    root = new_root()
    tensors: Tensors = {"w": torch.arange(6.0)}
    writer = deltafmt.Writer(root)
    for number, model in enumerate((tensors, {}, {}, tensors, {"v": torch.ones(2)}, tensors)):
        (writer.publish if number else writer.publish_anchor)(model)
    live = {"w": torch.zeros(6)}
    receiver = deltafmt.Receiver(root, live)
    for version in (0, 3, 5, 0, 5):
        assert receiver.advance(version) == version
        assert torch.equal(live["w"], tensors["w"])
        assert receiver.verify().complete
    with pytest.raises(LayoutError):
        receiver.advance(1)
    assert receiver.version == 5
    assert deltafmt.open(root).verify().ok
    assert deltafmt.Receiver(root, live).advance(5) == 5
