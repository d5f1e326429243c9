"""Schedulers of several ranks: each decides the same, and together they generate what one process does."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl_batch.distributed.group import SINGLE
from minisgl_batch.messages import AbortRequests
from tests.minisgl_batch.distributed.rank_pool import RankPool
from tests.minisgl_batch.engine.test_parity import expected, random_prompt
from tests.minisgl_batch.models.hf import random_model, save
from tests.minisgl_batch.scheduler import ranks
from tests.minisgl_batch.scheduler.ranks import Script, Seen, add

NUM_TOKENS = 6
HEADS = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 40}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"tie_word_embeddings": False, "vocab_size": 8191, "sliding_window": 12}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True, "vocab_size": 8191}),
}
Model = tuple[Any, Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """A random model of each architecture, with its folder."""
    made: dict[str, Model] = {}

    def model(name: str) -> Model:
        if name not in made:
            family, sizes = MODELS[name]
            reference = random_model(family, **(HEADS | sizes))
            made[name] = reference, save(reference, tmp_path_factory.mktemp(name))
        return made[name]

    return model


def run(rank_pool: Callable[[int], RankPool], size: int, *case: Any) -> Seen:
    """What a group of `size` made; checks that all its ranks did the same."""
    if size == 1:
        return ranks.serve(SINGLE, *case)
    seen: list[Seen] = rank_pool(size).run(ranks.serve, *case)
    for other in seen[1:]:
        assert other.steps == seen[0].steps
        assert other.tokens == seen[0].tokens
        assert other.scores == seen[0].scores
    return seen[0]


def ragged_prompts(reference: Any) -> list[list[int]]:
    """Ragged ones, some with a stem in common, some the same."""
    stem = random_prompt(reference, random.randint(5, 13))
    prompts = [random_prompt(reference, random.randint(1, 30)) for _ in range(3)]
    prompts += [stem + random_prompt(reference, random.randint(0, 9)) for _ in range(2)]
    return [*prompts, stem, prompts[0]]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_ids_are_those_of_transformers(
    name: str, size: int, models: Callable[[str], Model], rank_pool: Callable[[int], RankPool]
) -> None:
    reference, folder = models(name)
    prompts = ragged_prompts(reference)
    script = {0: [add(0, prompts, max_tokens=NUM_TOKENS)]}
    options = {"overlap": random.random() < 0.5, "mixed": random.random() < 0.5, "max_running": 4}
    seen = run(rank_pool, size, folder, script, options)
    assert [seen.tokens[uid] for uid in range(len(prompts))] == [
        expected(reference, prompt, NUM_TOKENS)[0] for prompt in prompts
    ]


@pytest.mark.parametrize(("size", "overlap"), [(4, False), (2, True)], ids=["normal_loop", "overlap_loop"])
def test_ranks_decide_the_same_whatever_comes(
    size: int, overlap: bool, models: Callable[[str], Model], rank_pool: Callable[[int], RankPool]
) -> None:
    """Requests that come and go at any time, in a pool so small that rows are retracted."""
    reference, folder = models("qwen3")
    script: Script = {0: [add(12, [random_prompt(reference, 5) for _ in range(5)], max_tokens=30)]}  # far too many
    for uid in range(0, 12, 3):
        prompts = [random_prompt(reference, random.randint(1, 20)) for _ in range(3)]
        tick = random.randrange(12)
        filters = random.choice([{}, {"top_k": 3}, {"top_p": 0.9}, {"repetition_penalty": 1.5}])
        sampling = {"max_tokens": random.randint(8, 20), "temperature": random.choice([0.0, 1.0]), "seed": uid}
        script.setdefault(tick, []).append(add(uid, prompts, **sampling, **filters))
        script.setdefault(tick + random.randrange(10), []).append(AbortRequests([uid + 1]))
    options = {"num_pages": 14, "max_running": 5, "max_seq_len": 56, "max_prefill_tokens": 9, "overlap": overlap}
    options["check_ranks"] = 3
    assert run(rank_pool, size, folder, script, options).num_retractions > 0


def test_fp8_kv_cache_gives_what_it_gives_one_process(
    models: Callable[[str], Model], rank_pool: Callable[[int], RankPool]
) -> None:
    """But for a row at most: sums in another order may round a key or value to its neighbour."""
    reference, folder = models("llama")
    prompts = [random_prompt(reference, random.randint(1, 20)) for _ in range(8)]
    script = {0: [add(0, prompts, max_tokens=16)]}
    options = {"num_pages": 14, "max_running": 5, "max_seq_len": 56, "check_ranks": 3, "kv_cache_dtype": "fp8"}
    single, pair = (run(rank_pool, size, folder, script, options) for size in (1, 2))
    assert pair.num_retractions > 0
    assert sum(single.tokens[uid] == pair.tokens[uid] for uid in range(8)) >= 7


def test_samples_are_those_of_one_process(models: Callable[[str], Model], rank_pool: Callable[[int], RankPool]) -> None:
    reference, folder = models("mistral")
    bias = tuple((token, random.choice([-9.0, 9.0])) for token in range(0, 8191, 97))
    kinds: list[dict[str, Any]] = [
        {},
        {"top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"presence_penalty": 2.0, "frequency_penalty": 1.0, "logit_bias": bias},
        {"repetition_penalty": 5.0, "logit_bias": bias, "top_p": 0.8},
    ]
    common = {"temperature": 1.0, "max_tokens": 6}
    script = {
        tick: [add(4 * tick, [random_prompt(reference, 9) for _ in range(4)], seed=tick, **common, **kind)]
        for tick, kind in enumerate(kinds)
    }
    single, pair, four = (run(rank_pool, size, folder, script, {"max_seq_len": 20}).tokens for size in (1, 2, 4))
    assert single == pair == four
    assert len({tuple(tokens) for tokens in single.values()}) > 8  # rows of one seed may draw alike


def test_scores_are_those_of_one_process(models: Callable[[str], Model], rank_pool: Callable[[int], RankPool]) -> None:
    reference, folder = models("qwen3")
    prompts = [random_prompt(reference, 11) for _ in range(3)]
    script = {0: [add(0, prompts, max_tokens=4, num_logprobs=3, num_prompt_logprobs=2)]}
    options = {"max_prefill_tokens": 8, "overlap": True}
    single, pair = (run(rank_pool, size, folder, script, options).scores for size in (1, 2))
    assert len(single) == len(pair) > 4
    for one, two in zip(single, pair, strict=True):
        assert (one.num_top, one.uids, len(one.prompts)) == (two.num_top, two.uids, len(two.prompts))
        words = [
            np.frombuffer(b"".join([x.sampled, *(part[2] for part in x.prompts)]), np.int32).reshape(
                -1, 2 + 2 * x.num_top
            )
            for x in (one, two)
        ]
        best = [x[:, 2 : 2 + one.num_top] for x in words]
        assert (best[0] == best[1]).mean() > 0.9  # tokens that all but tie may swap places
        floats = [x[:, [0, *range(2 + one.num_top, x.shape[1])]].copy().view(np.float32) for x in words]
        np.testing.assert_allclose(*floats, atol=1e-4)


def test_ranks_that_decide_differently_say_so(
    models: Callable[[str], Model], rank_pool: Callable[[int], RankPool]
) -> None:
    reference, folder = models("llama")
    prompt = random_prompt(reference, 9)
    scripts = [{0: [add(0, [prompt, prompt[:7]], max_tokens=3)]}, {0: [add(0, [prompt[:7], prompt], max_tokens=3)]}]
    with pytest.raises(RuntimeError) as caught:
        rank_pool(2).run(ranks.serve_own_script, folder, scripts, {"check_ranks": 1})
    assert str(caught.value).count("the ranks decided differently") == 2
