"""The fp8 KV cache in the whole engine on a CPU: how near it is to an exact cache, and that nothing else changes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl_batch import LLM
from minisgl_batch.engine import memory
from minisgl_batch.errors import ModelError
from tests.minisgl_batch.engine.served import Served
from tests.minisgl_batch.engine.test_parity import random_prompt
from tests.minisgl_batch.models.hf import random_model, save

EXAMPLES = Path(__file__).parents[3] / "examples" / "prompts.jsonl"
NUM_TOKENS = 8


Model = tuple[Any, Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    reference = random_model("qwen3", max_position_embeddings=256)
    return reference, save(reference, tmp_path_factory.mktemp("model"))


def prompts_with_a_stem(reference: Any) -> list[list[int]]:
    stem = random_prompt(reference, 21)
    prompts = [stem + random_prompt(reference, random.randint(0, 9)) for _ in range(4)]
    return prompts + [random_prompt(reference, random.randint(1, 40)) for _ in range(3)]


def test_logits_are_near_those_of_an_exact_cache(model: Model) -> None:
    """An e4m3 number is within 6 % of what it stands for; errors of many keys and values cancel out in part."""
    reference, folder = model
    prompts = prompts_with_a_stem(reference)
    exact, fp8 = Served(folder), Served(folder, kv_cache_dtype="fp8")
    exact.run(prompts, max_tokens=1)
    fp8.run(prompts, max_tokens=1)
    for uid in range(len(prompts)):
        (want,), (got,) = exact.logits[uid], fp8.logits[uid]
        assert 0 < (got - want).norm() < 0.15 * want.norm()


def test_cold_and_cached_prompts_and_pieces_give_the_same_logits(model: Model) -> None:
    """A step's tokens, too, read each other's keys and values from the cache: when they came makes no difference."""
    reference, folder = model
    prompts = prompts_with_a_stem(reference)
    ways = {"kv_cache_dtype": "fp8", "page_size": 4}
    cold = Served(folder, cache="naive", **ways)
    want = cold.run(prompts, max_tokens=NUM_TOKENS)
    for options in ({}, {"max_prefill_tokens": 7}, {"num_pages": 24, "max_seq_len": 64, "max_running": 3}):
        served = Served(folder, **(ways | options))
        for _ in range(2):  # the second time from the prefix cache
            assert served.run(prompts, max_tokens=NUM_TOKENS) == want
        assert sum(served.cached.values()) > 0
        for uid in range(2 * len(prompts)):
            got, expected = torch.stack(served.logits[uid]), torch.stack(cold.logits[uid % len(prompts)])
            # Sums in another order may round a key or value to its neighbour.
            assert (got[-NUM_TOKENS:] - expected).norm() < 0.01 * expected.norm()


def with_scales(folder: Path, scales: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | {f"model.layers.0.self_attn.{name}": scale for name, scale in scales.items()}, file)


def test_scales_of_the_checkpoint_are_used(tmp_path: Path) -> None:
    """Of keys and values that without them would all be zero in fp8."""
    reference = random_model("llama", num_hidden_layers=1, attention_bias=False)
    exact = Served(save(reference, tmp_path))
    attention, tiny, prompt = reference.model.layers[0].self_attn, 2.0**-14, random_prompt(reference, 30)
    with torch.no_grad():
        attention.q_proj.weight.div_(tiny), attention.k_proj.weight.mul_(tiny)
        attention.o_proj.weight.div_(tiny), attention.v_proj.weight.mul_(tiny)
    save(reference, tmp_path)
    unscaled = Served(tmp_path, kv_cache_dtype="fp8")
    with_scales(tmp_path, {"k_proj.k_scale": torch.tensor(tiny), "v_scale": torch.tensor([tiny])})
    scaled, ignoring = Served(tmp_path, kv_cache_dtype="fp8"), Served(tmp_path)
    for served in (exact, unscaled, scaled, ignoring):
        served.run([prompt], max_tokens=1)
    want, bad, good, same = (served.logits[0][0] for served in (exact, unscaled, scaled, ignoring))
    assert (good - want).norm() < 0.5 * (bad - want).norm()
    torch.testing.assert_close(same, want)


@pytest.mark.parametrize("scale", [torch.ones(2), torch.tensor(0.0), torch.tensor(torch.nan)], ids=str)
def test_scales_that_are_none_are_named(tmp_path: Path, scale: torch.Tensor) -> None:
    save(random_model("llama"), tmp_path)
    with_scales(tmp_path, {"k_scale": scale})
    with pytest.raises(ModelError, match=r"model\.safetensors: model\.layers\.0\.self_attn\.k_scale "):
        Served(tmp_path, kv_cache_dtype="fp8")


def test_rows_that_are_retracted_go_on(model: Model) -> None:
    reference, folder = model
    prompts = [random_prompt(reference, 6) for _ in range(5)]
    tight = Served(folder, page_size=4, num_pages=14, max_running=4, max_seq_len=56, kv_cache_dtype="fp8")
    got = tight.run(prompts, max_tokens=30)
    assert tight.scheduler.stats().num_retractions > 0
    want = Served(folder, page_size=4, kv_cache_dtype="fp8").run(prompts, max_tokens=30)
    assert sum(a == b for a, b in zip(got, want, strict=True)) >= len(prompts) - 1


@pytest.mark.parametrize(("dtype", "ratio"), [("bfloat16", 2), ("float32", 4)])
def test_a_pool_holds_as_many_more_tokens(
    model: Model, dtype: str, ratio: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda *_: 3 << 20)
    pages = [
        Served(model[1], num_pages=None, max_running=2048, dtype=dtype, kv_cache_dtype=kind).scheduler._engine.num_pages
        for kind in ("auto", "fp8")
    ]
    assert 1 < ratio * pages[0] <= pages[1] < ratio * (pages[0] + 1)


def test_demo_answers_as_with_an_exact_cache() -> None:
    rows = [json.loads(line) for line in EXAMPLES.read_text(encoding="utf-8").splitlines()]
    prompts, answers = [row["messages"] for row in random.sample(rows, 25)], []
    for kind, said in (("auto", None), ("fp8", "fp8")):
        llm = LLM("demo", kv_cache_dtype=kind)
        assert llm._engine.ready.description.get("kv_cache_dtype") == said
        answers.append([list(output.outputs[0].token_ids) for output in llm.chat(prompts, progress=False)])
    same = [a == b for pair in zip(*answers, strict=True) for a, b in zip(*pair, strict=False)]
    assert sum(same) >= 0.97 * len(same)
