"""The three means of tracing one by one: what each can follow, and that it says so where it cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import deltafmt
from deltafmt.errors import LayoutError
from deltafmt.tracing.bits import layout_by_bits
from deltafmt.tracing.counted import layout_by_numbers
from deltafmt.tracing.meet import UnsureError
from deltafmt.tracing.parts import Numbers
from deltafmt.tracing.recorded import layout_by_records
from tests.cases.common import assert_same, copied

Named = Iterable[tuple[str, torch.Tensor]]
Tensors = dict[str, torch.Tensor]


def moved(layout: deltafmt.Layout, source: Tensors, targets: Tensors) -> Tensors:
    """What a layout makes of a source; 77 where it leaves an element alone."""
    made = {}
    for name, target in targets.items():
        memory = torch.full((deltafmt.layout.TargetInfo.of(target).span,), 77, dtype=target.dtype)
        for p in layout.placements:
            if p.target == name:
                box = source[p.source][p.source_box.slices()]
                memory.as_strided(box.shape, p.strides, p.offset).copy_(box)
        made[name] = memory.as_strided(target.shape, target.stride())
    return made


class Case:
    """A loader of tensors `a` (6, 8) and `b` (4, 8) into one target, by a function of them."""

    def __init__(self, make: Callable[..., torch.Tensor], dtype: torch.dtype = torch.int32) -> None:
        self.make = make
        self.source = {
            "a": torch.arange(48).view(6, 8).to(dtype),
            "b": torch.arange(100, 132).view(4, 8).to(dtype),
        }
        self.expected = make(self.source["a"], self.source["b"])
        self.targets = {"t": torch.full(self.expected.shape, 77, dtype=self.expected.dtype)}
        self.schema = deltafmt.Schema.of(self.source)

    def load(self, named: Named) -> None:
        given = dict(named)
        self.targets["t"].copy_(self.make(given["a"], given["b"]))

    def check(self, layout: deltafmt.Layout) -> None:
        made = moved(layout, self.source, self.targets)["t"]
        for _, box in layout.untouched:
            assert not self.expected[box.slices()].any()
            made[box.slices()] = 0
        assert torch.equal(made, self.expected)
        infos = {"t": deltafmt.layout.TargetInfo.of(self.targets["t"])}
        layout.validate(self.schema, infos)


RECORDED: dict[str, Callable[..., torch.Tensor]] = {
    "slice": lambda a, b: a[1:5:2, 2:],
    "fuse": lambda a, b: torch.cat([a, b]),
    "fuse along 1": lambda a, b: torch.cat([a[:4], b], dim=1),
    "fuse along -1, transposed": lambda a, b: torch.cat([a[:4].T, b.T], dim=-1),
    "interleave": lambda a, b: torch.stack([a[:4], b], dim=1).reshape(8, 8),
    "interleave columns": lambda a, b: torch.stack([a[:4], b], dim=2).flatten(1),
    "groups": lambda a, b: torch.cat([a.view(2, 3, 8), b.view(2, 2, 8)], 1).view(10, 8),
    "transpose": lambda a, b: a.T,
    "rotary": lambda a, b: b.view(2, 2, 2, 4).transpose(1, 2).reshape(4, 8),
    "flat and back": lambda a, b: a.T.reshape(-1).view(8, 6),
    "pad": lambda a, b: nn.functional.pad(a, (1, 2, 0, 3)),
    "pad and cut": lambda a, b: nn.functional.pad(a, (-1, 2, 1, -2)),
    "repeat": lambda a, b: b.repeat(2, 3),
    "tile more": lambda a, b: b.tile(2, 1, 1),
    "repeat heads": lambda a, b: b.repeat_interleave(2, 0),
    "expand": lambda a, b: b[None].expand(3, 4, 8),
    "flip": lambda a, b: a.flip(0, 1),
    "roll": lambda a, b: a.roll((1, -2), (0, 1)),
    "rows by list": lambda a, b: a[[5, 3, 3, 0]],
    "rows by table": lambda a, b: a[torch.tensor([[0, 2], [4, 1]])],
    "rows by mask": lambda a, b: a[torch.tensor([True, False, True, True, False, True])],
    "columns": lambda a, b: a.index_select(1, torch.tensor([7, 0, 1, 2, 5])),
    "split and join": lambda a, b: torch.cat(list(a.split([1, 2, 3])[::-1])),
    "chunks": lambda a, b: torch.stack(a.chunk(3)),
    "unbind": lambda a, b: torch.stack(a.unbind(1)),
    "one element": lambda a, b: a[2, 3],
    "unfold": lambda a, b: b.unfold(1, 4, 2).contiguous(),
    "same width": lambda a, b: a.view(torch.float32).clone().view(torch.int32),
    "diagonal": lambda a, b: a.diagonal(),
    "in part": lambda a, b: a.clone().index_copy_(0, torch.tensor([4, 1, 2, 0]), b),
    "overwritten": lambda a, b: a[:4].clone().copy_(b),
    "buffer": lambda a, b: torch.empty_like(a).copy_(a),
    "new": lambda a, b: a.new_zeros(7, 8).index_copy_(0, torch.tensor([6, 0, 2, 4]), b),
    "put": lambda a, b: a.new_zeros(7, 8).index_put_((torch.tensor([6, 0, 2, 4]),), b),
}


@pytest.mark.parametrize("name", RECORDED)
def test_moves_that_are_recorded(name: str) -> None:
    case = Case(RECORDED[name])
    before = copied(case.targets)
    case.check(layout_by_records(case.load, case.schema, case.targets, frozenset()))
    assert_same(case.targets, before)
    case.check(
        layout_by_numbers(case.load, case.schema, Numbers(case.schema), case.targets, frozenset())
        if name != "same width"
        else deltafmt.trace_layout(case.load, case.schema, case.targets)
    )
    case.check(deltafmt.trace_layout(case.load, case.schema, case.targets))
    assert_same(case.targets, before)


COUNTED: dict[str, Callable[..., torch.Tensor]] = {
    "each element": lambda a, b: a[torch.arange(6)[:, None], torch.arange(8).flip(0)],
    "gather": lambda a, b: a.gather(1, torch.tensor([[3, 0]] * 6)),
    "take": lambda a, b: a.take(torch.tensor([47, 0, 3])),
    "lower half": lambda a, b: a.tril(),
    "mask": lambda a, b: a.masked_fill(torch.eye(6, 8, dtype=torch.bool), 0),
    "where": lambda a, b: torch.where(torch.eye(4, 8, dtype=torch.bool), a[:4], b),
    "blocks": torch.block_diag,
    "rot90": lambda a, b: a.rot90(),
    "roll all": lambda a, b: a.roll(3),
}


@pytest.mark.parametrize("name", COUNTED)
def test_moves_that_are_counted(name: str) -> None:
    case = Case(COUNTED[name])
    before = copied(case.targets)
    with pytest.raises(UnsureError):
        layout_by_records(case.load, case.schema, case.targets, frozenset())
    case.check(layout_by_numbers(case.load, case.schema, Numbers(case.schema), case.targets, frozenset()))
    assert_same(case.targets, before)
    case.check(deltafmt.trace_layout(case.load, case.schema, case.targets))
    assert_same(case.targets, before)


def test_what_leaves_torch_is_found_by_bits() -> None:
    case = Case(lambda a, b: torch.from_numpy(np.ascontiguousarray(a.numpy()[::-1])))
    for means in (
        lambda: layout_by_records(case.load, case.schema, case.targets, frozenset()),
        lambda: layout_by_numbers(case.load, case.schema, Numbers(case.schema), case.targets, frozenset()),
    ):
        with pytest.raises(UnsureError):
            means()
    case.check(deltafmt.trace_layout(case.load, case.schema, case.targets))


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
def test_bools_and_complex_numbers(dtype: torch.dtype) -> None:
    source = {"m": torch.zeros(5, 7, dtype=dtype), "w": torch.zeros(3, 3, dtype=torch.bfloat16)}
    targets = {"m": torch.ones(6, 6, dtype=dtype), "w": torch.zeros(3, 3, dtype=torch.bfloat16)}
    schema = deltafmt.Schema.of(source)

    def load(named: Named) -> None:
        given = dict(named)
        targets["m"][:, 1:] = nn.functional.pad(given["m"][:, :6].T, (0, 0, 0, 0))
        targets["m"][:, 0] = True
        targets["w"].copy_(given["w"])

    layouts = [
        deltafmt.trace_layout(load, schema, targets),
        layout_by_records(load, schema, targets, frozenset()),
        layout_by_numbers(load, schema, Numbers(schema), targets, frozenset()),
        layout_by_bits(load, schema, Numbers(schema), targets, frozenset()),
    ]
    for layout in layouts:
        assert set(layout.placements) == set(layouts[0].placements)
        assert layout.untouched == (("m", deltafmt.Box((0, 0), (6, 1))),)
        assert len(layout.placements) == 2


def test_no_element_is_touched() -> None:
    """Tensors of 2**60 elements, of which slices are loaded."""
    schema = deltafmt.Schema([deltafmt.TensorSpec(f"w{k}", "bfloat16", (1 << 30, 1 << 30)) for k in range(3)])
    target = torch.zeros(6, 5, dtype=torch.bfloat16)

    def load(named: Named) -> None:
        whole = torch.cat([tensor.T for _, tensor in named])
        target.copy_(whole[(1 << 30) - 3 : (1 << 30) + 3, -5:])

    layout = layout_by_records(load, schema, {"t": target}, frozenset())
    assert {(p.source, p.source_box.start) for p in layout.placements} == {
        ("w0", ((1 << 30) - 5, (1 << 30) - 3)),
        ("w1", ((1 << 30) - 5, 0)),
    }


def test_a_loader_that_hides_its_errors() -> None:
    """It takes another way where the first one fails; tensors that stand for others must not make it."""

    def make(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        try:
            return torch.from_numpy(a.numpy().copy())
        except RuntimeError:
            return a.flip(0)

    case = Case(make)
    case.check(deltafmt.trace_layout(case.load, case.schema, case.targets))

    def compare(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        try:
            return a if torch.equal(a[:4], b) else a.clone()
        except UnsureError:
            return a.flip(0)

    case = Case(compare)
    with pytest.raises(UnsureError):
        layout_by_records(case.load, case.schema, case.targets, frozenset())
    case.check(deltafmt.trace_layout(case.load, case.schema, case.targets))


def test_local_tensors_that_share_memory_and_are_written_in_turn() -> None:
    flat = torch.zeros(60, dtype=torch.int32)
    targets = {"one": flat[:48].view(6, 8), "same": flat[:48].view(8, 6), "rest": flat[48:].view(3, 4)}
    source = {"a": torch.arange(48, dtype=torch.int32).view(6, 8), "c": torch.arange(50, 62).int()}
    schema = deltafmt.Schema.of(source)

    def load(named: Named) -> None:
        given = dict(named)
        flat.zero_()
        targets["one"].copy_(given["a"].flip(0))
        targets["rest"].copy_(given["c"].view(3, 4))
        targets["one"].copy_(given["a"])
        targets["rest"][1] = targets["rest"][0]

    layout = layout_by_records(load, schema, targets, frozenset())
    assert len(layout.placements) == len(deltafmt.trace_layout(load, schema, targets).placements)
    load(source.items())
    assert_same(moved(layout, source, targets), copied(targets))


def test_rows_that_are_copied_one_by_one_are_one_placement() -> None:
    source = {"w": torch.zeros(300, 20, dtype=torch.bfloat16)}
    target = torch.zeros(20, 300, dtype=torch.bfloat16)

    def load(named: Named) -> None:
        for _, tensor in named:
            for row in range(300):
                target[:, row].copy_(tensor[row])

    layout = layout_by_records(load, deltafmt.Schema.of(source), {"t": target}, frozenset())
    assert len(layout.placements) == 1


def test_memory_that_is_not_initialised_comes_from_nowhere() -> None:
    for size in (8, 40_000):
        source = {"w": torch.zeros(size, dtype=torch.bfloat16)}
        target = torch.ones(2 * size, dtype=torch.bfloat16)

        def load(named: Named, target: torch.Tensor = target) -> None:
            for _, tensor in named:
                held = tensor.clone()
                del held
                buffer = torch.empty(target.shape, dtype=tensor.dtype)
                buffer[: len(tensor)].copy_(tensor)
                target.copy_(buffer)

        schema = deltafmt.Schema.of(source)
        layouts = [
            deltafmt.trace_layout(load, schema, {"t": target}),
            layout_by_bits(load, schema, Numbers(schema), {"t": target}, frozenset()),
        ]
        for layout in layouts:
            assert layout.untouched == (("t", deltafmt.Box((size,), (2 * size,))),)


def refused(make: Callable[..., torch.Tensor]) -> LayoutError:
    case = Case(make, torch.float32)
    before = copied(case.targets)
    with pytest.raises(LayoutError) as caught:
        deltafmt.trace_layout(case.load, case.schema, case.targets)
    assert_same(case.targets, before)
    assert "'t'" in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: nn.functional.pad(a, (0, 1)) + nn.functional.pad(a.mean(1, keepdim=True), (8, 0)),
        lambda a, b: torch.cat([a, a.mean(0, keepdim=True)]),
        lambda a, b: torch.cat([a, torch.rand(1, 8)]),
        lambda a, b: a if bool(a[0, 0] > 0) else a.flip(0),
        lambda a, b: a if a.numpy()[0, 0] > 0 else a.flip(0),
        lambda a, b: torch.cat([a[:3], a[3:].clone().mul_(0.5)]),
        lambda a, b: a + 0.0,
        lambda a, b: a.nan_to_num(),
        lambda a, b: a.bfloat16().float(),
        lambda a, b: a.clone().index_put_((torch.tensor([0, 0]),), b[:2], accumulate=True),
        lambda a, b: a.sort().values,
        lambda a, b: torch.maximum(a[:4], b),
    ],
)
def test_what_is_no_move_is_refused_by_name(make: Callable[..., torch.Tensor]) -> None:
    assert refused(make).kind == "trace-impure"


def test_writes_of_other_threads_into_buffers_are_not_overlooked() -> None:
    def make(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        buffer = torch.zeros(6, 8, dtype=a.dtype)
        thread = threading.Thread(target=lambda: buffer.copy_(a.flip(0)))
        thread.start()
        thread.join()
        return buffer[:, 1:]

    case = Case(make)
    case.check(deltafmt.trace_layout(case.load, case.schema, case.targets))


def test_hundreds_of_tensors() -> None:
    source = {f"w{k}": torch.zeros(2, 3, dtype=torch.bfloat16) for k in range(600)}
    targets = {f"t{k}": torch.zeros(6, 2, dtype=torch.bfloat16) for k in range(300)}

    def load(named: Named) -> Any:
        for name, tensor in named:
            k = int(name[1:])
            targets[f"t{k // 2}"][k % 2 * 3 : k % 2 * 3 + 3].copy_(tensor.T)

    layout = deltafmt.trace_layout(load, deltafmt.Schema.of(source), targets)
    assert len(layout.placements) == 600
    assert {p.source_box.shape for p in layout.placements} == {(2, 3)}
    assert {p.strides for p in layout.placements} == {(1, 2)}


class Layers:
    """A loader of ten layers with fused tensors, a stack over all layers, and a padded embedding."""

    def __init__(self, *, streams: bool = True) -> None:
        generator = torch.Generator().manual_seed(0)
        self.source = {"embed": torch.zeros(13, 8)}
        self.targets = {"embed": torch.zeros(16, 8), "norms": torch.zeros(10, 8)}
        for k in range(10):
            self.source |= {f"l.{k}.q": torch.zeros(8, 8), f"l.{k}.k": torch.zeros(4, 8)}
            self.source[f"l.{k}.norm"] = torch.zeros(8)
            self.targets[f"l.{k}.qk"] = torch.zeros(12, 8)
        for tensors in (self.source, self.targets):
            for name, tensor in tensors.items():
                tensors[name] = torch.randn(tensor.shape, generator=generator).bfloat16()
        self.schema = deltafmt.Schema.of(self.source)
        self.calls: list[int] = []
        self.streams = streams

    def load(self, named: Named) -> None:
        given = dict(named)
        self.calls.append(len(given))
        if not self.streams and len(given) < len(self.source):
            raise KeyError("missing")
        for name, tensor in given.items():
            layer, _, part = name.rpartition(".")
            if part == "embed":
                self.targets["embed"][:13].copy_(self.moved(tensor))
                self.targets["embed"][13:].fill_(0)
            elif part == "norm":
                self.targets["norms"][int(layer[2:])].copy_(self.moved(tensor))
            elif part == "q":
                self.targets[f"{layer}.qk"][:8].copy_(self.moved(tensor).T)
            else:
                self.targets[f"{layer}.qk"][8:].copy_(self.moved(tensor))

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class PastTorch(Layers):
    """The same, whose tensors pass through numpy."""

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(tensor.view(torch.int16).numpy().copy()).view(torch.bfloat16)


@pytest.mark.parametrize("kind", [Layers, PastTorch])
@pytest.mark.parametrize("streams", [True, False])
def test_a_few_layers_at_a_time(kind: type[Layers], streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = kind()
    expected = deltafmt.trace_layout(whole.load, whole.schema, whole.targets)
    assert len(expected.placements) == 31
    monkeypatch.setattr("deltafmt.tracing.grouping.AT_ONCE", 1024)
    case = kind(streams=streams)
    before = copied(case.targets)
    layout = deltafmt.trace_layout(case.load, case.schema, case.targets)
    assert_same(case.targets, before)
    assert set(layout.placements) == set(expected.placements)
    assert layout.untouched == expected.untouched == (("embed", deltafmt.Box((13, 0), (16, 8))),)
    assert min(case.calls) < 10
    if streams:
        # Elements are moved by all tensors at once only where bits are tried in the end.
        assert case.calls.count(31) == (1 if kind is Layers else 4)


def test_a_loader_that_writes_everything_whatever_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltafmt.tracing.grouping.AT_ONCE", 1024)
    case = Layers()

    def load(named: Named) -> None:
        for tensor in case.targets.values():
            tensor.zero_()
        case.load(named)

    before = copied(case.targets)
    layout = deltafmt.trace_layout(load, case.schema, case.targets)
    assert_same(case.targets, before)
    assert len(layout.placements) == 31


def test_memory_that_is_written_past_torch_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where too much would have to be copied the bits are lost, and not in silence."""
    case = Layers()

    def load(named: Named) -> None:
        case.load(named)
        case.targets["embed"][13:].view(torch.int16).numpy()[...] = 0

    assert len(deltafmt.trace_layout(load, case.schema, case.targets).placements) == 31
    monkeypatch.setattr("deltafmt.tracing.grouping.AT_ONCE", 1024)
    with pytest.raises(LayoutError, match="'embed'") as caught:
        deltafmt.trace_layout(load, case.schema, case.targets)
    assert caught.value.kind == "trace-impure"


def test_parameters_whose_data_is_replaced_are_given_back() -> None:
    module = nn.Linear(8, 6, bias=False).bfloat16()
    before, address = module.weight.detach().clone(), module.weight.data_ptr()

    def load(named: Named) -> None:
        for _, tensor in named:
            module.weight.data = tensor.flip(0)

    schema = deltafmt.Schema.of({"w": before})
    with pytest.raises(LayoutError) as caught:
        deltafmt.trace_layout(load, schema, dict(module.named_parameters()))
    assert caught.value.kind == "target-unfilled"
    assert module.weight.data_ptr() == address
    assert torch.equal(module.weight, before)


def test_many_threads_that_load_into_one_tensor() -> None:
    source = {f"w{k}": torch.zeros(3, 5, dtype=torch.bfloat16) for k in range(60)}
    target = torch.zeros(5, 180, dtype=torch.bfloat16)

    def one(item: tuple[int, torch.Tensor]) -> None:
        place, tensor = item
        target[:, 3 * place : 3 * place + 3] = torch.stack(list(tensor)).T

    def load(named: Named) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, enumerate(tensor for _, tensor in named)))

    schema = deltafmt.Schema.of(source)
    layout = layout_by_records(load, schema, {"t": target}, frozenset())
    assert len(layout.placements) == 60
    assert set(layout.placements) == set(deltafmt.trace_layout(load, schema, {"t": target}).placements)


def test_scalars_empty_tensors_inference_mode_and_pairs() -> None:
    source = {
        "none": torch.zeros(0, 4),
        "scale": torch.tensor(0.5),
        "one": torch.zeros(1, 1),
        "w": torch.zeros(2, 3),
    }
    targets = {"scales": torch.zeros(2), "none": torch.zeros(0, 4), "w": torch.zeros(()), "x": torch.zeros(6)}

    def load(named: Named) -> None:
        given = dict(named)
        with torch.inference_mode():
            targets["scales"][0] = given["scale"]
            targets["scales"][1:].copy_(given["one"][0])
            targets["none"].copy_(given["none"])
            targets["w"].copy_(given["w"][1, 2])
            targets["x"].copy_(torch.cat([given["none"].view(-1), given["w"].view(-1)]))

    schema = deltafmt.Schema.of(source)
    recorded = layout_by_records(load, schema, targets, frozenset())
    assert {(p.source, p.target, p.offset) for p in recorded.placements} == {
        ("scale", "scales", 0),
        ("one", "scales", 1),
        ("w", "w", 0),
        ("w", "x", 0),
    }
    assert set(deltafmt.trace_layout(load, schema, iter(targets.items())).placements) == set(
        recorded.placements
    )


def test_a_module_loads_itself_and_keeps_its_parameters() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    before = copied(module.state_dict())
    source = {name: torch.zeros_like(tensor) for name, tensor in before.items()}

    def load(named: Named) -> None:
        module.load_state_dict(dict(named))

    schema = deltafmt.Schema.of(source)
    recorded = layout_by_records(load, schema, module.state_dict(), frozenset())
    layout = deltafmt.trace_layout(load, schema, module.state_dict())
    assert layout.placements == recorded.placements == deltafmt.Layout.identity(schema).placements
    assert_same(copied(module.state_dict()), before)
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())


def test_complex_views_and_conjugates_are_not_taken_for_others() -> None:
    source = {"z": torch.zeros(4, 6, dtype=torch.complex64), "w": torch.zeros(4, 2)}
    targets = {"z": torch.zeros(6, 4, dtype=torch.complex64), "w": torch.zeros(4, dtype=torch.complex64)}
    schema = deltafmt.Schema.of(source)

    def load(named: Named) -> None:
        given = dict(named)
        targets["z"].copy_(given["z"].T)
        targets["w"].copy_(torch.view_as_complex(given["w"]))

    with pytest.raises(UnsureError):
        layout_by_records(load, schema, targets, frozenset())
    with pytest.raises(LayoutError):
        deltafmt.trace_layout(load, schema, targets)
    del targets["w"]
    for conjugate in (False, True):

        def turn(named: Named, conjugate: bool = conjugate) -> None:
            whole = dict(named)["z"]
            targets["z"].copy_((whole.conj() if conjugate else whole).T)

        if conjugate:
            with pytest.raises(LayoutError):
                deltafmt.trace_layout(turn, schema, targets)
        else:
            assert len(layout_by_records(turn, schema, targets, frozenset()).placements) == 1


def test_local_tensors_are_moved_about_after_loading() -> None:
    source = {"w": torch.arange(24, dtype=torch.int32).view(4, 6)}
    target = torch.zeros(6, 4, dtype=torch.int32)

    def load(named: Named) -> None:
        target.view(4, 6).copy_(dict(named)["w"])
        buffer = torch.empty(4, 6, dtype=torch.int32)
        buffer.copy_(target.view(4, 6))
        target.copy_(buffer.T)

    schema = deltafmt.Schema.of(source)
    layout = layout_by_records(load, schema, {"t": target}, frozenset())
    assert layout.placements == deltafmt.trace_layout(load, schema, {"t": target}).placements
    assert layout.placements[0].strides == (1, 4)
