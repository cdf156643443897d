"""Detection at the moment when what is published is overwritten: no copy that stays, one bit per element."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from deltafmt.errors import UnsupportedError
from deltafmt.given import named_pairs
from deltafmt.kernels.intrinsics import LANES
from deltafmt.tensors import dtype_name, local_part, torch_dtype
from deltafmt.write.marked import Marks
from deltafmt.write.marks import MarkDetector
from deltafmt.write.options import WriterOptions
from deltafmt.write.watch import Watched, by_chunks, cast_chunk, chunk_of, mark_chunk, sum_of

Named = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


@dataclass(slots=True, kw_only=True)
class _Pair:
    """A published tensor, and the master that it is a cast of (None: the optimizer writes to it itself).

    `due` is the fingerprint that it has once the master's cast is copied into it; `old` are its published bits
    while the optimizer steps, where nobody else keeps them.
    """

    marks: Marks
    watched: Watched
    master: torch.Tensor | None
    due: int | None = None
    old: torch.Tensor | None = None


class CastDetector(MarkDetector):
    """Compares FP32 masters, through their cast, with what is published, just before that is overwritten.

    `named_parameters` names what is published. Where it is a narrow copy of an FP32 master in the optimizer,
    the two are compared behind every step, before the trainer copies the master into it: nothing is copied.
    `masters` names the masters; without it the optimizer's parameters are paired with the published ones in
    order, and shapes must agree. Parameters that the optimizer writes to itself are held in their published
    dtype (`publish_dtype` for FP32 ones, as the writer is told) while it steps, and no longer.

    Exact for any optimizer that calls its step hooks, over any number of steps. Writes of others are noticed
    as `AdamWDetector` notices them; what is compared anyway is summed in passing.

    Raises `UnsupportedError` (`detector-unsupported`) where masters and published tensors cannot be paired.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Named,
        *,
        masters: Mapping[str, torch.Tensor] | None = None,
        publish_dtype: str = "bfloat16",
        threads: int | None = None,
    ) -> None:
        super().__init__()
        self._threads = threads or WriterOptions().workers
        self._dtype = publish_dtype
        named = dict(named_pairs(named_parameters))
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        found = _masters(named, held) if masters is None else dict(masters)
        own = {id(parameter) for parameter in held}
        self._pairs: list[_Pair] = []
        for name, tensor in {id(tensor): (name, tensor) for name, tensor in named.items()}.values():
            if name in found or id(tensor) in own:
                self._add(name, tensor, found.get(name))
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._before()),
            optimizer.register_step_post_hook(lambda *_: self._after()),
        ]

    @property
    def transient(self) -> int:
        """Bytes that are held while the optimizer steps, besides the marks."""
        own = (pair.marks for pair in self._pairs if pair.master is None)
        return sum(marks.tensor.numel() * torch_dtype(marks.dtype).itemsize for marks in own)

    def close(self) -> None:
        """Take the hooks off the optimizer; the detector then knows of nothing any more."""
        for hook in self._hooks:
            hook.remove()
        self.drop()

    def settle(self) -> None:
        """Look for writes of others since the last step."""
        for pair in self._pairs:
            self._audit(pair, pair.watched.written(thorough=True, allowed=pair.due))

    def _add(self, name: str, tensor: torch.Tensor, master: torch.Tensor | None) -> None:
        local = local_part(tensor)
        wide = local if master is None else local_part(master)
        if wide.shape != local.shape or not (wide.is_contiguous() and local.is_contiguous()):
            raise UnsupportedError(
                "a master must be contiguous and have its copy's shape; use SnapshotDetector",
                kind="detector-unsupported",
                where=repr(name),
            )
        dtype = self._dtype if master is None and local.dtype is torch.float32 else dtype_name(local)
        marks = Marks.of(name, local, dtype=dtype)
        self._marks[len(self._pairs)] = marks
        watched = Watched(tensor, self._threads, torch_dtype(dtype))
        self._pairs.append(_Pair(marks=marks, watched=watched, master=master))

    def _before(self) -> None:
        for pair in self._pairs:
            # What was written to the copy of a master shows when they are compared, behind the step.
            if pair.master is None:
                pair.old, found = self._held(pair.watched.local, pair.marks.dtype)
                self._audit(pair, pair.watched.written(thorough=True, found=found))

    def _after(self) -> None:
        for pair in self._pairs:
            local = pair.watched.local
            if pair.master is None:
                assert pair.old is not None
                _, found = self._mark(pair.old, local, pair.marks)
                pair.watched.accept(found)
                pair.old = None
                continue
            found, due = self._mark(local, local_part(pair.master), pair.marks)
            self._audit(pair, pair.watched.written(thorough=True, found=found, allowed=pair.due))
            pair.due = due

    def _audit(self, pair: _Pair, why: str | None) -> None:
        if why is not None:
            pair.marks.tensor = pair.watched.local
            self._lose(pair.marks, why)

    def _held(self, local: torch.Tensor, dtype: str) -> tuple[torch.Tensor, int]:
        """A tensor's published bits, in memory of their own, and their fingerprint."""
        held = torch.empty(local.shape, dtype=torch_dtype(dtype))
        flat = held.reshape(-1)

        def work(chunk: slice) -> int:
            return cast_chunk(chunk_of(local, chunk), flat[chunk], chunk)

        return held, sum_of(by_chunks(local.numel(), self._threads, work))

    def _mark(self, old: torch.Tensor, new: torch.Tensor, into: Marks) -> tuple[int, int]:
        """Mark where the cast of `new` differs; returns the fingerprints of old bits and cast."""

        def work(chunk: slice) -> tuple[int, int]:
            words = into.words[chunk.start // LANES : chunk.stop // LANES]
            return mark_chunk(chunk_of(old, chunk), chunk_of(new, chunk), words, chunk)

        found = list(by_chunks(old.numel(), self._threads, work))
        return sum_of(before for before, _ in found), sum_of(after for _, after in found)


def _masters(named: Mapping[str, torch.Tensor], held: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Published tensors that the optimizer does not hold, paired in order with parameters that nobody publishes."""
    own, published = {id(p) for p in held}, {id(tensor) for tensor in named.values()}
    copies = {
        name: tensor for name, tensor in named.items() if id(tensor) not in own and tensor.requires_grad
    }
    masters = [p for p in held if id(p) not in published]
    if not masters:
        return {}
    if [tuple(t.shape) for t in copies.values()] != [tuple(m.shape) for m in masters]:
        raise UnsupportedError(
            "the optimizer's parameters are not masters of the published ones, in order; say which in `masters`",
            kind="detector-unsupported",
            where="masters",
            expected=f"{len(copies)} shapes",
            found=f"{len(masters)} parameters that are not published",
        )
    return dict(zip(copies, masters, strict=True))
