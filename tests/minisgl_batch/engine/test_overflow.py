"""Rows whose numbers overflow in float16, among others, through the whole engine: they fail, each alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.minisgl_batch.engine.served import Served
from tests.minisgl_batch.models.hf import random_model, save

Device = dict[str, Any]  # options
VOCAB, SPOILER = 96, 77
ON_GPU = [
    {"attention_backend": "auto"},
    {"attention_backend": "auto", "cuda_graph_max_bs": 0, "mixed": True},
    {"attention_backend": "auto", "kv_cache_dtype": "fp8"},
    {"attention_backend": "fa"},
    {"attention_backend": "fi"},
    {"attention_backend": "triton"},
]
LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["normal_loop", "overlap_loop"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose weights all are numbers of float16; what it computes is too, but for texts with the spoiler."""
    reference = random_model(
        "llama",
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=128,
        vocab_size=VOCAB,
        num_hidden_layers=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    with torch.no_grad():
        reference.get_input_embeddings().weight[SPOILER] = 65_000.0
        reference.model.layers[0].mlp.down_proj.weight.mul_(3000.0)  # float16 ends at 65,504
    return save(reference, tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["cpu", *(pytest.param(options, marks=pytest.mark.gpu, id=str(options)) for options in ON_GPU)])
def device(request: pytest.FixtureRequest) -> Device:
    return {"device": "cpu"} if request.param == "cpu" else {"device": "cuda"} | request.param


def served(folder: Path, device: Device, **options: Any) -> Served:
    return Served(folder, **({"dtype": "float16", "num_pages": 64, "max_running": 8} | device | options))


def good_prompt(length: int) -> list[int]:
    return [random.randrange(SPOILER) for _ in range(length)]


def bad_prompt(length: int) -> list[int]:
    prompt = good_prompt(length)
    prompt[random.randrange(length)] = SPOILER
    return prompt


def run(served: Served, *rows: tuple[list[int], dict[str, Any]]) -> list[int]:
    """Each row has its own sampling; none draws the spoiler by itself."""
    uids = [served.add([prompt], **({"logit_bias": ((SPOILER, -100.0),)} | sampling))[0] for prompt, sampling in rows]
    while served.is_busy:
        served.tick()
    return uids


def check_failed(served: Served, uid: int, place: str) -> None:
    advice = "numbers overflowed in float16; run with --dtype bfloat16 or float32"
    assert served.refused[uid] == ("numeric_overflow", f"the model's logits aren't finite numbers {place}: {advice}")
    assert uid not in served.finished


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logit_bias": ()},  # on a GPU, in a graph
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.8, "seed": 2, "logit_bias": ()},
    {"temperature": 0.8, "seed": 3, "top_k": 5},
    {"temperature": 0.8, "seed": 4, "top_p": 0.5, "logit_bias": (), "num_logprobs": 2},
    {"temperature": 0.0, "presence_penalty": 1.0, "num_logprobs": 3},
]


@LOOPS
def test_a_prompt_that_overflows_fails_alone(model: Path, device: Device, overlap: bool) -> None:
    """In each way of sampling, beside rows that give what they give without it, also on pages that it has left."""
    engine = served(model, device, overlap=overlap, num_pages=24, max_prefill_tokens=random.choice([16, 64, 512]))
    good = [(good_prompt(random.randint(1, 40)), {"temperature": 0.0, "max_tokens": 12}) for _ in range(12)]
    bad = [(bad_prompt(random.randint(1, 40)), sampling) for sampling in SAMPLINGS]
    alone = run(engine, *good)
    for _ in range(3):
        rows = [(*row, True) for row in good] + [(*row, False) for row in bad]
        random.shuffle(rows)
        uids = run(engine, *(row[:2] for row in rows))
        for uid, (prompt, _, is_good) in zip(uids, rows, strict=True):
            if is_good:
                want = next(was for was, row in zip(alone, good, strict=True) if row[0] == prompt)
                assert len(engine.outputs[uid]) == 12
                if device["device"] == "cpu":  # on a GPU rounding depends on the batch
                    assert engine.outputs[uid] == engine.outputs[want]
            else:
                check_failed(engine, uid, "at output token 1")
                assert engine.outputs[uid] == []


@LOOPS
def test_an_output_that_overflows_fails_with_what_it_had(model: Path, device: Device, overlap: bool) -> None:
    """Rows that draw the spoiler sooner or later, or never, and one that must; the next step has them in it already."""
    engine = served(model, device, overlap=overlap)
    rows: list[dict[str, Any]] = [{"temperature": 0.0, "logit_bias": ((SPOILER, 100.0),)}]
    rows += [{"temperature": 60.0, "seed": random.getrandbits(60), "logit_bias": (), "top_k": k} for k in (0, 85) * 8]
    uids = run(engine, *((good_prompt(9), row | {"max_tokens": 60}) for row in rows))
    assert engine.outputs[uids[0]] == [SPOILER]
    for uid in uids:
        output = engine.outputs[uid]
        if SPOILER in output[:-1] or uid in engine.refused:
            assert output.index(SPOILER) == len(output) - 1
            check_failed(engine, uid, f"at output token {len(output) + 1}")
        else:
            assert (len(output), engine.finished[uid]) == (60, "length")


def test_what_is_cached_of_a_row_that_overflowed_is_used_no_more(model: Path, device: Device) -> None:
    """Its first tokens' numbers are fine by themselves, but attention took them together with the others."""
    engine = served(model, device)
    stem = good_prompt(40)
    for num_cached in (0, 32):
        failed, good, again = (
            run(engine, (stem + tail, {"temperature": 0.0}))[0]
            for tail in ([*good_prompt(9), SPOILER], good_prompt(3), good_prompt(3))
        )
        check_failed(engine, failed, "at output token 1")
        assert (engine.finished[good], engine.finished[again]) == ("length", "length")
        assert (engine.cached[good], engine.cached[again]) == (num_cached, 32)


@LOOPS
def test_rows_with_the_same_first_tokens_dont_fail_with_it(model: Path, device: Device, overlap: bool) -> None:
    """Also where its step is in flight when theirs begins, in which its numbers are theirs."""
    engine = served(model, device, overlap=overlap, num_pages=256)
    stem, greedy = good_prompt(40), {"temperature": 0.0}
    scored = {"num_logprobs": 1, "temperature": 0.5, "seed": 1, "presence_penalty": 1.0}
    rows = [([*stem, *good_prompt(4)], sampling) for sampling in (greedy, scored, greedy)]
    alone = run(engine, *rows)
    engine.scheduler.cache.reset()
    failed, *uids = run(engine, ([*stem, SPOILER], greedy), *rows)
    check_failed(engine, failed, "at output token 1")
    for uid, was in zip(uids, alone, strict=True):
        assert engine.finished[uid] == "length"
        if device["device"] == "cpu":  # on a GPU rounding depends on the batch
            assert engine.outputs[uid] == engine.outputs[was]


@LOOPS
def test_scores_that_arent_numbers_fail_their_row(model: Path, device: Device, overlap: bool) -> None:
    """Those of a prompt, and of a given continuation."""
    engine = served(model, device, overlap=overlap, max_prefill_tokens=16)
    scored = {"num_prompt_logprobs": 2, "temperature": 0.0}
    good, bad = run(engine, (good_prompt(30), scored), ([*bad_prompt(29), 3], scored))
    check_failed(engine, bad, "in the prompt")
    found = engine.scores[good].prompt()
    assert found is not None
    assert len(found.logprobs) == 29
    uids = [engine.add([good_prompt(5)], [1, last, 3], max_tokens=1, num_prompt_logprobs=1)[0] for last in (2, SPOILER)]
    while engine.is_busy:
        engine.tick()
    assert uids[0] in engine.finished
    check_failed(engine, uids[1], "in the prompt")


def test_nothing_overflows_in_bfloat16(model: Path, device: Device) -> None:
    engine = served(model, device, dtype="bfloat16")
    run(engine, *((bad_prompt(20), {"temperature": 0.0}) for _ in range(3)))
    assert not engine.refused
