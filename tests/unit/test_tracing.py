"""Layouts found by running loaders as engines and trainers have them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import deltafmt
from deltafmt.errors import LayoutError
from deltafmt.tracing.recorded import layout_by_records
from tests.cases.common import assert_same, new_root

Named = Iterable[tuple[str, torch.Tensor]]
Load = Callable[[Named], Any]


def follow(load: Load, source: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> deltafmt.Layout:
    """Trace a loader, then hold a receiver with that layout against the loader itself, version by version."""
    schema = deltafmt.Schema.of(source)
    before = {name: tensor.clone() for name, tensor in targets.items()}
    layout = deltafmt.trace_layout(load, schema, targets)
    assert_same(targets, before)
    layout.validate(schema, {name: deltafmt.layout.TargetInfo.of(t) for name, t in targets.items()})
    root = new_root()
    writer = deltafmt.Writer(root)
    writer.publish_anchor(source)
    live = {name: torch.zeros_like(tensor) for name, tensor in targets.items()}
    receiver = deltafmt.Receiver(root, live, layout=layout)
    for _ in range(3):
        receiver.advance()
        for tensor in targets.values():
            tensor.detach().zero_()
        load(source.items())
        assert_same(live, targets)
        for tensor in source.values():
            tensor.view(torch.int16).reshape(-1)[::7] += 1
        writer.publish(source)
    return layout


def weights(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


HEADS, GROUPS, DEPTH, HIDDEN = 8, 2, 4, 24


def test_interleaved_groups_of_query_key_and_value() -> None:
    """As Megatron has them: for each group its queries, its key and its value."""
    source = weights(
        q_proj=(HEADS * DEPTH, HIDDEN), k_proj=(GROUPS * DEPTH, HIDDEN), v_proj=(GROUPS * DEPTH, HIDDEN)
    )
    fused = torch.zeros((HEADS + 2 * GROUPS) * DEPTH, HIDDEN, dtype=torch.bfloat16)

    def load(named: Named) -> None:
        parts = [tensor.reshape(GROUPS, -1, DEPTH, HIDDEN) for _, tensor in named]
        fused.copy_(torch.cat(parts, dim=1).reshape(fused.shape))

    layout = follow(load, source, {"linear_qkv": fused})
    assert len(layout.placements) == 3 * GROUPS


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_megatron(rank: int) -> None:
    """Its groups of heads, with biases, its halves of gate and up, and its rows of a padded vocabulary."""
    source = weights(
        q=(HEADS * DEPTH, HIDDEN),
        k=(GROUPS * DEPTH, HIDDEN),
        v=(GROUPS * DEPTH, HIDDEN),
        q_bias=(HEADS * DEPTH,),
        k_bias=(GROUPS * DEPTH,),
        v_bias=(GROUPS * DEPTH,),
        gate=(16, HIDDEN),
        up=(16, HIDDEN),
        proj=(HIDDEN, HEADS * DEPTH),
        embed=(37, HIDDEN),
    )
    heads = (HEADS + 2 * GROUPS) * DEPTH // 2
    local = {
        "linear_qkv": torch.ones(heads, HIDDEN, dtype=torch.bfloat16),
        "linear_qkv.bias": torch.ones(heads, dtype=torch.bfloat16),
        "linear_fc1": torch.ones(16, HIDDEN, dtype=torch.bfloat16),
        "linear_proj": torch.ones(HIDDEN, HEADS * DEPTH // 2, dtype=torch.bfloat16),
        "word_embeddings": torch.ones(20, HIDDEN, dtype=torch.bfloat16),
    }

    def interleaved(given: dict[str, torch.Tensor], suffix: str, *inner: int) -> torch.Tensor:
        q, k, v = (given[name + suffix] for name in "qkv")
        queries = HEADS // GROUPS
        groups = [
            (
                q.view(HEADS, DEPTH, *inner)[g * queries : (g + 1) * queries],
                *(part.view(GROUPS, DEPTH, *inner)[g : g + 1] for part in (k, v)),
            )
            for g in range(GROUPS)
        ]
        return torch.cat([torch.cat(group) for group in groups]).reshape(-1, *inner)

    def load(named: Named) -> None:
        given = dict(named)
        local["linear_qkv"].copy_(interleaved(given, "", HIDDEN).chunk(2)[rank])
        local["linear_qkv.bias"].copy_(interleaved(given, "_bias").chunk(2)[rank])
        local["linear_fc1"].copy_(torch.cat([given[name].chunk(2)[rank] for name in ("gate", "up")]))
        local["linear_proj"].copy_(given["proj"].chunk(2, dim=1)[rank])
        local["word_embeddings"].copy_(nn.functional.pad(given["embed"], (0, 0, 0, 3)).chunk(2)[rank])

    layout = follow(load, source, local)
    assert len(layout.placements) == 3 + 3 + 2 + 1 + 1
    assert bool(layout.untouched) == (rank == 1)
    layout_by_records(load, deltafmt.Schema.of(source), local, frozenset())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_parallel_rank_with_weight_loaders(rank: int) -> None:
    """Stacked gate and up, row-parallel down, a padded vocabulary, a norm: each by `narrow` and `copy_`."""
    source = weights(gate=(16, 12), up=(16, 12), down=(12, 16), embed=(37, 12), norm=(12,))
    local = {
        "gate_up": torch.zeros(16, 12, dtype=torch.bfloat16),
        "down": torch.zeros(12, 8, dtype=torch.bfloat16),
        "embed": torch.zeros(20, 12, dtype=torch.bfloat16),
        "norm": torch.zeros(12),
    }

    def load(named: Named) -> None:
        for name, tensor in named:
            if name in ("gate", "up"):
                target = local["gate_up"].narrow(0, 8 * (name == "up"), 8)
                target.copy_(tensor.narrow(0, 8 * rank, 8))
            elif name == "down":
                local["down"].copy_(tensor.narrow(1, 8 * rank, 8))
            elif name == "embed":
                part = tensor[20 * rank : 20 * rank + 20]
                local["embed"][: len(part)].copy_(part)
                local["embed"][len(part) :].fill_(0)
            else:
                local["norm"].copy_(tensor)

    layout = follow(load, source, local)
    assert layout.casts == {"norm": "bfloat16"}
    assert bool(layout.untouched) == (rank == 1)
    assert len(layout.placements) == 5


def test_experts_that_are_stacked_transposed_and_repeated() -> None:
    source = weights(**{f"experts.{e}.{part}": (6, 10) for e in range(3) for part in ("gate", "up")})
    local = {"w13": torch.zeros(4, 10, 12, dtype=torch.bfloat16)}
    slots = [2, 0, 1, 0]

    def load(named: Named) -> None:
        given = dict(named)
        for slot, expert in enumerate(slots):
            both = torch.cat([given[f"experts.{expert}.gate"], given[f"experts.{expert}.up"]])
            local["w13"][slot] = both.T

    layout = follow(load, source, local)
    assert len(layout.placements) == 8


def test_shapes_that_run_over_dimensions_and_rotary_halves() -> None:
    source = weights(conv=(4, 3, 2, 2), rotary=(8, 6), flat=(30,))
    local = {
        "conv": torch.zeros(4, 12, dtype=torch.bfloat16),
        "rotary": torch.zeros(8, 6, dtype=torch.bfloat16),
        "flat": torch.zeros(5, 6, dtype=torch.bfloat16).T,
    }

    def load(named: Named) -> None:
        given = dict(named)
        local["conv"].copy_(given["conv"].flatten(1))
        local["rotary"].copy_(given["rotary"].view(2, 2, 2, 6).transpose(1, 2).reshape(8, 6))
        local["flat"].copy_(given["flat"].view(6, 5))

    follow(load, source, local)


def test_a_module_with_tied_names() -> None:
    embed, head = nn.Embedding(9, 5).bfloat16(), nn.Linear(5, 9, bias=False).bfloat16()
    head.weight = embed.weight
    module = nn.Sequential(embed, head)
    source = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    source["1.weight"] = source["0.weight"]

    def load(named: Named) -> None:
        module.load_state_dict(dict(named))

    follow(load, source, {"weight": embed.weight.detach()})


def test_every_dtype_and_many_small_digits() -> None:
    dtypes = (
        "float8_e4m3fn",
        "float8_e5m2",
        "int8",
        "uint8",
        "float16",
        "float32",
        "float64",
        "int32",
        "int64",
    )
    source = {name: torch.zeros(30, 11).to(getattr(torch, name)) for name in dtypes}
    local = {name: torch.zeros_like(tensor[:, :4]).T.contiguous() for name, tensor in source.items()}

    def load(named: Named) -> None:
        for name, tensor in named:
            local[name].copy_(tensor[:, 3:7].T)

    layout = deltafmt.trace_layout(load, deltafmt.Schema.of(source), local)
    assert len(layout.placements) == len(dtypes)
    assert {p.source_box for p in layout.placements} == {deltafmt.Box((0, 3), (30, 7))}


def refused(load: Load, source: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> LayoutError:
    before = {name: tensor.clone() for name, tensor in targets.items()}
    with pytest.raises(LayoutError) as caught:
        deltafmt.trace_layout(load, deltafmt.Schema.of(source), targets)
    assert_same(targets, before)
    return caught.value


class Spoilt:
    """A loader of one tensor that does something to it on the way."""

    def __init__(
        self, what: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.source = weights(w=(6, 8))
        self.target = torch.ones(6, 8, dtype=dtype)
        self.what = what

    def load(self, named: Named) -> None:
        for _, tensor in named:
            self.target.copy_(self.what(tensor))


@pytest.mark.parametrize(
    "what",
    [
        lambda t: t * 1.01,
        lambda t: t + 1,
        torch.exp,
        torch.nan_to_num,
        lambda t: torch.where(t < 0, -t, t),
        lambda t: torch.where(torch.arange(48).view(6, 8) == 17, t * 2, t),
        lambda t: t.float().clamp(max=1e30).bfloat16(),
        lambda t: t if float(t.float().sum()) > 0 else t.flip(0),
        torch.relu,
        lambda t: t.sort(dim=1).values,
    ],
)
def test_whatever_is_no_move_is_refused(what: Callable[[torch.Tensor], torch.Tensor]) -> None:
    spoilt = Spoilt(what)
    error = refused(spoilt.load, spoilt.source, {"t": spoilt.target})
    assert error.kind == "trace-impure"
    assert "'t'" in str(error)


def test_casts_that_lose_bits_are_refused() -> None:
    for dtype in (torch.float16, torch.float8_e4m3fn, torch.float64):
        spoilt = Spoilt(torch.clone, dtype)
        assert refused(spoilt.load, spoilt.source, {"t": spoilt.target}).kind in (
            "trace-impure",
            "dtype-mismatch",
            "target-unfilled",
        )


def test_a_target_that_is_left_alone_or_replaced() -> None:
    source, module = weights(w=(6, 8)), nn.Linear(8, 6, bias=False).bfloat16()

    def rebind(named: Named) -> None:
        for _, tensor in named:
            module.weight.data = tensor.clone()

    target = module.weight.detach()
    error = refused(rebind, source, {"t": target})
    assert error.kind == "target-unfilled"
    assert "new tensor" in str(error)
    idle = torch.ones(3)
    layout = deltafmt.trace_layout(
        lambda named: target.copy_(dict(named)["w"]),
        deltafmt.Schema.of(source),
        {"t": target, "idle": idle},
        untouched=["idle"],
    )
    assert layout.untouched == (("idle", deltafmt.Box.full((3,))),)


def test_a_loader_in_threads_and_one_that_fails() -> None:
    source = weights(a=(50, 3), b=(40, 3))
    target = torch.zeros(90, 3, dtype=torch.bfloat16)

    def load(named: Named) -> None:
        given = dict(named)
        threads = [
            threading.Thread(target=target[low:high].copy_, args=(given[name],))
            for name, low, high in (("a", 40, 90), ("b", 0, 40))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert len(follow(load, source, {"t": target}).placements) == 2

    def fail(_named: Named) -> None:
        target.fill_(3)
        raise KeyError("unknown name")

    before = target.clone()
    with pytest.raises(KeyError):
        deltafmt.trace_layout(fail, deltafmt.Schema.of(source), {"t": target})
    assert torch.equal(target, before)


def test_a_permutation_element_by_element() -> None:
    order = torch.randperm(4000, generator=torch.Generator().manual_seed(1))
    source, target = weights(w=(4000,)), torch.zeros(4000, dtype=torch.bfloat16)
    layout = follow(lambda named: target.copy_(dict(named)["w"][order]), source, {"t": target})
    assert 2000 <= len(layout.placements) <= 4000
