"""Throughput of the engine alone, on token ids, without tokenizer or queue: standard workloads and model shapes.

    U   256 prompts of 100 to 1,024 random ids, as many tokens each out
    S   1,024 prompts with 512 ids in common and 32 to 256 of their own, 32 to 512 tokens out
    P   the same with 2,048 ids in common

Random numbers come from Python's `random` with fixed seeds, so that other engines can be given the same. Temperature
0.6, end-of-sequence tokens ignored. Called by `minisgl-batch bench`.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl_batch.config import EngineConfig
from minisgl_batch.engine_sampling import EngineSampling
from minisgl_batch.errors import InvalidParameterError
from minisgl_batch.hub import model_path
from minisgl_batch.messages import AddRequests, DropCache, EngineStats, NewPrompt, NewRequest, StepOutput
from minisgl_batch.models.config import load_model_config
from minisgl_batch.scheduler.local import LocalEngine

TEMPERATURE = 0.6
MAX_ID = 10_000

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "qwen3-14b": _QWEN3
    | {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
        "tie_word_embeddings": False,
    },
    "qwen3-32b": _QWEN3
    | {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_hidden_layers": 64,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": _QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 201088,
    },
}
"""Shapes to measure with dummy weights, as config.json has them."""
_SHRINKABLE = (
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "vocab_size",
)

Prompts = list[tuple[list[int], int]]


def workload(name: str, shrink: int = 1) -> Prompts:
    """(token ids, tokens to generate) of each prompt.

    Args:
        shrink: divides the number of prompts and all lengths.

    Raises:
        InvalidParameterError: there is no such workload.
    """

    def ids(num: int) -> list[int]:
        return [rng.randint(0, MAX_ID) for _ in range(num)]

    def between(low: int, high: int) -> int:
        return rng.randint(max(1, low // shrink), max(1, high // shrink))

    if name == "U":
        rng = random.Random(0)
        prompts = [ids(between(100, 1024)) for _ in range(max(1, 256 // shrink))]
        return [(prompt, between(100, 1024)) for prompt in prompts]
    shared = {"S": (1, 512), "P": (2, 2048)}.get(name)
    if shared is None:
        raise InvalidParameterError("workload", f"{name!r} is unknown; known ones are U, S, P")
    seed, length = shared
    rng = random.Random(seed)
    prefix = ids(max(1, length // shrink))
    prompts = [prefix + ids(between(32, 256)) for _ in range(max(1, 1024 // shrink))]
    return [(prompt, between(32, 512)) for prompt in prompts]


@dataclass(frozen=True)
class BenchResult:
    """One run: a line of JSON."""

    engine: str
    workload: str
    model: str
    tp: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    seconds: float
    output_tok_s: float
    num_steps: int
    num_retractions: int
    startup_s: float
    peak_memory_mb: int
    gpu: str

    def line(self, **more: Any) -> str:
        return json.dumps(asdict(self) | more)


class Bench:
    """An engine that is ready to be measured. Use as a context manager; leaving frees it and ends its processes.

    Args:
        config: `model` may be one of SHAPES, with dummy weights.
        shrink: divides workloads, and a shape's widths and layers: for a look at what runs, not at how fast.
    """

    def __init__(self, config: EngineConfig, shrink: int = 1) -> None:
        started = time.perf_counter()
        self._model, self._tp, self._shrink = config.model, config.tp, shrink
        with _model_folder(config, shrink) as resolved:
            self._vocab_size = load_model_config(model_path(resolved.model, resolved.revision)).vocab_size
            self.engine = LocalEngine(resolved)
        self._next_uid = 0
        # Once through the kinds of steps that follow: large pieces, many rows.
        self._generate([(prompt, 4) for prompt, _ in workload("U", shrink)])
        self._startup_s = time.perf_counter() - started
        self.description = self.engine.ready.description

    def run(self, name: str) -> BenchResult:
        """Generate a whole workload, from an empty prefix cache."""
        prompts = workload(name, self._shrink)
        self.engine.source.inbox.append(DropCache())
        before = self.stats()
        seconds, num_tokens = self._generate(prompts)
        stats = self.stats()
        assert num_tokens == sum(num for _, num in prompts)
        return BenchResult(
            engine="minisgl-batch",
            workload=name if self._shrink == 1 else f"{name}/{self._shrink}",
            model=self._model if self._shrink == 1 else f"{self._model}/{self._shrink}",
            tp=self._tp,
            prompt_tokens=sum(len(prompt) for prompt, _ in prompts),
            cached_tokens=stats.cached_tokens - before.cached_tokens,
            output_tokens=num_tokens,
            seconds=round(seconds, 3),
            output_tok_s=round(num_tokens / seconds, 1),
            num_steps=stats.num_steps - before.num_steps,
            num_retractions=stats.num_retractions - before.num_retractions,
            startup_s=round(self._startup_s, 1),
            peak_memory_mb=_peak_memory_mb(),
            gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        )

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def tick(self) -> None:
        """One tick of the scheduler's loop, whose output nobody wants."""
        self.engine.tick()

    def stats(self) -> EngineStats:
        return self.engine.scheduler.stats()

    def _generate(self, prompts: Prompts) -> tuple[float, int]:
        """Seconds for the whole call, and how many tokens came."""
        started = time.perf_counter()
        added = []
        for prompt, num_tokens in prompts:
            sampling = EngineSampling(max_tokens=num_tokens, temperature=TEMPERATURE, seed=self._next_uid)
            # Small vocabularies don't have all ids; the lengths and what is in common stay as they are.
            ids = np.array(prompt, dtype=np.int32) % self._vocab_size
            added.append(NewPrompt(ids.tobytes(), sampling, [NewRequest(self._next_uid)]))
            self._next_uid += 1
        self.engine.source.inbox.append(AddRequests(added))
        outputs: dict[int, list[int]] = {new.requests[0].uid: [] for new in added}
        left = len(added)
        while left:
            for step in self.engine.tick():
                assert isinstance(step, StepOutput)
                uids = np.frombuffer(step.uids, dtype=np.int64).tolist()
                for uid, token in zip(uids, np.frombuffer(step.tokens, dtype=np.int32).tolist(), strict=True):
                    outputs[uid].append(token)
                left -= len(step.finish) - step.finish.count(0)
        return time.perf_counter() - started, sum(len(tokens) for tokens in outputs.values())


@contextmanager
def _model_folder(config: EngineConfig, shrink: int) -> Iterator[EngineConfig]:
    """The config with a shape's name replaced by a folder that holds its config.json."""
    shape = SHAPES.get(config.model)
    if shape is None:
        yield config
        return
    if not config.dummy_weights:
        raise InvalidParameterError("model", f"{config.model} is a shape without weights: add `dummy_weights`")
    with tempfile.TemporaryDirectory(prefix="minisgl-bench-") as folder:
        shape = shape | {key: max(1, shape[key] // shrink) for key in _SHRINKABLE if key in shape}
        (Path(folder) / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        yield replace(config, model=folder)


def _peak_memory_mb() -> int:
    return torch.cuda.max_memory_allocated() >> 20 if torch.cuda.is_available() else 0
