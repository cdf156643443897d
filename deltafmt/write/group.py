"""How ranks of a torch.distributed process group talk: rank 0 with each of the others."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deltafmt.errors import IncompleteError
from deltafmt.format.ranks import emit_verdict, parse_call
from deltafmt.format.records import Attempt, Verdict
from deltafmt.write.channel import VERDICT_PATIENCE

_TAG = 0xDF
_AT_LEAST_SECONDS = 0.001
_LOG = logging.getLogger("deltafmt")


class GroupChannel:
    """Words as byte tensors, point to point, so that a rank that is gone is known by its number.

    A rank that dies or is silent for too long leaves the process group unusable, as it does for any other
    use of it; ranks that fail and live do not.
    """

    is_open = False

    def __init__(self, group: Any, *, timeout_seconds: float) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._world = dist.get_world_size(group)
        self._timeout = timeout_seconds
        gpu_only = dist.get_backend(group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if gpu_only else torch.device("cpu")

    def call(self, _call: Attempt, data: bytes) -> None:
        self._tell(data)

    def replies(self, _call: Attempt) -> dict[int, bytes]:
        deadline = time.monotonic() + self._timeout
        return self._receive(range(1, self._world), deadline)

    def verdict(self, _call: Attempt, verdict: Verdict) -> None:
        self._tell(emit_verdict(verdict))

    def await_call(self, expected: int) -> Attempt | Verdict:
        data = self._receive([0], time.monotonic() + self._timeout).get(0)
        if data is None:
            raise IncompleteError(
                "rank 0 has not called the ranks together, or is gone",
                kind="rank-missing",
                where=f"rank 0, for version {expected}",
            )
        return parse_call(data, where="call of rank 0")

    def reply(self, _call: Attempt, data: bytes) -> None:
        self._wait(self._send(0, data), 0, time.monotonic() + self._timeout)

    def await_verdict(self, call: Attempt) -> Verdict | None:
        deadline = time.monotonic() + VERDICT_PATIENCE * self._timeout
        while (data := self._receive([0], deadline).get(0)) is not None:
            verdict = parse_call(data, where="verdict of rank 0")
            if isinstance(verdict, Verdict) and verdict.attempt == call.attempt:
                return verdict
        return None

    def forget(self) -> None:
        """A group has one coordinator only."""

    def _tell(self, data: bytes) -> None:
        deadline = time.monotonic() + self._timeout
        works = {rank: self._send(rank, data) for rank in range(1, self._world)}
        for rank, pending in works.items():
            self._wait(pending, rank, deadline)

    def _send(self, rank: int, data: bytes) -> list[Any]:
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        size = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        try:
            # The tensors must live until they are sent.
            return [(dist.isend(t, self._peer(rank), self._group, _TAG), t) for t in (size, payload)]
        except (RuntimeError, ValueError) as error:
            _LOG.warning("rank %d cannot be reached: %s", rank, error)
            return []

    def _wait(self, pending: list[Any], rank: int, deadline: float) -> None:
        for work, _ in pending:
            if not self._done(work, rank, deadline):
                return

    def _receive(self, ranks: Any, deadline: float) -> dict[int, bytes]:
        sizes = {rank: torch.zeros(1, dtype=torch.int64, device=self._device) for rank in ranks}
        there = self._receive_into(sizes, deadline)
        data = {rank: torch.empty(int(sizes[rank]), dtype=torch.uint8, device=self._device) for rank in there}
        there = self._receive_into(data, deadline)
        return {rank: data[rank].cpu().numpy().tobytes() for rank in there}

    def _receive_into(self, tensors: dict[int, torch.Tensor], deadline: float) -> list[int]:
        """The ranks whose tensor has come; all are waited for at once."""
        works = {}
        for rank, tensor in tensors.items():
            try:
                works[rank] = dist.irecv(tensor, self._peer(rank), self._group, _TAG)
            except (RuntimeError, ValueError) as error:
                _LOG.warning("rank %d cannot be reached: %s", rank, error)
        return [rank for rank, work in works.items() if self._done(work, rank, deadline)]

    def _done(self, work: Any, rank: int, deadline: float) -> bool:
        left = max(_AT_LEAST_SECONDS, deadline - time.monotonic())
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            _LOG.warning("rank %d is gone or silent: %s", rank, error)
            return False
        return True

    def _peer(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)
