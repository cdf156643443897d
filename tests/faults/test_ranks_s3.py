"""Ranks on a real S3 server, which share nothing but the bucket."""

from __future__ import annotations

from functools import partial

import deltafmt
from deltafmt.errors import CommitConflictError
from deltafmt.schema import Schema
from deltafmt.testing.servers import SeaweedServer
from tests.ranks import anchor, changed, model, publish, tensor_parallel, together, writers


def test_versions_by_four_ranks_and_a_race_of_two_jobs(seaweed: SeaweedServer) -> None:
    root, options = seaweed.url(), seaweed.storage_options
    states = [changed(model(), seed) for seed in range(3)]
    layouts, parts = tensor_parallel(states[0], 4)
    settings = {"schema": Schema.of(states[0]), "layouts": layouts, "storage_options": options}
    ranks = writers(root, 4, **settings)
    assert anchor(ranks, parts) == [0] * 4
    assert publish(ranks, tensor_parallel(states[1], 4)[1]) == [1] * 4
    rivals = [
        writers(root, 2, **{**settings, "layouts": tensor_parallel(states[0], 2)[0]}, options={"job": n})
        for n in "ab"
    ]
    for ranks in rivals:
        together([writer.resume for writer in ranks])
    new = tensor_parallel(states[2], 2)[1]
    found = together([partial(w.publish, p) for ranks in rivals for w, p in zip(ranks, new, strict=True)])
    won = [outcome for outcome in found if outcome == 2]
    assert len(won) == 2
    assert found[0] == found[1] or type(found[0]) is type(found[1])
    assert sum(isinstance(outcome, CommitConflictError) for outcome in found) == 2
    lineage = deltafmt.open(root, storage_options=options)
    assert lineage.verify().ok
    read = lineage.read(2)
    assert all((read[name] == states[2][name]).all() for name in states[2])
