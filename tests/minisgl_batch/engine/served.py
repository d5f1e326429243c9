"""A model served by the real scheduler and engine in this process, with the logits of every sampled token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl_batch.batch import ScheduledBatch
from minisgl_batch.config import EngineConfig
from minisgl_batch.distributed.group import SINGLE, TPGroup
from minisgl_batch.engine.engine import Engine
from minisgl_batch.engine.transfer import HostTokens
from minisgl_batch.engine_sampling import EngineSampling
from minisgl_batch.messages import (
    FINISH_REASONS,
    AbortRequests,
    AddRequests,
    NewPrompt,
    NewRequest,
    Ready,
    RequestsRefused,
    StepOutput,
)
from minisgl_batch.scheduler.factory import make_scheduler
from minisgl_batch.scheduler.source import LocalSource
from minisgl_batch.tokenizer.logprobs import LogprobCollector, prompt_scores, sampled_scores


class Served:
    """See the module's docstring; requests are numbered from 0 in the order they are given."""

    def __init__(self, model: Path, tp: TPGroup = SINGLE, **options: Any) -> None:
        self._source = LocalSource()
        config = EngineConfig(model=str(model), **({"num_pages": 512, "dtype": "float32"} | options))
        self.scheduler = make_scheduler(config, self._source, tp)
        ready = self._source.outbox.popleft()
        assert isinstance(ready, Ready)
        self._loop = self.scheduler.loop()
        self._num_requests = 0
        self.outputs: dict[int, list[int]] = {}
        self.logits: dict[int, list[torch.Tensor]] = {}
        self.finished: dict[int, str] = {}
        self.refused: dict[int, tuple[str, str]] = {}
        self.cached: dict[int, int] = {}
        self.scores: dict[int, LogprobCollector] = {}
        self._record_logits()

    def _record_logits(self) -> None:
        engine = self.scheduler._engine
        assert isinstance(engine, Engine)
        launch, logits_of = engine.launch, engine._model.logits
        uids: list[int] = []

        def recording_launch(batch: ScheduledBatch) -> HostTokens:
            uids[:] = self.scheduler.table.uid[batch.slots[batch.samples]].tolist()
            return launch(batch)

        def recording_logits(hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            logits = logits_of(hidden, out)
            for uid, row in zip(uids, logits, strict=False):  # graphs compute padding too, and aren't seen here
                self.logits[uid].append(row.clone())
            return logits

        engine.launch = recording_launch  # type: ignore[method-assign]
        engine._model.logits = recording_logits  # type: ignore[method-assign]

    def add(self, prompts: list[list[int]], ending: Sequence[int] = (), **sampling: Any) -> list[int]:
        uids = list(range(self._num_requests, self._num_requests + len(prompts)))
        self._num_requests += len(prompts)
        added = []
        for uid, prompt in zip(uids, prompts, strict=True):
            self.outputs[uid], self.logits[uid] = [], []
            ids, scored = (np.array(tokens, dtype=np.int32).tobytes() for tokens in (prompt, ending))
            request = NewRequest(uid, ending=scored)
            added.append(NewPrompt(ids, EngineSampling(**({"max_tokens": 8} | sampling)), [request]))
            self.scores[uid] = LogprobCollector(added[-1], request)
        self._source.inbox.append(AddRequests(added))
        return uids

    def abort(self, uid: int) -> None:
        self._source.inbox.append(AbortRequests([uid]))

    def tick(self) -> None:
        next(self._loop)
        while self._source.outbox:
            step = self._source.outbox.popleft()
            if isinstance(step, RequestsRefused):
                self.refused.update({uid: (step.error_type, why) for uid, why in step.refused})
                continue
            assert isinstance(step, StepOutput)
            self.cached.update(dict(zip(step.first_uids, step.first_cached, strict=True)))
            if step.scores is not None:
                for uid, words in sampled_scores(step.scores):
                    self.scores[uid].add_output(words, step.scores.num_top)
                for uid, position, words in prompt_scores(step.scores):
                    self.scores[uid].add_prompt(position, words, step.scores.num_top)
            uids, tokens = np.frombuffer(step.uids, np.int64).tolist(), np.frombuffer(step.tokens, np.int32).tolist()
            for uid, token, how in zip(uids, tokens, step.finish, strict=True):
                if token >= 0:
                    self.outputs[uid].append(token)
                if how:
                    self.finished[uid] = FINISH_REASONS[how]

    @property
    def is_busy(self) -> bool:
        return len(self.finished) + len(self.refused) < self._num_requests

    def run(self, prompts: list[list[int]], **sampling: Any) -> list[list[int]]:
        """Greedy ids of all prompts."""
        uids = self.add(prompts, **sampling)
        while self.is_busy:
            self.tick()
        return [self.outputs[uid] for uid in uids]
