"""Puts an engine and a scheduler together: for the in-process `LLM` and for rank processes."""

from __future__ import annotations

from minisgl_batch.config import CacheKind, EngineConfig
from minisgl_batch.distributed.group import SINGLE, TPGroup
from minisgl_batch.engine.engine import Engine
from minisgl_batch.kvcache.base import PrefixCache
from minisgl_batch.kvcache.naive import NaiveCache
from minisgl_batch.kvcache.radix import RadixCache
from minisgl_batch.messages import Ready
from minisgl_batch.scheduler.checks import CheckedRunner
from minisgl_batch.scheduler.config import SchedulerConfig
from minisgl_batch.scheduler.constraints import Constraints
from minisgl_batch.scheduler.scheduler import Scheduler
from minisgl_batch.scheduler.source import MessageSource


def make_scheduler(
    config: EngineConfig, source: MessageSource, tp: TPGroup = SINGLE, constraints: Constraints | None = None
) -> Scheduler:
    """Load the model and return the scheduler that serves it; its first message is `Ready`.

    Args:
        config: the options, the same on all ranks.
        source: where messages come from, the same on all ranks.
        tp: the ranks, each of which calls this.
        constraints: rank 0's, if its source compiles grammars.

    Raises:
        ModelError, InvalidParameterError, RankLostError: as Engine does.
    """
    engine = Engine(config, tp)
    options = engine.options
    runner = CheckedRunner(engine, tp, config.check_ranks) if config.check_ranks else engine
    cache = prefix_cache(config.cache, options.page_size)
    scheduler = Scheduler(scheduler_config(engine), runner, cache, source, constraints)
    source.send(
        Ready(
            max_seq_len=engine.max_seq_len,
            max_running=options.max_running,
            num_pages=engine.num_pages,
            page_size=options.page_size,
            description=engine.describe(),
        )
    )
    return scheduler


def scheduler_config(engine: Engine) -> SchedulerConfig:
    """How an engine is scheduled for its own options and the memory that it found."""
    options = engine.options
    return SchedulerConfig(
        num_pages=engine.num_pages,
        page_size=options.page_size,
        max_running=options.max_running,
        max_seq_len=engine.max_seq_len,
        max_prefill_tokens=options.max_prefill_tokens,
        overlap=options.overlap,
        mixed=options.mixed,
        sharing=engine.sharing_costs,
        dtype=str(options.dtype).removeprefix("torch."),
    )


def prefix_cache(kind: CacheKind, page_size: int) -> PrefixCache:
    """The prefix cache of a kind."""
    return {"radix": RadixCache, "naive": NaiveCache}[kind](page_size)
