"""The engine on a GPU: graphs, overlap and two-level attention change nothing but rounding."""

from __future__ import annotations

import json
import logging
import random
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from minisgl_batch import LLM
from minisgl_batch.batch import SharingCosts
from minisgl_batch.config import Quantization
from tests.minisgl_batch.engine.served import Served
from tests.minisgl_batch.models.fp8_checkpoints import FORMATS, save_fp8
from tests.minisgl_batch.models.hf import random_model, save

pytestmark = pytest.mark.gpu
EXAMPLES = Path(__file__).parents[3] / "examples" / "prompts.jsonl"


def served(folder: Path, **options: Any) -> Served:
    values = {"dtype": "bfloat16", "num_pages": 4096, "max_running": 64, "device": "cuda", "attention_backend": "auto"}
    return Served(folder, **(values | options))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reference = random_model(
        "qwen3",
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=512,
        num_hidden_layers=3,
        vocab_size=5000,
        max_position_embeddings=2048,
    )
    return save(reference.to(torch.bfloat16), tmp_path_factory.mktemp("model"))


def random_ids(num_ids: int) -> list[int]:
    return [random.randrange(5000) for _ in range(num_ids)]


def prompts_with_stems(num_prompts: int) -> list[list[int]]:
    stems = [random_ids(300), random_ids(700), []]
    return [random.choice(stems) + random_ids(random.randint(1, 60)) for _ in range(num_prompts)]


def agreeing_tokens(a: list[list[int]], b: list[list[int]]) -> float:
    """Mean share of a row before its first difference."""
    shares = [
        next((i for i, (x, y) in enumerate(zip(p, q, strict=True)) if x != y), len(p)) / len(p)
        for p, q in zip(a, b, strict=True)
    ]
    return sum(shares) / len(shares)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": False},
        {"mixed": True},
        {"max_prefill_tokens": 64},
        {"attention_backend": "fi"},
        {"attention_backend": "fa"},
        {"attention_backend": "triton"},
        {"page_size": 64},
        {"num_pages": 130, "max_seq_len": 1024},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8", "attention_backend": "triton", "mixed": True},
        {"kv_cache_dtype": "fp8", "max_prefill_tokens": 64, "num_pages": 130, "max_seq_len": 1024},
        {"quantization": "fp8"},
        {"quantization": "fp8", "kv_cache_dtype": "fp8", "mixed": True},
    ],
    ids=str,
)
def test_ways_of_running_agree(model: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy ids differ from the plain way's only behind a step where the two best logits nearly tie."""
    # Two levels wherever they can be, though so few tokens in common don't pay.
    monkeypatch.setattr(SharingCosts, "is_worth", lambda *given: given[2] > 0)  # the tokens saved
    prompts = prompts_with_stems(100)
    kinds = {name: options[name] for name in ("kv_cache_dtype", "quantization") if name in options}
    # In fp8 a rounding error may move a number to its neighbour, 6 to 12 % away.
    most, least = (0.6, 0.2) if kinds else (0.25, 0.4)
    plain = served(model, overlap=False, cuda_graph_max_bs=0, share_prefixes=False, cache="naive", **kinds)
    other = served(model, **options)
    want, got = plain.run(prompts, max_tokens=40), other.run(prompts, max_tokens=40)
    assert {len(ids) for ids in got} == {40}
    for row, (a, b) in enumerate(zip(want, got, strict=True)):
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if first is not None and plain.logits[row]:
            best = plain.logits[row][first].float().topk(2).values
            gap = float(best[0] - best[1])
            assert gap < most, f"row {row} diverges at token {first} where the best logits are {gap} apart"
    assert agreeing_tokens(want, got) > least  # random weights: two of 5,000 logits nearly tie every few tokens


def test_experts_give_the_ids_of_a_cpu(tmp_path: Path) -> None:
    """In float32, where no rounding makes a router choose differently."""
    reference = random_model(
        "qwen3_moe",
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        mlp_only_layers=[0],
        vocab_size=5000,
        max_position_embeddings=2048,
    )
    folder, prompts = save(reference, tmp_path), prompts_with_stems(40)
    want = Served(folder, device="cpu", max_running=64, num_pages=4096).run(prompts, max_tokens=20)
    got = served(folder, dtype="float32", attention_backend="triton").run(prompts, max_tokens=20)
    assert agreeing_tokens(want, got) > 0.95


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("gemma3", {"head_dim": 256, "sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"]}),
        ("phi3", {"head_dim": 96, "partial_rotary_factor": 0.75}),
    ],
)
def test_windows_and_other_heads_give_the_ids_of_a_cpu(family: str, given: dict[str, Any], tmp_path: Path) -> None:
    reference = random_model(
        family,
        hidden_size=4 * given["head_dim"],
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        num_hidden_layers=2,
        vocab_size=5000,
        max_position_embeddings=2048,
        **given,
    )
    folder, prompts = save(reference, tmp_path), prompts_with_stems(40)
    want = Served(folder, device="cpu", max_running=64, num_pages=4096).run(prompts, max_tokens=20)
    engine = served(folder, dtype="float32")
    assert engine.scheduler._engine.options.attention_backend == "triton"
    assert agreeing_tokens(want, engine.run(prompts, max_tokens=20)) > 0.95


def test_sinks_give_the_ids_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss, a window in the first of two layers; in bfloat16 a router may choose differently."""
    monkeypatch.setattr(SharingCosts, "is_worth", lambda *given: given[2] > 0)
    reference = random_model(
        "gpt_oss",
        hidden_size=256,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=128,
        intermediate_size=96,
        num_experts=16,
        num_experts_per_tok=4,
        num_hidden_layers=2,
        vocab_size=5000,
        max_position_embeddings=2048,
    )
    folder, prompts = save(reference, tmp_path), prompts_with_stems(40)
    want = Served(folder, device="cpu", max_running=64, num_pages=4096).run(prompts, max_tokens=20)
    got = served(folder, dtype="float32", attention_backend="triton").run(prompts, max_tokens=20)
    assert agreeing_tokens(want, got) > 0.95
    rounded = [served(folder, attention_backend=name).run(prompts, max_tokens=20) for name in ("triton", "fa,cuda")]
    assert agreeing_tokens(*rounded) > 0.3


def test_shared_prefixes_are_used(model: Path) -> None:
    engine = served(model, max_running=256)
    stem = [random.randrange(5000) for _ in range(1000)]
    seen = []
    launch = engine.scheduler._engine.launch
    engine.scheduler._engine.launch = lambda batch: (seen.append(batch.shared), launch(batch))[1]  # type: ignore[method-assign]
    engine.run([[*stem, i] for i in range(256)], max_tokens=20)
    assert any(shared is not None and shared.num_rows.tolist() == [256] for shared in seen)


def test_decode_steps_run_chosen_algorithms(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With cuBLASLt's fastest everywhere; the second start takes them from the first one's file."""
    prompts = prompts_with_stems(100)
    want = served(model).run(prompts, max_tokens=40)
    monkeypatch.setattr("minisgl_kernels.cpp.cache_dir", lambda: tmp_path)
    monkeypatch.setattr("minisgl_kernels.matmul._MIN_GAIN", 0.0)
    runs = []
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            runs.append(served(model, cache="naive").run(prompts, max_tokens=40))
        (line,) = [message for message in caplog.messages if "another algorithm" in message]
        num_chosen, num_products, num_timed = (int(word) for word in line.split() if word.isdigit())
        assert num_chosen > 0.8 * num_products > 0  # not every algorithm does fewer rows than it was timed for
        assert (num_timed == 0) == (len(runs) == 2)
        assert agreeing_tokens(want, runs[-1]) > 0.4  # see above
    assert agreeing_tokens(*runs) > 0.95


def test_sampled_rows_repeat(model: Path) -> None:
    prompts = prompts_with_stems(60)
    sampling = {"temperature": 1.0, "seed": 5, "max_tokens": 20}
    first, second = (served(model).run(prompts, **sampling) for _ in range(2))
    assert agreeing_tokens(first, second) > 0.95
    filtered = served(model).run(prompts, **(sampling | {"top_k": 1}))
    assert filtered == served(model).run(prompts, max_tokens=20)


def test_adjusted_rows_in_graphs_and_in_steps_of_any_kind(model: Path) -> None:
    prompts = prompts_with_stems(60)
    sampling = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "bad_words": ((7,), (8, 9)), "max_tokens": 30}
    plain = served(model, overlap=False, cuda_graph_max_bs=0, cache="naive").run(prompts, **sampling)
    for options in ({}, {"mixed": True}, {"num_pages": 130, "max_seq_len": 1024}):
        outputs = served(model, **options).run(prompts, **sampling)
        assert agreeing_tokens(plain, outputs) > 0.4
        assert not any(7 in ids or (8, 9) in pairwise(ids) for ids in outputs)
    forced = served(model).run(prompts, logit_bias=((17, 100.0), (18, 80.0)), frequency_penalty=40.0, max_tokens=4)
    assert forced == [[17, 18] * 2] * len(prompts)
    held_back = served(model).run(prompts, logit_bias=((17, 100.0),), stop_ids=(17,), min_tokens=5, max_tokens=20)
    assert all(17 not in ids[:5] and ids[5:] == [17] for ids in held_back)


def test_scores_of_greedy_rows(model: Path) -> None:
    """In graphs and out of them: a greedy token is its place's most probable one."""
    prompts = prompts_with_stems(40)
    scored = []
    for options in ({}, {"overlap": False, "cuda_graph_max_bs": 0}, {"mixed": True, "max_prefill_tokens": 512}):
        engine = served(model, **options)
        outputs = engine.run(prompts, max_tokens=20, num_logprobs=3, num_prompt_logprobs=2)
        for uid, output in enumerate(outputs):
            found = engine.scores[uid].output(output)
            assert found is not None
            assert (found.ranks == 1).all()
            assert (found.logprobs == found.top_logprobs[:, 0]).all()
            assert (found.top_logprobs < 0).all()
        scored.append([engine.scores[uid].prompt() for uid in range(len(prompts))])
    for first, *others in zip(*scored, strict=True):
        for other in others:
            assert len(first.logprobs) == len(other.logprobs)
            assert abs(first.logprobs - other.logprobs).max(initial=0.0) < 0.2  # bfloat16


def test_endings_are_scored_as_in_prompts_that_are_scored_whole(model: Path) -> None:
    rows = [(prompt, random_ids(random.randint(1, 40))) for prompt in prompts_with_stems(40)]
    whole = served(model, cache="naive")
    whole.run([prompt + ending for prompt, ending in rows], max_tokens=1, num_prompt_logprobs=0)
    for options in ({}, {"overlap": False}, {"mixed": True, "max_prefill_tokens": 64}):
        engine = served(model, **options)
        for _ in range(2):
            uids = [engine.add([prompt], ending, max_tokens=1, num_prompt_logprobs=0)[0] for prompt, ending in rows]
            while engine.is_busy:
                engine.tick()
            for number, (uid, (_, ending)) in enumerate(zip(uids, rows, strict=True)):
                found, want = engine.scores[uid].prompt(), whole.scores[number].prompt()
                assert found is not None
                assert want is not None
                assert found.token_ids.tolist() == ending
                assert abs(found.logprobs - want.logprobs[-len(ending) :]).max() < 0.2  # bfloat16
        assert sum(engine.cached[uid] for uid in uids) > 0.8 * sum(len(prompt) for prompt, _ in rows)


@pytest.mark.parametrize("name", ["fp8, blocks", "compressed-tensors, channels"])
def test_checkpoints_in_fp8_give_the_ids_of_a_cpu(name: str, tmp_path: Path) -> None:
    """Until one of the first few near ties: what lies between two numbers of FP8 may be rounded the other way."""
    reference = random_model(
        "qwen3",
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=320,
        num_hidden_layers=2,
        vocab_size=5000,
        max_position_embeddings=2048,
    )
    folder, prompts = save_fp8(reference, tmp_path, FORMATS[name]), prompts_with_stems(40)
    want = Served(folder, device="cpu", max_running=64, num_pages=4096).run(prompts, max_tokens=10)
    got = served(folder, dtype="float32", attention_backend="triton").run(prompts, max_tokens=10)
    assert agreeing_tokens(want, got) > 0.3  # of 5,000 ids


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_demo_answers_as_on_a_cpu(quantization: Quantization | None) -> None:
    rows = [json.loads(line) for line in EXAMPLES.read_text(encoding="utf-8").splitlines()]
    prompts = [row["messages"] for row in rows]
    texts = {}
    devices: tuple[Literal["cuda", "cpu"], ...] = ("cuda", "cpu")
    for device in devices:
        outputs = LLM("demo", device=device, quantization=quantization if device == "cuda" else None).chat(
            prompts, progress=False
        )
        texts[device] = [output.outputs[0].text for output in outputs]
    same = sum(a == b for a, b in zip(texts["cuda"], texts["cpu"], strict=True))
    right = sum(text == row["metadata"]["answer"] for text, row in zip(texts["cuda"], rows, strict=True))
    assert same >= 0.99 * len(rows)
    assert right >= 0.97 * len(rows)


def test_a_closed_engine_leaves_its_memory() -> None:
    before = torch.cuda.memory_reserved()
    with LLM("demo", device="cuda", num_pages=1 << 16) as llm:
        assert torch.cuda.memory_reserved() - before > 512 << 20
        llm.generate(["What is 1 + 1?"], progress=False)
    assert torch.cuda.memory_reserved() - before < 64 << 20
