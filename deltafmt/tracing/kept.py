"""Local tensors that a loader writes into, and that are afterwards what they were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from deltafmt.kernels.fingerprint import fingerprint
from deltafmt.tensors import bits, numpy_bits


@contextmanager
def kept(tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Give all tensors their bits back in the end, from copies in host memory."""
    saved = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    try:
        yield
    finally:
        for name, tensor in tensors.items():
            bits(tensor).copy_(bits(saved[name]))


@contextmanager
def bound(tensors: Iterable[Any]) -> Iterator[None]:
    """Give tensors, such as parameters, their memory back in the end, where a loader has set their `data`."""
    saved = [(tensor, tensor.data) for tensor in tensors if isinstance(tensor, torch.Tensor)]
    try:
        yield
    finally:
        for tensor, data in saved:
            if type(tensor.data) is not type(data) or tensor.data_ptr() != data.data_ptr():
                tensor.data = data


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """What tells, but for chance, whether a tensor's bits have changed."""
    return {
        name: fingerprint(numpy_bits(tensor.detach().cpu().contiguous()), 0)
        for name, tensor in tensors.items()
        if tensor.numel()
    }
