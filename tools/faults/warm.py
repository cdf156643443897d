"""Import this before forking: it runs everything once, so that children need not load and compile it anew."""

from __future__ import annotations

import tempfile

import torch

import deltafmt
from tools.faults.world import OPTIONS, first_tensors, moved

# Threads do not survive a fork.
torch.set_num_threads(1)
with tempfile.TemporaryDirectory(prefix="deltafmt-faults-") as folder:
    tensors = first_tensors(0)
    with deltafmt.Writer(folder, options=OPTIONS) as writer:
        writer.publish_anchor(tensors)
        for seed in (1, 2):
            tensors = moved(tensors, seed)
            writer.publish(tensors)
    live = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    receiver = deltafmt.Receiver(folder, live)
    for version in (0, 2):
        receiver.advance(version)
    receiver.verify()
    deltafmt.open(folder).add_anchor(1)
    deltafmt.open(folder).squash(0, 2)
    deltafmt.open(folder).gc(keep_last=1, grace_seconds=60, dry_run=False)
