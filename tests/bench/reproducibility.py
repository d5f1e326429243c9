"""Whether rows get the same ids and log-probabilities however they are run, with and without the batch-invariant mode.

    python -m tests.bench.reproducibility --model demo
    python -m tests.bench.reproducibility --model qwen3-0.6b

The same rows, greedy, by one engine for each mode: all at once from an empty cache, then one at a time, among others,
from the cache, in small pieces, and with too few pages for all. Prints a JSON line for each way and mode.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from minisgl_batch.bench import MAX_ID, SHAPES, _model_folder
from minisgl_batch.config import EngineConfig
from minisgl_batch.engine.engine import Engine
from minisgl_batch.engine_sampling import EngineSampling
from minisgl_batch.hub import model_path
from minisgl_batch.messages import AddRequests, NewPrompt, NewRequest, StepOutput
from minisgl_batch.models.config import load_model_config
from minisgl_batch.scheduler.factory import prefix_cache, scheduler_config
from minisgl_batch.scheduler.local import LocalEngine
from minisgl_batch.scheduler.scheduler import Scheduler
from minisgl_batch.tokenizer.logprobs import LogprobCollector, sampled_scores
from minisgl_batch.tokenizer.tokenizer import ModelTokenizer
from tests.bench.records import about

EXAMPLES = Path(__file__).parents[2] / "examples" / "prompts.jsonl"
NUM_OTHERS = 192

Prompts = list[list[int]]


@dataclass(frozen=True)
class Row:
    """What a row got: ids, and the log-probability of each."""

    ids: list[int]
    logprobs: list[float]


class Runs:
    """Runs of one engine.

    Args:
        num_tokens: what each row generates.
    """

    def __init__(self, config: EngineConfig, num_tokens: int) -> None:
        self._engine, self._num_tokens, self._next_uid = LocalEngine(config), num_tokens, 0
        runner = self._engine.scheduler._engine
        assert isinstance(runner, Engine)
        self._runner = runner
        self.description = self._engine.ready.description

    def schedule(self, cache: str = "naive", num_pages: int | None = None, piece_tokens: int | None = None) -> None:
        """How rows run from now on: an empty cache of a kind, so many pages, pieces of so many tokens."""
        config = scheduler_config(self._runner)
        config = replace(
            config,
            num_pages=num_pages or config.num_pages,
            max_prefill_tokens=piece_tokens or config.max_prefill_tokens,
        )
        kind = prefix_cache("radix" if cache == "radix" else "naive", config.page_size)
        self._engine.use(Scheduler(config, self._runner, kind, self._engine.source))

    def run(self, prompts: Prompts) -> list[Row]:
        """All of them at once."""
        sampling = EngineSampling(max_tokens=self._num_tokens, num_logprobs=0)
        asked, ids, scores = [], {}, {}
        for prompt in prompts:
            request = NewRequest(self._next_uid)
            self._next_uid += 1
            asked.append(NewPrompt(np.array(prompt, dtype=np.int32).tobytes(), sampling, [request]))
            ids[request.uid], scores[request.uid] = list[int](), LogprobCollector(asked[-1], request)
        self._engine.source.inbox.append(AddRequests(asked))
        left = len(asked)
        while left:
            for step in self._engine.tick():
                assert isinstance(step, StepOutput)
                assert step.scores is not None
                for uid, words in sampled_scores(step.scores):
                    scores[uid].add_output(words, step.scores.num_top)
                uids = np.frombuffer(step.uids, dtype=np.int64).tolist()
                for uid, token in zip(uids, np.frombuffer(step.tokens, dtype=np.int32).tolist(), strict=True):
                    ids[uid].append(token)
                left -= len(step.finish) - step.finish.count(0)
        rows = []
        for uid, tokens in ids.items():
            found = scores[uid].output(tokens)
            assert found is not None
            rows.append(Row(tokens, found.logprobs.tolist()))
        return rows

    @property
    def num_retractions(self) -> int:
        return self._engine.scheduler.stats().num_retractions

    def close(self) -> None:
        self._engine.close()


def compare(want: list[Row], got: list[Row]) -> dict[str, float | int | None]:
    """How much two runs of the same rows agree.

    Log-probabilities are compared up to and with a row's first other id, behind which the two have other prefixes.
    """
    firsts, largest, num_equal_bits = [], 0.0, 0
    for a, b in zip(want, got, strict=True):
        first = next((i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=True)) if x != y), None)
        differences = [abs(x - y) for x, y in zip(a.logprobs[:first], b.logprobs[:first], strict=True)]
        largest = max([largest, *differences])
        num_equal_bits += first is None and not any(differences)
        if first is not None:
            firsts.append(first)
    return {
        "rows": len(want),
        "rows_with_equal_ids": len(want) - len(firsts),
        "rows_with_equal_bits": num_equal_bits,
        "first_other_id_at": min(firsts, default=None),
        "median_first_other_id_at": sorted(firsts)[len(firsts) // 2] if firsts else None,
        "max_logprob_difference": largest,
    }


def measure(runs: Runs, prompts: Prompts, others: Prompts) -> dict[str, dict[str, float | int | None]]:
    """Each way of running the rows, compared to all of them at once."""
    num_rows, found = len(prompts), {}
    runs.schedule()
    want = runs.run(prompts)
    found["the same again"] = compare(want, runs.run(prompts))
    found["one at a time"] = compare(want, [runs.run([prompt])[0] for prompt in prompts])
    mixed = [*others[: len(others) // 2], *prompts, *others[len(others) // 2 :]]
    start = len(others) // 2
    found["among others"] = compare(want, runs.run(mixed)[start : start + num_rows])
    runs.schedule(piece_tokens=100)
    found["in pieces"] = compare(want, runs.run(prompts))
    runs.schedule(cache="radix")
    runs.run(prompts)
    found["from the cache"] = compare(want, runs.run(prompts))
    page_size = scheduler_config(runs._runner).page_size
    pages = [-(-(len(prompt) + runs._num_tokens) // page_size) for prompt in prompts]
    runs.schedule(num_pages=max(2 * max(pages), sum(pages) // 2))
    found["preempted"] = compare(want, runs.run(prompts)) | {"preemptions": runs.num_retractions}
    return found


def examples(num_rows: int) -> Prompts:
    """Chats for the demo model."""
    tokenizer = ModelTokenizer.load(model_path("demo")).hf_tokenizer
    rows = [json.loads(line) for line in EXAMPLES.read_text(encoding="utf-8").splitlines()][:num_rows]
    return [
        tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=True, return_dict=False)
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, or a shape with random weights")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="of each row's output")
    parser.add_argument("--memory-ratio", type=float, help="as the engine's")
    parser.add_argument("--modes", nargs="+", default=["normal", "invariant"], choices=["normal", "invariant"])
    given = parser.parse_args()
    is_shape = given.model in SHAPES
    for mode in given.modes:
        config = EngineConfig(
            model=given.model,
            dummy_weights=is_shape,
            max_running=256,
            memory_ratio=given.memory_ratio,
            batch_invariant=mode == "invariant",
        )
        with _model_folder(config, 1) as resolved:
            rng = random.Random(0)
            top = min(MAX_ID, load_model_config(model_path(resolved.model)).vocab_size - 1)
            lengths = (100, 1024) if is_shape else (8, 60)
            made = [[rng.randint(0, top) for _ in range(rng.randint(*lengths))] for _ in range(given.rows + NUM_OTHERS)]
            prompts = made[NUM_OTHERS:] if is_shape else examples(given.rows)
            runs = Runs(resolved, given.tokens)
        try:
            for way, result in measure(runs, prompts, made[:NUM_OTHERS]).items():
                line = {"model": given.model, "mode": mode, "way": way, **result, "options": runs.description}
                print(json.dumps(line | about("tests.bench.reproducibility")), flush=True)
        finally:
            runs.close()


if __name__ == "__main__":
    main()
