"""A step of a receiver that is ready to be made, in parts: apply it, then keep it or go back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from deltafmt.errors import BaseMismatchError
from deltafmt.read.apply import Undo
from deltafmt.read.history import Stored
from deltafmt.read.replica import Link, Replica, StagedLink

State = Literal["prepared", "applied", "kept", "rolled back", "failed"]


class Holder(Protocol):
    """Whoever knows which version the live tensors hold (None: not known)."""

    held: Stored | None


@dataclass(slots=True, kw_only=True)
class Step:
    """What leads to the target, decided before anything is written.

    A `direct` step writes chunks as they arrive, any other one first stages all of them; without `undo` the
    version is unknown from the first write to the last.
    """

    target: Stored
    links: list[Link]
    direct: bool
    undo: Undo | None = field(repr=False)
    staged: list[StagedLink] = field(default_factory=list, repr=False)

    def stage(self, replica: Replica, had: Sequence[StagedLink] = ()) -> None:
        """Fetch and check what has to be here before the first write; `had` was staged before."""
        if not self.direct:
            self.staged = replica.stage(self.links, had)

    def apply(self, replica: Replica) -> None:
        if self.direct:
            replica.stream(self.links, self.undo)
        else:
            replica.apply(self.staged, self.undo)


class Prepared:
    """A version on its way in: `apply` writes it, then `keep` settles on it or `rollback` goes back."""

    def __init__(self, holder: Holder, replica: Replica, step: Step) -> None:
        self._holder, self._replica, self._step = holder, replica, step
        self._old = holder.held
        self._state: State = "prepared"

    @property
    def version(self) -> int:
        """The version that it leads to."""
        return self._step.target.manifest.version

    @property
    def schema(self) -> bytes:
        """Digest of that version's schema."""
        return self._step.target.manifest.schema

    @property
    def nbytes(self) -> int:
        """Stored bytes that it needs, staged already or to be read."""
        return sum(link.plan.nbytes for link in self._step.links)

    @property
    def reversible(self) -> bool:
        """Whether a failure, or `rollback`, restores the old bits."""
        return self._step.undo is not None

    @property
    def staged(self) -> list[StagedLink]:
        """What is on this machine, checked, and has not been written."""
        return self._step.staged

    @property
    def stale(self) -> bool:
        """Whether the receiver no longer holds the version that this starts from."""
        return self._holder.held is not self._old

    def apply(self) -> None:
        """Write. After a failure the old bits are back, or if that is not possible the version is unknown."""
        self._expect("prepared")
        if self.stale:
            raise BaseMismatchError("what was prepared is stale; prepare again", kind="receiver-state")
        self._state = "failed"
        self._holder.held = None
        try:
            self._step.apply(self._replica)
        except BaseException:
            if self._step.undo is not None:
                # Undone already, unless another interrupt came in between: then what is left follows now.
                self._step.undo.run()
                self._holder.held = self._old
            raise
        self._holder.held = self._step.target
        self._step.staged = []
        self._state = "applied"

    def keep(self) -> None:
        """Settle on the new version; the old bits are forgotten."""
        self._expect("applied")
        self._step.undo = None
        self._state = "kept"

    def rollback(self) -> None:
        """Go back to the old bits; where they were not kept the version becomes unknown."""
        self._expect("applied")
        self._state = "rolled back"
        self._holder.held = None
        if self._step.undo is not None:
            self._step.undo.run()
            self._holder.held = self._old

    def _expect(self, state: State) -> None:
        if self._state != state:
            raise BaseMismatchError(
                "call out of order",
                kind="receiver-state",
                expected=f"a version that is {state}",
                found=self._state,
            )
