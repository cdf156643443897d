"""Who the ranks of a writer are, and by what means they talk."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from deltafmt.errors import UnsupportedError
from deltafmt.format.checksum import blake2b
from deltafmt.format.ranks import HOLDING_BYTES
from deltafmt.read.history import History
from deltafmt.tiling import DOMAIN_ELEMENTS
from deltafmt.write.channel import Channel, StoreChannel
from deltafmt.write.follower import Follower
from deltafmt.write.leader import Leader
from deltafmt.write.options import WriterOptions
from deltafmt.write.ranks import Team
from deltafmt.write.solo import Solo

_LOG = logging.getLogger("deltafmt")
_JOB_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""What the ranks of a job find equal in their environments, and those of another job do not."""


def make_team(history: History, *, rank: int, world_size: int, group: Any, options: WriterOptions) -> Team:
    """The ranks that write together.

    They talk by the process group given, by torch.distributed's default one if it has just these ranks, and
    otherwise through the root.
    """
    if group is not None:
        rank, world_size = _in_group(group, rank, world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size} ranks")
    if rank == 0 and options.trust and options.sign_with is None:
        raise UnsupportedError(
            "whoever demands signatures would refuse what is published: give the key to sign with",
            kind="key-missing",
            where="WriterOptions.sign_with",
        )
    if world_size == 1:
        _warn_of_peers()
        return Solo(history, domain_elements=options.domain_elements, layouts=options.tile_for)
    channel = _channel(history, rank, world_size, group, options)
    if rank:
        return Follower(channel, history, rank=rank, world=world_size, sign_with=options.sign_with)
    return Leader(
        channel,
        history,
        world=world_size,
        job=_job(options),
        timeout_seconds=options.rank_timeout_seconds,
        domain_elements=options.domain_elements or DOMAIN_ELEMENTS,
        layouts=options.tile_for,
        trust=() if options.sign_with is None else options.trusted,
    )


def _channel(history: History, rank: int, world: int, group: Any, options: WriterOptions) -> Channel:
    seconds = options.rank_timeout_seconds
    if group is not None or _default_group_is(rank, world):
        from deltafmt.write.group import GroupChannel

        return GroupChannel(group, timeout_seconds=seconds)
    return StoreChannel(history, rank=rank, world=world, job=_job(options), timeout_seconds=seconds)


def _in_group(group: Any, rank: int, world_size: int) -> tuple[int, int]:
    import torch.distributed as dist

    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"a writer's group is a torch.distributed process group, not {type(group).__name__}")
    place = dist.get_rank(group), dist.get_world_size(group)
    if (rank, world_size) not in ((0, 1), place):
        raise ValueError(f"rank {rank} of {world_size} is rank {place[0]} of {place[1]} in the group given")
    return place


def _default_group_is(rank: int, world: int) -> bool:
    return _place_in_default_group() == (rank, world)


def _place_in_default_group() -> tuple[int, int] | None:
    """(rank, world size) of this process in torch.distributed's default group, if there is one."""
    # A process that has not imported it has not initialised it.
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size()


def _warn_of_peers() -> None:
    place = _place_in_default_group()
    if place is not None and place[0] > 0:
        _LOG.warning(
            "rank %d of the %d of torch.distributed has a writer of its own, which publishes alone: give rank= and "
            "world_size= (or group=) where ranks publish together",
            *place,
        )


def _job(options: WriterOptions) -> bytes:
    name = options.job
    if name is None:
        name = "\n".join(f"{key}={os.environ[key]}" for key in _JOB_VARIABLES if key in os.environ)
    return blake2b(name.encode())[:HOLDING_BYTES]
