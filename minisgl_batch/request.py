"""A request inside the engine.

A `Req` is what the scheduler knows of one request beyond its numbers. Its lengths, tokens and pages live in the
`TableManager`'s arrays at `slot`, so that a decode step touches whole arrays and no objects. Only the scheduler
changes a Req.
"""

from __future__ import annotations

from enum import Enum, auto

from minisgl_batch.batch import IntArray
from minisgl_batch.engine_sampling import EngineSampling
from minisgl_batch.kvcache.base import PrefixHandle


class ReqState(Enum):
    """waiting -> running -> draining -> freed; a retracted request goes from running back to waiting.

    WAITING: has no slot.
    RUNNING: has a slot, pages and a lock; its prompt may still be in computation.
    DRAINING: will run no more, but a step in flight may name it; keeps slot and pages until none does.
    RETURNING: as draining, but it goes back to waiting then.
    FREED: holds nothing.
    """

    WAITING = auto()
    RUNNING = auto()
    DRAINING = auto()
    RETURNING = auto()
    FREED = auto()


class Req:
    """One request.

    Attributes:
        uid: the frontend's number for it.
        ids: int32; the prompt, and after a retraction also the output made so far. What prefill computes.
        num_prompt: tokens of the user's prompt; ids beyond it are output.
        max_len: most tokens of prompt and output together.
        arrival: order of first arrival; the lowest one that runs is never retracted.
        state, slot: see ReqState; slot is -1 without one.
        prefix: the cached prefix that this request locks.
        num_cached: prompt tokens that the prefix cache had when the request first ran.
        num_reused: tokens in pages that others computed; what follows them is the row's own work.
        is_alone: it takes nothing from the prefix cache and leaves nothing there.
        first_scored: position of the first token of its prompt that is scored, if `scores_prompt`.
        scores_prompt: its prompt has tokens without the log-probabilities that it asks for.
        is_constrained: what comes next in its text may be limited.
    """

    __slots__ = (
        "arrival",
        "first_scored",
        "ids",
        "is_alone",
        "is_constrained",
        "max_len",
        "num_cached",
        "num_prompt",
        "num_reused",
        "prefix",
        "sampling",
        "scores_prompt",
        "slot",
        "state",
        "uid",
    )

    def __init__(
        self,
        uid: int,
        prompt_ids: IntArray,
        sampling: EngineSampling,
        max_len: int,
        arrival: int,
        first_scored: int = 1,
        is_constrained: bool = False,
    ) -> None:
        self.uid = uid
        self.ids = prompt_ids
        self.num_prompt = len(prompt_ids)
        self.sampling = sampling
        self.max_len = max_len
        self.arrival = arrival
        self.state = ReqState.WAITING
        self.slot = -1
        self.prefix: PrefixHandle | None = None
        self.num_cached = self.num_reused = 0
        self.is_alone = False
        self.is_constrained = is_constrained
        self.first_scored = first_scored
        self.scores_prompt = sampling.num_prompt_logprobs >= 0 and self.num_prompt > first_scored

    @property
    def num_cacheable(self) -> int:
        """How many leading tokens may come from the prefix cache.

        The last token is always computed, and so is the one before each that is scored.
        """
        if self.is_alone:
            return 0
        return (self.first_scored if self.scores_prompt else len(self.ids)) - 1

    def __repr__(self) -> str:
        return f"Req(uid={self.uid}, {self.state.name.lower()}, slot={self.slot}, {len(self.ids)}/{self.max_len} ids)"
