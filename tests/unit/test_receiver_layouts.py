"""Receivers whose tensors are not the stored ones: tied, cast, strided, sharded, copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deltafmt import BaseMismatchError, Box, ChecksumError, Layout, LayoutError, Placement, Receiver
from deltafmt.read.live import LiveDomain
from tests.reading import Course, blank, same


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def whole(source: str, shape: tuple[int, ...], target: str, strides: tuple[int, ...]) -> Placement:
    return Placement(source, Box.full(shape), target, 0, strides)


def test_tied_names_on_either_side_are_written_once() -> None:
    embed = rand(20, 4)
    course = Course({"embed": embed, "lm_head": embed})
    course.anchor()
    one, two = torch.zeros_like(embed), torch.zeros_like(embed)
    receivers = {
        "both, tied": {"embed": one, "lm_head": one},
        "both, untied": {"embed": torch.zeros_like(embed), "lm_head": two},
        "head only": {"lm_head": torch.zeros_like(embed)},
        "embedding only": {"embed": torch.zeros_like(embed)},
    }
    opened = {name: Receiver(course.root, live) for name, live in receivers.items()}
    for seed in range(3):
        for name, receiver in opened.items():
            receiver.advance()
            assert same(receivers[name], dict.fromkeys(receivers[name], embed)), name
            assert receiver.verify().complete
        course.step(seed=seed)
    for name, receiver in opened.items():
        step = receiver.prepare()
        step.apply()
        step.rollback()
        receiver.advance()
        assert same(receivers[name], dict.fromkeys(receivers[name], embed)), name


def test_views_of_one_memory_may_show_the_same_elements_only() -> None:
    course = Course({"a": rand(8, 4), "b": rand(4, 4)})
    course.anchor()
    memory = torch.zeros(8, 4, dtype=torch.bfloat16)
    shown = {"a": memory, "top": memory[:4]}
    layout = Layout([whole("a", (8, 4), "a", (4, 1)), Placement("a", Box((0, 0), (4, 4)), "top", 0, (4, 1))])
    receiver = Receiver(course.root, shown, layout=layout)
    receiver.advance()
    course.step(seed=1, share=0.5)
    receiver.advance()
    assert torch.equal(memory.view(torch.int16), course.tensors["a"].view(torch.int16))
    clash = Layout([whole("a", (8, 4), "a", (4, 1)), whole("b", (4, 4), "top", (4, 1))])
    with pytest.raises(LayoutError) as caught:
        Receiver(course.root, shown, layout=clash)
    assert caught.value.kind == "placement-overlap"
    interleaved = {"a": memory[:, :2], "b": memory[:, 2:]}
    halves = Layout(
        [
            Placement("a", Box((0, 0), (8, 2)), "a", 0, (4, 1)),
            Placement("a", Box((0, 2), (8, 4)), "b", 0, (4, 1)),
        ]
    )
    memory.zero_()
    Receiver(course.root, interleaved, layout=halves).advance()
    assert torch.equal(memory.view(torch.int16), course.tensors["a"].view(torch.int16))


def test_element_types_do_not_share_memory() -> None:
    course = Course({"a": rand(8, 4), "b": torch.zeros(16)})
    course.anchor()
    memory = torch.zeros(8, 4, dtype=torch.bfloat16)
    with pytest.raises(LayoutError) as caught:
        Receiver(course.root, {"a": memory, "b": memory.view(-1).view(torch.float32)})
    assert caught.value.kind == "target-strides"


def test_a_cast_follows_by_bits_and_goes_back() -> None:
    course = Course({"a": rand(30, 8)})
    course.tensors["a"][0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40])
    course.anchor()
    live = {"a": torch.zeros(30, 8)}
    layout = Layout([whole("a", (30, 8), "a", (8, 1))], casts={"a": "bfloat16"})
    receiver = Receiver(course.root, live, layout=layout)
    receiver.advance()
    for seed in range(3):
        course.step(seed=seed, share=0.3)
        before = live["a"].clone()
        step = receiver.prepare()
        step.apply()
        step.rollback()
        assert torch.equal(live["a"].view(torch.int32), before.view(torch.int32))
        receiver.advance()
        expected = course.tensors["a"].view(torch.int16).to(torch.int32) << 16
        assert torch.equal(live["a"].view(torch.int32), expected)
        assert receiver.verify().complete
    course.step(seed=9, share=0.3)
    receiver = Receiver(course.root, live, layout=layout)
    receiver.adopt(3)
    live["a"][7, 7] = 1 + 2**-20
    before = live["a"].clone()
    with pytest.raises(BaseMismatchError, match="'a'") as caught:
        receiver.advance()
    assert caught.value.kind == "cast-inexact"
    assert torch.equal(live["a"].view(torch.int32), before.view(torch.int32))
    assert receiver.version is None, "what is live is no version"
    receiver.advance()
    assert torch.equal(
        live["a"].view(torch.int32), course.tensors["a"].view(torch.int16).to(torch.int32) << 16
    )
    assert receiver.verify().complete
    live["a"].view(torch.int32)[0, 5] += 1
    with pytest.raises(ChecksumError):
        receiver.verify()


def test_a_cast_that_was_not_declared_is_refused() -> None:
    course = Course({"a": rand(30, 8)})
    course.anchor()
    with pytest.raises(LayoutError) as caught:
        Receiver(course.root, {"a": torch.zeros(30, 8)})
    assert caught.value.kind == "dtype-mismatch"


def test_targets_of_any_strides() -> None:
    course = Course({"a": rand(6, 8), "b": rand(3, 4, 5), "s": torch.tensor(2.5), "e": torch.zeros(0, 3)})
    course.anchor()
    live = {
        "a": torch.zeros(8, 6, dtype=torch.bfloat16).T,
        "b": torch.zeros(5, 4, 6, dtype=torch.bfloat16)[:, :, ::2].permute(2, 1, 0),
        "s": torch.zeros(()),
        "e": torch.zeros(0, 3),
    }
    receiver = Receiver(course.root, live)
    for seed in range(3):
        receiver.advance()
        assert same(live, course.tensors)
        assert receiver.verify().complete
        course.step(seed=seed, share=0.4)


def test_a_rank_that_holds_a_part_says_what_it_cannot_prove() -> None:
    course = Course({"a": rand(64, 8), "n": rand(8)}, domain_elements=256)
    course.anchor()
    live = {"a": torch.zeros(40, 8, dtype=torch.bfloat16), "n": torch.zeros(8, dtype=torch.bfloat16)}
    layout = Layout([Placement("a", Box((0, 0), (40, 8)), "a", 0, (8, 1)), whole("n", (8,), "n", (1,))])
    receiver = Receiver(course.root, live, layout=layout)
    receiver.advance()
    for seed in range(4):
        course.step(seed=seed, share=0.02)
        receiver.advance()
    assert same(live, {"a": course.tensors["a"][:40], "n": course.tensors["n"]})
    proof = receiver.verify()
    assert not proof.complete
    assert proof.unproven == ("a",)
    assert (proof.proven_elements, proof.unproven_elements) == (32 * 8 + 8, 8 * 8)
    again = Receiver(course.root, live, layout=layout)
    assert again.adopt(4) == 4
    live["a"][3, 3] += 1
    with pytest.raises(BaseMismatchError):
        again.adopt(4)


def test_one_element_in_many_places() -> None:
    course = Course({"e": rand(4, 3, 5)})
    course.anchor()
    live = {"slots": torch.zeros(6, 3, 5, dtype=torch.bfloat16)}
    slots = [0, 1, 2, 3, 0, 2]
    layout = Layout(
        Placement("e", Box((expert, 0, 0), (expert + 1, 3, 5)), "slots", slot * 15, (15, 5, 1))
        for slot, expert in enumerate(slots)
    )
    receiver = Receiver(course.root, live, layout=layout)
    receiver.advance()
    for seed in range(3):
        course.step(seed=seed, share=0.3)
        step = receiver.prepare()
        step.apply()
        step.rollback()
        receiver.advance()
        assert same(live, {"slots": course.tensors["e"][slots]})
        assert receiver.verify().complete
    live["slots"][4, 1, 1] += 1
    with pytest.raises(ChecksumError, match="copies"):
        receiver.verify()


def test_copies_of_many_tensors_are_compared_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes grows with the copies of one element, not with those in a domain."""
    sources = {f"t{number}": rand(5, seed=number) for number in range(60)}
    course = Course(dict(sources), domain_elements=1 << 20)
    course.anchor()
    live = {
        "two": torch.zeros(60, 2, 5, dtype=torch.bfloat16),
        "some": torch.zeros(60, 5, dtype=torch.bfloat16),
    }
    placements = [
        Placement(f"t{number}", Box.full((5,)), target, start, (1,))
        for number in range(60)
        for target, start in (("two", number * 10), ("two", number * 10 + 5), ("some", number * 5))
        if target == "two" or number % 7 == 3
    ]
    untouched = [("some", Box((number, 0), (number + 1, 5))) for number in range(60) if number % 7 != 3]
    receiver = Receiver(course.root, live, layout=Layout(placements, untouched=untouched))
    receiver.advance()
    reads = 0
    read = LiveDomain.read

    def counting(self: LiveDomain, *arguments: Any) -> None:
        nonlocal reads
        reads += 1
        read(self, *arguments)

    monkeypatch.setattr(LiveDomain, "read", counting)
    assert receiver.verify().complete
    assert reads == 3, "the elements, their second copies, their third ones"
    for tensor, place in ((live["two"], (41, 1, 2)), (live["some"], (10, 4)), (live["two"], (59, 0, 0))):
        before = tensor[place].clone()
        tensor[place] += 1
        with pytest.raises(ChecksumError):
            receiver.verify()
        tensor[place] = before
        receiver.adopt(0)


def test_what_is_untouched_stays_as_it_is() -> None:
    course = Course({"embed": rand(10, 4)})
    course.anchor()
    live = {"embed": torch.full((16, 4), 7.0, dtype=torch.bfloat16)}
    layout = Layout([whole("embed", (10, 4), "embed", (4, 1))], untouched=[("embed", Box((10, 0), (16, 4)))])
    Receiver(course.root, live, layout=layout).advance()
    assert same(live, {"embed": torch.cat((course.tensors["embed"], torch.full((6, 4), 7.0).bfloat16()))})
    with pytest.raises(LayoutError) as caught:
        Receiver(course.root, live, layout=Layout([whole("embed", (10, 4), "embed", (4, 1))]))
    assert caught.value.kind == "target-unfilled"


def test_a_receiver_may_hold_none_or_some_of_the_tensors() -> None:
    course = Course({"a": rand(6, 8), "b": rand(5), "e": torch.zeros(0)})
    course.anchor()
    for names in ([], ["b"], ["e"], ["a", "e"]):
        live = blank({name: course.tensors[name] for name in names})
        receiver = Receiver(course.root, live)
        assert receiver.advance() == 0
        assert same(live, {name: course.tensors[name] for name in names})
        assert receiver.verify().complete
