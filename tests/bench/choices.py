"""How fast choices are scored, with prompts in the cache and otherwise; on a GPU, with dummy weights.

    python -m tests.bench choices --model qwen3-0.6b

1,000 prompts that begin with 400 ids in common (examples, say) and go on with 40 to 200 of their own, and 500 prompts
of 700 ids of their own; four choices each, half of them of one id, the others of 8 or 20. Lines of JSON: with the
prefix cache, without, and with all of prompt and choice scored, as it would have to be without `choices`.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Literal

import numpy as np

from minisgl_batch.bench import SHAPES, Bench
from minisgl_batch.config import CacheKind, EngineConfig
from minisgl_batch.engine_sampling import EngineSampling
from minisgl_batch.messages import AddRequests, NewPrompt, NewRequest, StepOutput

SCORED = EngineSampling(max_tokens=1, num_prompt_logprobs=0)
Row = tuple[list[int], list[list[int]]]
"""A prompt and its choices."""


def make_rows() -> list[Row]:
    rng = random.Random(0)

    def ids(num_ids: int) -> list[int]:
        return [rng.randrange(100_000) for _ in range(num_ids)]

    stem = ids(400)
    rows = [(stem + ids(rng.randint(40, 200)), [ids(rng.choice((1, 1, 8, 20))) for _ in range(4)]) for _ in range(1000)]
    return rows + [(ids(700), [ids(rng.choice((1, 1, 8, 20))) for _ in range(4)]) for _ in range(500)]


def requests(rows: list[Row], scored: Literal["choice", "all"]) -> list[NewPrompt]:
    """What the engine is asked for; uids go from 0 on."""
    prompts: list[NewPrompt] = []
    for number, (prompt, choices) in enumerate(rows):
        uids = range(4 * number, 4 * number + 4)
        if scored == "all":
            prompts += [
                NewPrompt(_bytes(prompt + choice), SCORED, [NewRequest(uid)])
                for uid, choice in zip(uids, choices, strict=True)
            ]
        else:
            endings = [NewRequest(uid, 0, _bytes(choice)) for uid, choice in zip(uids, choices, strict=True)]
            prompts.append(NewPrompt(_bytes(prompt), SCORED, endings))
    return prompts


def measure(model: str, cache: CacheKind, scored: Literal["choice", "all"]) -> None:
    rows = make_rows()
    with Bench(EngineConfig(model=model, dummy_weights=True, cache=cache, cuda_graph_max_bs=0)) as bench:
        run(bench, requests(rows[-2:], scored))  # kernels are compiled
        before, started = bench.stats(), time.perf_counter()
        run(bench, requests(rows[:-2], scored))
        seconds, after = time.perf_counter() - started, bench.stats()
    num_choices = 4 * (len(rows) - 2)
    tokens = after.prompt_tokens - before.prompt_tokens
    found = {
        "model": model,
        "cache": cache,
        "scored": scored,
        "choices": num_choices,
        "seconds": round(seconds, 3),
        "choices_per_s": round(num_choices / seconds),
        "tokens": tokens,
        "cached": round((after.cached_tokens - before.cached_tokens) / tokens, 3),
        "steps": after.num_steps - before.num_steps,
    }
    print(json.dumps(found), flush=True)


def run(bench: Bench, prompts: list[NewPrompt]) -> None:
    """Until all have ended."""
    bench.engine.source.inbox.append(AddRequests(prompts))
    left = sum(len(prompt.requests) for prompt in prompts)
    while left:
        for step in bench.engine.tick():
            assert isinstance(step, StepOutput)
            left -= len(step.finish) - step.finish.count(0)


def _bytes(token_ids: list[int]) -> bytes:
    return np.array(token_ids, dtype=np.int32).tobytes()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen3-0.6b")
    model = parser.parse_args().model
    measure(model, "radix", "choice")
    measure(model, "naive", "choice")
    measure(model, "radix", "all")
