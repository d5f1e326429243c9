"""Where a rank stands in its group and how the ranks find each other. Knows nothing of torch.

Made by whoever starts the ranks (`scheduler.followers`, the supervisor of a worker group) and sent to each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from minisgl_batch.config import EngineConfig

COLLECTIVE_TIMEOUT_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """One rank's place.

    Attributes:
        rank: in [0, size).
        size: how many ranks share the model.
        meet: where the ranks find each other: "file:///..." (a file that doesn't exist yet, in a private folder, for
            ranks on one host) or "tcp://HOST:PORT" (rank 0 listens there).
        num_local: how many of the ranks are on each host.
        timeout_s: longest that one collective waits for the other ranks. Ranks that have nothing to do wait without
            limit, and not in collectives.
    """

    rank: int
    size: int
    meet: str
    num_local: int
    timeout_s: float = COLLECTIVE_TIMEOUT_S

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not in [0, {self.size})")

    @property
    def local_rank(self) -> int:
        """The rank among those of its host, which is also its GPU's number."""
        return self.rank % self.num_local


def places_on_this_host(size: int, folder: Path) -> list[RankPlace]:
    """The places of a group whose ranks meet in a private folder."""
    meet = f"file://{folder / 'meet'}"
    return [
        RankPlace(rank=rank, size=size, meet=meet, num_local=size, timeout_s=COLLECTIVE_TIMEOUT_S)
        for rank in range(size)
    ]


def places_on_node(size: int, num_nodes: int, node_rank: int, rendezvous: str) -> list[RankPlace]:
    """The places on one of several hosts, each of which has as many ranks; they meet at HOST:PORT."""
    num_local = size // num_nodes
    return [
        RankPlace(
            rank=node_rank * num_local + number,
            size=size,
            meet=f"tcp://{rendezvous}",
            num_local=num_local,
            timeout_s=COLLECTIVE_TIMEOUT_S,
        )
        for number in range(num_local)
    ]


FOLLOWER = "minisgl_batch.scheduler.follower"
"""The module of a follower's process."""


class FollowerConfig(msgspec.Struct, frozen=True):
    """What a follower is told.

    Attributes:
        engine: the engine's options, the same on all ranks.
        place: where it stands.
        in_worker: it is a worker group's process, to be killed with the supervisor's main thread.
        heeds_sigterm: a SIGTERM ends it; without, rank 0 says when it is over.
    """

    engine: EngineConfig
    place: RankPlace
    in_worker: bool = False
    heeds_sigterm: bool = False
