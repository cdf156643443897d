"""One domain's live elements, wherever they are: the kernels of each device behind one set of verbs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from deltafmt.kernels import apply as native
from deltafmt.kernels.digest import Digest
from deltafmt.kernels.positions import Positions

Bits = npt.NDArray[Any]
Chosen = npt.NDArray[np.bool_]


class LiveDomain:
    """Verbs on the live elements of a domain.

    `parts` are kernel modules with their views, and which of the domain's segments each view has; together
    they have each once.
    """

    __slots__ = ("parts", "width")

    def __init__(self, parts: list[tuple[ModuleType, Any, Chosen]], width: int) -> None:
        self.parts = parts
        self.width = width

    @classmethod
    def on_cpu(cls, view: native.DomainView) -> LiveDomain:
        """A domain all of whose elements are in this process's memory."""
        return cls([(native, view, np.ones(len(view.arguments[8]), bool))], view.width)

    def set(self, positions: Positions, bits: Bits, old: Bits | None, digest: Digest) -> None:
        """Write new bits at ascending positions.

        `old` receives the bits that stood there, where they are held; the change is added to `digest`.
        """
        for module, view, _ in self.parts:
            module.apply_set(view, positions, bits, old, digest)

    def step(self, positions: Positions, steps: Bits, order: int, old: Bits | None, digest: Digest) -> None:
        """Add steps at ascending positions; else as `set`."""
        for module, view, _ in self.parts:
            module.apply_step(view, positions, steps, order, old, digest)

    def write(self, bits: Bits) -> None:
        """Write all elements."""
        for module, view, _ in self.parts:
            module.apply_dense(view, bits)

    def read(self, bits: Bits) -> None:
        """Read all elements that are held here."""
        for module, view, _ in self.parts:
            module.gather_dense(view, bits)

    def scan(self) -> native.Sums:
        """Digest of each of the domain's segments, shape (segments, 2); those not counted have zero."""
        sums = np.zeros((len(self.parts[0][2]), 2), np.uint64)
        for module, view, own in self.parts:
            sums[own] = module.scan(view, self.like)
        return sums

    def digest(self) -> Digest:
        """Digest of all elements, each counted once."""
        total: Digest = self.scan().sum(axis=0, dtype=np.uint64)
        return total

    @property
    def cast_exact(self) -> bool:
        """Whether every live element behind a cast is an image of its narrow source."""
        return all(module.cast_exact(view, self.like) for module, view, _ in self.parts)

    @property
    def like(self) -> Bits:
        """An empty array of the domain's element type."""
        return np.empty(0, f"<u{self.width}")

    def restricted(self, chosen: Chosen) -> LiveDomain:
        """The same without the segments that are not chosen."""
        numbers = np.cumsum(chosen) - 1
        parts = []
        for module, view, own in self.parts:
            kept = own & chosen
            left = np.zeros(int(chosen.sum()), bool)
            left[numbers[kept]] = True
            parts.append((module, view.restricted(chosen[own]), left))
        return LiveDomain(parts, self.width)
