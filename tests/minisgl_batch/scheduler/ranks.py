"""What the ranks of a group run in the tests of schedulers; imports no transformers, as ranks don't."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from minisgl_batch.batch import ScheduledBatch
from minisgl_batch.config import EngineConfig
from minisgl_batch.distributed.group import TPGroup
from minisgl_batch.engine_sampling import EngineSampling
from minisgl_batch.messages import (
    AbortRequests,
    AddRequests,
    FromEngine,
    NewPrompt,
    NewRequest,
    Scores,
    StepOutput,
    ToEngine,
)
from minisgl_batch.scheduler.factory import make_scheduler
from minisgl_batch.scheduler.source import LocalSource
from minisgl_batch.scheduler.steps import LaunchedStep

Script = dict[int, list[ToEngine]]
"""What comes at which tick."""


@dataclass
class Seen:
    """What a rank decided and made.

    Attributes:
        steps: of each step, its rows: (slot, tokens computed, tokens in the pool, whether it samples).
        tokens: by request.
        num_retractions: rows that gave way.
        scores: of each step that scores tokens, as its message has them.
    """

    steps: list[list[tuple[int, int, int, bool]]] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    num_retractions: int = 0
    scores: list[Scores] = field(default_factory=list)


def serve(tp: TPGroup, folder: Path, script: Script, options: dict[str, Any]) -> Seen:
    """Run a script until everything asked for has ended."""
    source, seen = LocalSource(), Seen()
    scheduler = make_scheduler(config_of(folder, options), source, tp)
    _record(scheduler._engine, seen)
    messages = [message for batch in script.values() for message in batch]
    prompts = [prompt for message in messages if isinstance(message, AddRequests) for prompt in message.prompts]
    uids = {new.uid for prompt in prompts for new in prompt.requests}
    source.outbox.clear()
    loop = scheduler.loop()
    tick = 0
    while tick <= max(script) or uids:
        source.inbox.extend(script.get(tick, ()))
        if not source.inbox and not scheduler._reqs:
            source.inbox.append(AbortRequests([]))  # the engine would wait for the next tick's messages
        next(loop)
        uids -= _collect(source.outbox, seen)
        source.outbox.clear()
        tick += 1
    seen.num_retractions = scheduler.stats().num_retractions
    return seen


def serve_own_script(tp: TPGroup, folder: Path, scripts: list[Script], options: dict[str, Any]) -> Seen:
    """Like `serve`, but each rank gets other messages."""
    return serve(tp, folder, scripts[tp.rank], options)


def config_of(folder: Path, options: dict[str, Any]) -> EngineConfig:
    return EngineConfig(model=str(folder), **({"num_pages": 512, "page_size": 4, "dtype": "float32"} | options))


def add(first_uid: int, prompts: list[list[int]], **sampling: Any) -> AddRequests:
    """Requests numbered from `first_uid`."""
    return AddRequests(
        [
            NewPrompt(np.array(prompt, np.int32).tobytes(), EngineSampling(**sampling), [NewRequest(uid)])
            for uid, prompt in enumerate(prompts, first_uid)
        ]
    )


def _record(engine: Any, seen: Seen) -> None:
    launch = engine.launch

    def recording(batch: ScheduledBatch) -> LaunchedStep:
        columns = (batch.slots, batch.q_lens, batch.kv_lens, batch.samples)
        seen.steps.append(list(zip(*(column.tolist() for column in columns), strict=True)))
        step: LaunchedStep = launch(batch)
        return step

    engine.launch = recording


def _collect(messages: Any, seen: Seen) -> set[int]:
    """Note the tokens; returns what ended."""
    ended = set()
    message: FromEngine
    for message in messages:
        assert isinstance(message, StepOutput)
        if message.scores is not None:
            seen.scores.append(message.scores)
        uids, tokens = np.frombuffer(message.uids, np.int64).tolist(), np.frombuffer(message.tokens, np.int32).tolist()
        for uid, token, how in zip(uids, tokens, message.finish, strict=True):
            seen.tokens.setdefault(uid, [])
            if token >= 0:
                seen.tokens[uid].append(token)
            if how:
                ended.add(uid)
    return ended
