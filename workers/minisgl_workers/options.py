"""What a worker group and each of its processes is told. No torch: the supervisor, which builds it, loads no model."""

from __future__ import annotations

import msgspec

from minisgl_batch.config import EngineConfig
from minisgl_batch.distributed.place import RankPlace
from minisgl_jobs.leases import LEASE_S

DRAIN_S = 20.0
HANG_S = 300.0
INPUT_S = 60.0


class Node(msgspec.Struct, frozen=True):
    """One host of a group that is spread over several.

    Attributes:
        num_nodes: how many hosts.
        rank: which one; the first, 0, has the frontend.
        rendezvous: HOST:PORT, where rank 0 listens while the group comes together.
    """

    num_nodes: int
    rank: int
    rendezvous: str


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one worker group.

    Attributes:
        engine: the engine's options, the model among them.
        redis_url: where the queue is.
        served_model_name: what jobs call the model; by default what it was given as.
        lease_s: how long a chunk stays with this group once it went silent.
        drain_s: how long running rows may go on after the first SIGTERM before they are handed back.
        hang_s: a process of the group that has work and makes no progress for so long is taken for hanging, and the
            group is started again. More than the longest step takes, the compilation of kernels in it included.
        input_s: how long reading one chunk's rows may take before its job is left to other workers; twice as long after
            each time that this was too short.
        node: which host of a group over several hosts this is.
        allow_roots: folders and URLs that inputs and outputs must lie under; none: they may lie anywhere.
    """

    engine: EngineConfig
    redis_url: str
    served_model_name: str | None = None
    lease_s: float = LEASE_S
    drain_s: float = DRAIN_S
    hang_s: float = HANG_S
    input_s: float = INPUT_S
    node: Node | None = None
    allow_roots: tuple[str, ...] = ()

    @property
    def model(self) -> str:
        """The served model's name."""
        return self.served_model_name or self.engine.model

    def fetched(self) -> WorkerOptions:
        """With what `fetch_model` makes of the engine's; jobs call the model as before. Errors as there."""
        # It needs the engine, which commands that only read options don't.
        from minisgl_batch.models.fetch import fetch_model

        return msgspec.structs.replace(self, engine=fetch_model(self.engine), served_model_name=self.model)


class FrontendConfig(msgspec.Struct, frozen=True):
    """What the supervisor tells a frontend.

    Attributes:
        options: the worker group's.
        worker_id: of this group, unique among living ones.
        socket_directory: where the group's sockets are.
    """

    options: WorkerOptions
    worker_id: str
    socket_directory: str


class RankConfig(msgspec.Struct, frozen=True):
    """What the supervisor tells rank 0.

    Attributes:
        engine: the engine's options.
        place: of the rank among several; None for one.
        socket_directory: where the group's sockets are.
    """

    engine: EngineConfig
    place: RankPlace | None
    socket_directory: str


class TaskRunnerConfig(msgspec.Struct, frozen=True):
    """What the supervisor tells the RQ worker.

    Attributes:
        redis_url: where the queue is.
        model: the served model's name.
        worker_id: of the group.
    """

    redis_url: str
    model: str
    worker_id: str
