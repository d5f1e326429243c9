"""The batch-invariant mode: logits have the same bits whatever a row runs beside, and however it came to its tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_batch.batch import ScheduledBatch, SharingCosts
from minisgl_batch.config import EngineConfig
from minisgl_batch.engine.options import resolve
from minisgl_batch.errors import InvalidParameterError
from minisgl_batch.models.config import load_model_config
from tests.minisgl_batch.engine.served import Served
from tests.minisgl_batch.models.hf import random_model, save

# Alone, in pieces, without decode rows beside prefill. The first one is what the others are compared to.
WAYS: list[dict[str, Any]] = [
    {},
    {"max_running": 1},
    {"max_prefill_tokens": 7},
    {"mixed": False, "cache": "naive"},
]
GIVEN: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen2_moe": {},
    "gpt_oss": {
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma3": {
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


def random_prompts(num_prompts: int, longest: int, vocab_size: int) -> list[list[int]]:
    """Some with a stem in common."""

    def ids(n: int) -> list[int]:
        return [random.randrange(vocab_size) for _ in range(n)]

    stem = ids(longest // 2)
    return [random.choice([stem, []]) + ids(random.randint(1, longest // 2)) for _ in range(num_prompts)]


@pytest.mark.parametrize("family", GIVEN)
def test_logits_on_a_cpu(family: str, tmp_path: Path) -> None:
    reference = random_model(family, num_hidden_layers=3, max_position_embeddings=256, **GIVEN[family])
    folder = save(reference, tmp_path)
    prompts = random_prompts(5, 60, reference.config.vocab_size)
    logits: list[torch.Tensor] = []
    for options in WAYS:
        served = Served(folder, page_size=4, batch_invariant=True, **options)
        for _ in range(2 if options == WAYS[0] else 1):  # then from the cache
            first = served._num_requests
            served.run(prompts, max_tokens=12)
            got = torch.cat([torch.stack(served.logits[first + i]) for i in range(len(prompts))])
            logits.append(got)
            assert torch.equal(got, logits[0]), options


def test_logits_of_preempted_rows_on_a_cpu(tmp_path: Path) -> None:
    reference = random_model("qwen3", num_hidden_layers=2, max_position_embeddings=256)
    folder, prompts = (
        save(reference, tmp_path),
        [[random.randrange(reference.config.vocab_size) for _ in range(6)] for _ in range(5)],
    )
    plain, short = (
        Served(folder, page_size=4, max_running=4, max_seq_len=56, num_pages=num_pages, batch_invariant=True)
        for num_pages in (99, 14)
    )
    assert plain.run(prompts, max_tokens=30) == short.run(prompts, max_tokens=30)
    assert short.scheduler.stats().num_retractions > 0
    assert all(torch.equal(torch.stack(short.logits[i]), torch.stack(plain.logits[i])) for i in range(5))


def test_what_cannot_be_kept_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_model_config(save(random_model("qwen3"), tmp_path))
    asked: dict[str, Any] = {"model": "m", "batch_invariant": True}
    with pytest.raises(InvalidParameterError, match=r"oneDNN's products of float16.*: use `dtype` .*float32"):
        resolve(EngineConfig(device="cpu", dtype="float16", **asked), config)
    with pytest.raises(InvalidParameterError, match="batch_invariant: isn't there for FP8 weights yet"):
        resolve(EngineConfig(device="cpu", **asked), config.quantized(at_load=True))
    monkeypatch.setattr("minisgl_batch.engine.options.pick_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr("minisgl_batch.engine.options.can_fix_order", lambda *_: True)
    assert resolve(EngineConfig(**asked), config).attention_backend == "triton"
    with pytest.raises(InvalidParameterError, match="batch_invariant: runs on the attention backend 'triton', not on"):
        resolve(EngineConfig(attention_backend="fa,cuda", **asked), config)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["gemma3", "qwen2", "qwen2_moe", "qwen3"])
def test_ids_and_logprobs_on_a_gpu(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 1, 7, 64 and 256 rows, cold and from the cache, in pieces, preempted, mixed, without graphs."""
    monkeypatch.setattr(SharingCosts, "is_worth", lambda *given: given[2] > 0)  # the tokens saved
    num_shared = 0
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4} | ({} if family == "qwen2" else {"head_dim": 128})
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3, "vocab_size": 5000}
    given = GIVEN.get(family, {}) | ({"sliding_window": 100} if family == "gemma3" else {})
    reference = random_model(family, max_position_embeddings=2048, **sizes, **heads, **given)
    folder, prompts = save(reference.to(torch.bfloat16), tmp_path), random_prompts(256, 500, 5000)
    options: dict[str, Any] = {"dtype": "bfloat16", "num_pages": 6144, "device": "cuda", "batch_invariant": True}

    def run(num_rows: int, times: int = 1, **more: Any) -> list[tuple[list[int], list[float]]]:
        nonlocal num_shared
        served = Served(folder, **(options | {"max_running": 256} | more))
        launch = served.scheduler._engine.launch

        def counting_launch(batch: ScheduledBatch) -> Any:
            nonlocal num_shared
            num_shared += batch.shared is not None
            return launch(batch)

        served.scheduler._engine.launch = counting_launch  # type: ignore[method-assign]
        for _ in range(times):
            first = served._num_requests
            ids = served.run(prompts[:num_rows], max_tokens=60, num_logprobs=0)
        if "num_pages" in more:
            assert served.scheduler.stats().num_retractions > 0
        scores = [served.scores[first + i].output(row) for i, row in enumerate(ids)]
        assert all(score is not None for score in scores)
        return [(row, score.logprobs.tolist()) for row, score in zip(ids, scores, strict=True) if score is not None]

    want = run(256)
    assert num_shared > 0
    for num_rows, more in (
        (7, {}),
        (64, {}),
        (20, {"max_running": 1}),
        (256, {"times": 2}),
        (64, {"max_prefill_tokens": 100}),
        (64, {"num_pages": 100, "max_seq_len": 1024}),
        (64, {"mixed": True}),
        (256, {"share_prefixes": False}),
        (64, {"cache": "naive", "cuda_graph_max_bs": 0, "overlap": False}),
    ):
        assert run(num_rows, **more) == want[:num_rows], more
