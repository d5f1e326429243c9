"""The whole engine against transformers: greedy ids are equal and logits agree, whatever the batch and the cache do."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.minisgl_batch.engine.served import Served
from tests.minisgl_batch.models.hf import hf_logits, random_model, save

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]
WINDOWED: dict[str, dict[str, Any]] = {
    "gemma3": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gpt_oss": {},
    "ministral": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "phi3": {},
}
NUM_TOKENS = 8
Model = tuple[Any, Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """A random model of each family, with its folder."""
    made: dict[str, Model] = {}

    def model(family: str) -> Model:
        if family not in made:
            reference = random_model(family, max_position_embeddings=256)
            made[family] = reference, save(reference, tmp_path_factory.mktemp(family))
        return made[family]

    return model


@torch.inference_mode()
def expected(reference: Any, prompt: list[int], num_tokens: int = NUM_TOKENS) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy ids of transformers' `generate` and the logits they were picked from."""
    out = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),  # else a 0 in the prompt counts as padding
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), [logits[0] for logits in out.logits]


def check(served: Served, reference: Any, prompts: list[list[int]], *, num_runs: int = 1) -> None:
    """Every token of each run is what transformers picks behind those before it, by the same logits."""
    uid = served._num_requests
    runs = [served.run(prompts, max_tokens=NUM_TOKENS) for _ in range(num_runs)]
    wanted = [hf_logits(reference, [[*prompt, *output]])[0] for prompt, output in zip(prompts, runs[0], strict=True)]
    for outputs in runs:
        for prompt, output, logits in zip(prompts, outputs, wanted, strict=True):
            want = logits[len(prompt) - 1 : -1]
            assert len(output) == NUM_TOKENS
            assert output == want.argmax(-1).tolist(), f"a prompt of {len(prompt)} tokens"
            torch.testing.assert_close(torch.stack(served.logits[uid]), want, atol=1e-4, rtol=1e-4)
            assert served.finished[uid] == "length"
            uid += 1


def random_prompt(reference: Any, length: int) -> list[int]:
    return [random.randrange(reference.config.vocab_size) for _ in range(length)]


def ragged_prompts(reference: Any, page_size: int) -> list[list[int]]:
    """Ragged ones, some with a stem in common, some the same, some whole pages long."""
    stem = random_prompt(reference, random.randint(page_size, 3 * page_size + 2))
    prompts = [random_prompt(reference, random.randint(1, 40)) for _ in range(3)]
    prompts += [stem + random_prompt(reference, random.randint(0, 9)) for _ in range(3)]
    prompts += [random_prompt(reference, 2 * page_size + offset) for offset in (-1, 0, 1) if page_size * 2 + offset]
    prompts += [prompts[0], stem, stem]
    random.shuffle(prompts)
    return prompts


@pytest.mark.parametrize("overlap", [False, True], ids=["normal_loop", "overlap_loop"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_batch_cold_and_warm(models: Callable[[str], Model], family: str, page_size: int, overlap: bool) -> None:
    reference, folder = models(family)
    budget = random.choice([1, 3, 7, 16, 64])
    served = Served(folder, page_size=page_size, max_prefill_tokens=budget, max_running=5, overlap=overlap)
    prompts = ragged_prompts(reference, page_size)
    check(served, reference, prompts, num_runs=2)
    assert all(
        served.cached[len(prompts) + i] == (len(prompt) - 1) // page_size * page_size
        for i, prompt in enumerate(prompts)
    )


@pytest.mark.parametrize("family", WINDOWED)
def test_windows_shorter_than_prompts(family: str, tmp_path: Path) -> None:
    reference = random_model(
        family, num_hidden_layers=3, sliding_window=9, max_position_embeddings=256, **WINDOWED[family]
    )
    served = Served(save(reference, tmp_path), page_size=4, max_prefill_tokens=16, max_running=5)
    prompts = ragged_prompts(reference, 4)
    check(served, reference, prompts, num_runs=2)


@pytest.mark.parametrize("cache", ["radix", "naive"])
def test_hundred_identical_prompts_at_once(models: Callable[[str], Model], cache: str) -> None:
    reference, folder = models("qwen3")
    prompt = random_prompt(reference, 37)
    served = Served(folder, cache=cache, page_size=4, num_pages=2048, max_running=100, max_prefill_tokens=64)
    outputs = served.run([prompt] * 100, max_tokens=NUM_TOKENS)
    assert outputs == [expected(reference, prompt)[0]] * 100
    assert sum(served.cached.values()) == (99 * 36 if cache == "radix" else 0)


def test_identical_long_prompts_in_one_prefill_with_fillers_that_reuse_pages(models: Callable[[str], Model]) -> None:
    reference, folder = models("llama")
    prompt = random_prompt(reference, 61)
    served = Served(folder, page_size=4, num_pages=40, max_running=3, max_prefill_tokens=128, max_seq_len=80)
    fillers = [random_prompt(reference, random.randint(20, 60)) for _ in range(6)]
    check(served, reference, [prompt, prompt, *fillers, prompt])


def test_retracted_rows_go_on_where_they_were(models: Callable[[str], Model]) -> None:
    reference, folder = models("qwen2")
    served = Served(folder, page_size=4, num_pages=14, max_running=4, max_seq_len=56)
    prompts = [random_prompt(reference, 6) for _ in range(5)]
    outputs = served.run(prompts, max_tokens=30)
    assert served.scheduler.stats().num_retractions > 0
    assert outputs == [expected(reference, prompt, 30)[0] for prompt in prompts]


@pytest.mark.parametrize("overlap", [False, True], ids=["normal_loop", "overlap_loop"])
def test_abort_at_every_step_leaves_the_others_alone(models: Callable[[str], Model], overlap: bool) -> None:
    reference, folder = models("qwen3")
    stem = random_prompt(reference, 14)
    prompts = [stem + random_prompt(reference, 5) for _ in range(3)]
    wanted = [expected(reference, prompt)[0] for prompt in prompts]
    for step in range(14):
        served = Served(folder, page_size=4, max_prefill_tokens=9, overlap=overlap)
        kept_a, dropped, kept_b = served.add(prompts, max_tokens=NUM_TOKENS)
        for _ in range(step):
            if served.is_busy:
                served.tick()
        served.abort(dropped)
        while served.is_busy:
            served.tick()
        assert [served.outputs[uid] for uid in (kept_a, kept_b)] == wanted[::2]
        assert served.outputs[dropped] == wanted[1][: len(served.outputs[dropped])]


def test_sampled_rows_do_not_depend_on_their_batch(models: Callable[[str], Model]) -> None:
    reference, folder = models("qwen3")
    prompts = [random_prompt(reference, random.randint(2, 30)) for _ in range(6)]
    sampling = {"temperature": 1.0, "top_p": 0.95, "seed": 11, "max_tokens": 12}
    together = Served(folder).run(prompts, **sampling)
    alone = [Served(folder, overlap=True, page_size=1).run([prompt], **sampling)[0] for prompt in prompts]
    assert together == alone
    assert together != Served(folder).run(prompts, **(sampling | {"seed": 12}))


@pytest.mark.parametrize("num_stops", [1, 3, 9])
def test_each_of_several_stop_ids_ends_a_row(models: Callable[[str], Model], num_stops: int) -> None:
    reference, folder = models("llama")
    prompt = random_prompt(reference, 10)
    ids = expected(reference, prompt)[0]
    absent = [i for i in range(reference.config.vocab_size) if i not in ids][: num_stops - 1]
    served = Served(folder)
    for stop in dict.fromkeys(ids):
        (output,) = served.run([prompt], max_tokens=NUM_TOKENS, stop_ids=(*absent, stop))
        assert output == ids[: ids.index(stop) + 1]
        assert served.finished[served._num_requests - 1] == "stop"


def test_padding_and_odd_budgets_change_no_logits(models: Callable[[str], Model]) -> None:
    """A prompt computed in pieces of any size gives the logits of one computed whole."""
    reference, folder = models("mistral")
    prompt = random_prompt(reference, 33)
    want = torch.stack(expected(reference, prompt)[1])
    for budget in (1, 2, 5, 32, 33, 34):
        served = Served(folder, max_prefill_tokens=budget, cache="naive")
        served.run([prompt], max_tokens=NUM_TOKENS)
        torch.testing.assert_close(torch.stack(served.logits[0]), want, atol=1e-4, rtol=1e-4)
