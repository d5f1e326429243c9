"""What each part of the engine is worth: workloads run with one part switched off, in turn with the whole.

    python -m tests.bench.ablations S --model qwen3-0.6b

One engine serves all variants; what differs is how it is scheduled. Prints a JSON line per run.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from minisgl_batch.bench import Bench
from minisgl_batch.config import EngineConfig
from minisgl_batch.engine.engine import Engine
from minisgl_batch.scheduler import prefill
from minisgl_batch.scheduler.factory import prefix_cache, scheduler_config
from minisgl_batch.scheduler.scheduler import Scheduler

VARIANTS = ["all", "no overlap", "no shared prefixes", "rows start one by one", "mixed steps", "no prefix cache"]


def vary(bench: Bench, engine: Engine, variant: str) -> None:
    """Let the bench's engine be scheduled another way."""
    config = scheduler_config(engine)
    changes = {
        "no overlap": {"overlap": False},
        "no shared prefixes": {"sharing": None},
        "mixed steps": {"mixed": True},
    }.get(variant, {})
    cache = prefix_cache("naive" if variant == "no prefix cache" else "radix", config.page_size)
    one_by_one = variant == "rows start one by one"
    prefill.MIN_STARTS, prefill.STARTS_SHARE = (1, 1 << 30) if one_by_one else (8, 16)
    bench.engine.use(Scheduler(replace(config, **changes), engine, cache, bench.engine.source))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload")
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--repeat", type=int, default=1)
    given = parser.parse_args()
    with Bench(EngineConfig(model=given.model, dummy_weights=True, max_running=256)) as bench:
        engine = bench.engine.scheduler._engine
        assert isinstance(engine, Engine)
        for _ in range(given.repeat):
            for variant in given.variants:
                vary(bench, engine, variant)
                print(json.dumps({"variant": variant} | json.loads(bench.run(given.workload).line())), flush=True)


if __name__ == "__main__":
    main()
