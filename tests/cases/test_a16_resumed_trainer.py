"""A16: a trainer resumes from an older step and publishes again."""

from __future__ import annotations

import pytest
import torch

import deltafmt
from deltafmt.errors import CommitConflictError
from tests.cases.common import assert_same, copied, new_root


def states(count: int) -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(0)
    result = [{"w": torch.randn(5000, generator=random).bfloat16()}]
    for _ in range(count):
        state = copied(result[-1])
        state["w"].view(torch.int16)[torch.randint(0, 5000, (60,), generator=random)] += 1
        result.append(state)
    return result


def test_the_next_version_is_a_delta_from_the_newest_whatever_the_trainers_step() -> None:
    root, found = new_root(), states(5)
    first = deltafmt.Writer(root)
    first.publish_anchor(found[0], step=0)
    for step, state in enumerate(found[1:], 1):
        first.publish(state, step=step)
    live = copied(found[5])
    receiver = deltafmt.Receiver(root, live)
    receiver.adopt(5)
    restarted = deltafmt.Writer(root)
    with pytest.raises(CommitConflictError):
        restarted.resume(3, found[3])
    branch = copied(found[3])
    branch["w"].view(torch.int16)[100:200] += 3
    assert restarted.publish(branch, step=4) == 6
    lineage = deltafmt.open(root)
    assert (lineage.manifest(6).base, lineage.info(6).step) == (5, 4)
    with pytest.raises(CommitConflictError):
        first.publish(found[5], step=6)
    assert receiver.advance() == 6
    assert_same(live, branch)
    assert_same(lineage.read(4), found[4])


def test_two_trainers_that_resume_at_once() -> None:
    root, found = new_root(), states(2)
    deltafmt.Writer(root).publish_anchor(found[0])
    one, two = deltafmt.Writer(root), deltafmt.Writer(root)
    assert (one.resume(), two.resume(0, found[0])) == (0, 0)
    assert two.publish(found[1]) == 1
    with pytest.raises(CommitConflictError):
        one.publish(found[2])
    assert one.version == 0
    assert one.resume() == 1
    assert one.publish(found[2]) == 2
    assert_same(deltafmt.open(root).read(1), found[1])
    assert_same(deltafmt.open(root).read(2), found[2])
