"""An anchor beside a version just committed, from the bits that the ranks have of it."""

from __future__ import annotations

from deltafmt.errors import NotFoundError
from deltafmt.format.ranks import ANCHOR, DONE
from deltafmt.format.records import Receipt
from deltafmt.read.history import History, Stored
from deltafmt.write.commit import drop
from deltafmt.write.detector import Detector
from deltafmt.write.draft import Draft
from deltafmt.write.further import create_way, further_plan, way_of
from deltafmt.write.options import WriterOptions
from deltafmt.write.ranks import Team, Want, give_up
from deltafmt.write.state import Base
from deltafmt.write.way import anchor_results, write_shard


def add_anchor_beside(
    history: History,
    team: Team,
    draft: Draft,
    base: Base | None,
    detector: Detector,
    options: WriterOptions,
) -> None:
    """Each rank stores its own part whole, and the leading one makes the way.

    The bits are those that the detector has kept as the `base`; where it keeps none, those of the live tensors,
    which hold the version until `publish` returns. Behind `publish_async` they are gone: `NotFoundError` on all
    ranks then. The ranks have proved their replicas equal when they wrote the version.
    """
    version, threads = draft.plan.version, options.workers
    want = Want(
        holding=draft.holding,
        version=version,
        base=None,
        anchor=True,
        signed=options.sign_with is not None,
        purpose=ANCHOR,
    )
    kept = None if base is None else detector.source(draft.plan.cut)
    if kept is None and draft.behind:
        # Tensors that change while they are read give neither one version's bits nor another's.
        missing = NotFoundError(
            "the bits of the version are not in memory any more; Lineage.add_anchor reads them from storage",
            kind="version-missing",
            where=f"rank {team.rank}, version {version}",
        )
        team.refuse(want, missing)
        raise missing
    source = draft.source if kept is None else kept
    agreed = team.open(want)
    try:
        plan = further_plan(
            history,
            version,
            None,
            cut=draft.plan.cut,
            signed=agreed.call.signed,
            sign_with=options.sign_with,
            attempt=agreed.call.attempt,
            writer=team.rank,
            writers=team.world,
        )
        receipt, _ = write_shard(history.store, plan, anchor_results(plan, source, threads))
    except Exception as error:
        give_up(team, agreed, error)
        raise
    created = False

    def assemble(receipts: list[Receipt]) -> tuple[Stored, bytes]:
        return way_of(plan, receipts)

    def create(made: tuple[Stored, bytes]) -> int:
        nonlocal created
        created = True
        create_way(history, *made)
        return DONE

    try:
        team.close(agreed, receipt, assemble=assemble, create=create)
    except Exception:
        if not created:
            drop(history.store, [plan.shard_key])
        raise
