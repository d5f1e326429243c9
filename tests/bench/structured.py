"""What steps with rows under a JSON schema cost, beside steps without; shapes with dummy weights, on a GPU.

    python -m tests.bench structured --model qwen3-0.6b --rows 256 --constrained 0 1 64 256

A line of JSON for each schema and number of constrained rows: a step's time, and what the host does in it. Inside a
string without bounds a mask is mostly the one before. With `maxLength` each is another one, and where fewer characters
are left than a token may have, it takes a millisecond: random weights come there in most strings, a model in few. The
vocabulary is made of the words of installed programs, since no model's tokenizer is at hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from minisgl_batch.bench import SHAPES, Bench
from minisgl_batch.config import EngineConfig
from minisgl_batch.engine_sampling import EngineSampling
from minisgl_batch.messages import AbortRequests, AddRequests, Constraint, NewPrompt, NewRequest, SetVocabulary
from minisgl_batch.structured_outputs import StructuredOutputsParams
from minisgl_batch.tokenizer.grammar import make_grammar
from tests.bench.decode_step import step_ms

EOS = 0
WORD = re.compile(r" ?[A-Za-z]{1,15}|[^\w\s]{1,4}|\s{1,15}|\d{1,3}")


def make_schema(name: dict[str, int], tag: dict[str, int]) -> dict[str, Any]:
    """Of texts that don't end while they are measured; given the bounds of two strings."""
    item = {
        "type": "object",
        "properties": {
            "name": {"type": "string"} | name,
            "kind": {"enum": ["person", "place", "thing"]},
            "count": {"type": "integer", "minimum": 0},
            "tags": {"type": "array", "items": {"type": "string"} | tag, "maxItems": 5},
        },
        "required": ["name", "kind", "count", "tags"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": item, "minItems": 1000}


SCHEMAS = {"unbounded": make_schema({}, {}), "bounded": make_schema({"maxLength": 200}, {"maxLength": 40})}


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level vocabulary of the most frequent words and pieces of words of installed programs."""
    counts: Counter[str] = Counter()
    for path in chain.from_iterable(sorted(Path(folder).glob("*/**/*.py")) for folder in sys.path if folder):
        counts.update(WORD.findall(path.read_text("utf-8", "ignore")))
        if len(counts) > vocab_size:
            break
    for word in list(counts):
        counts.update({word[:3], word[:5]})
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    words = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    for word, _ in counts.most_common():
        if len(words) == vocab_size:
            break
        words.append(encode(word)[0][0])
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(dict.fromkeys(words))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class Watch:
    """Adds up the time of calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, *args: Any) -> Any:
        started = time.perf_counter()
        result = self._function(*args)
        self.seconds += time.perf_counter() - started
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b", choices=list(SHAPES))
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--constrained", type=int, nargs="+", default=[0, 1, 64, 256])
    parser.add_argument("--schemas", nargs="+", default=list(SCHEMAS), choices=list(SCHEMAS))
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--shrink", type=int, default=1, help="divide the shape's sizes, for a look on a CPU")
    given = parser.parse_args()
    config = EngineConfig(
        model=given.model, dummy_weights=True, max_running=given.rows, overlap=False if given.no_overlap else None
    )
    with Bench(config, given.shrink) as bench:
        inbox, vocab_size = bench.engine.source.inbox, bench._vocab_size
        started = time.perf_counter()
        tokenizer = make_tokenizer(vocab_size - 300)
        print(json.dumps({"tokens": tokenizer.get_vocab_size(), "made_s": round(time.perf_counter() - started, 2)}))
        inbox.append(SetVocabulary(tokenizer.to_str(), vocab_size, (EOS,)))
        constraints = bench.engine.scheduler._constraints
        constraints.fill = fill = Watch(constraints.fill)  # type: ignore[method-assign]
        constraints.advance = advance = Watch(constraints.advance)  # type: ignore[method-assign]
        uid = 1 << 20
        for schema, num_constrained in product(given.schemas, given.constrained):
            grammar = make_grammar(StructuredOutputsParams(json=SCHEMAS[schema]))
            uids = list(range(uid, uid + given.rows))
            uid += given.rows
            prompts = [
                NewPrompt(
                    np.random.randint(1, min(10_000, vocab_size), given.context, dtype=np.int32).tobytes(),
                    EngineSampling(
                        max_tokens=1000, temperature=0.6, seed=number, stop_ids=(EOS,) if i < num_constrained else ()
                    ),
                    [NewRequest(number)],
                    Constraint(grammar) if i < num_constrained else None,
                )
                for i, number in enumerate(uids)
            ]
            started = time.perf_counter()
            inbox.append(AddRequests(prompts))
            while bench.stats().num_running < given.rows or bench.stats().num_waiting:
                bench.tick()
            for _ in range(10):
                bench.tick()
            began_s = time.perf_counter() - started
            fill.seconds = advance.seconds = 0.0
            took = step_ms(bench, given.steps)
            line = {
                "model": given.model,
                "rows": given.rows,
                "schema": schema,
                "constrained": num_constrained,
                "overlap": not given.no_overlap,
                "step_ms": round(took, 3),
                "fill_ms": round(fill.seconds / given.steps * 1000, 3),
                "advance_ms": round(advance.seconds / given.steps * 1000, 3),
                "num_running": bench.stats().num_running,
                "began_s": round(began_s, 2),
            }
            print(json.dumps(line), flush=True)
            inbox.append(AbortRequests(uids))
            while bench.stats().num_running:
                bench.tick()


if __name__ == "__main__":
    main()
