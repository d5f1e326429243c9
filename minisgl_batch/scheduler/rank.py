"""One rank: its group, its engine, and the scheduler that runs the same steps as those of the other ranks.

Rank 0 takes a frontend's messages and passes them on; followers run `python -m minisgl_batch.scheduler.follower`.
Called by the in-process `LLM` and by the processes of a worker group.
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass

import torch

from minisgl_batch.config import EngineConfig
from minisgl_batch.distributed.group import SINGLE, TPGroup
from minisgl_batch.distributed.join import join_group
from minisgl_batch.distributed.place import RankPlace
from minisgl_batch.distributed.rendezvous import open_store
from minisgl_batch.distributed.ticks import TickReceiver, TickSender
from minisgl_batch.engine.options import pick_device
from minisgl_batch.scheduler.compiling import CompilingSource
from minisgl_batch.scheduler.constraints import Constraints
from minisgl_batch.scheduler.factory import make_scheduler
from minisgl_batch.scheduler.scheduler import Scheduler
from minisgl_batch.scheduler.source import FollowerSource, LeaderSource, MessageSource


@dataclass(frozen=True)
class Links:
    """What connects a rank with the others.

    Attributes:
        tp: the group.
        ticks: this rank's end of the ticks' channel; None in a group of one.
    """

    tp: TPGroup = SINGLE
    ticks: TickSender | TickReceiver | None = None

    @property
    def progress(self) -> int | None:
        """Ticks that a follower has begun; None while it waits for one. May be read from another thread."""
        assert isinstance(self.ticks, TickReceiver)
        return self.ticks.progress

    def close(self) -> None:
        self.tp.close()
        if self.ticks is not None:
            self.ticks.close()


def join(config: EngineConfig, place: RankPlace) -> Links:
    """Meet the other ranks; returns when all are there.

    Raises:
        InvalidParameterError: the ranks can't meet where `place` says.
        RankLostError: not all ranks came.
    """
    device = pick_device(config.device, place.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    store = open_store(place)
    # Followers say where they listen before they wait for the group, and rank 0 asks for it before it does.
    ticks = TickSender(place, store) if place.rank == 0 else TickReceiver(place, store)
    try:
        return Links(join_group(place, store, device, use_pynccl=config.pynccl), ticks)
    except BaseException:
        ticks.close()
        raise


class Rank:
    """See the module's docstring.

    Args:
        config: the engine's options, the same on all ranks.
        frontend: where rank 0's messages come from; followers have none.
        links: to the other ranks; the rank closes them.

    Attributes:
        scheduler: serves from now on.

    Raises:
        ModelError, InvalidParameterError: as Engine does.
        RankLostError: another rank failed.
    """

    def __init__(self, config: EngineConfig, frontend: MessageSource | None, links: Links) -> None:
        self._links = links
        constraints = Constraints()
        self._compiling = None if frontend is None else CompilingSource(frontend, constraints)
        try:
            _share_host(config, links.tp)
            source = _source(self._compiling, links)
            self.scheduler: Scheduler = make_scheduler(config, source, links.tp, constraints)
        except BaseException:
            links.close()
            raise

    def close(self) -> None:
        """Free the engine, then what its graphs communicate by; the followers get the last tick."""
        del self.scheduler
        if self._compiling is not None:
            self._compiling.close()
        gc.collect()  # graphs and layers refer to each other
        torch.cuda.empty_cache()  # other processes can have the memory; without a GPU this does nothing
        self._links.close()


def _source(frontend: MessageSource | None, links: Links) -> MessageSource:
    match links.ticks:
        case TickSender() as followers:
            assert frontend is not None
            return LeaderSource(frontend, followers)
        case TickReceiver() as leader:
            return FollowerSource(leader)
        case None:
            assert frontend is not None
            return frontend


def _share_host(config: EngineConfig, tp: TPGroup) -> None:
    """Take this rank's GPU, or its share of the processors."""
    device = pick_device(config.device, tp.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // tp.num_local))
