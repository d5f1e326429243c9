"""Log-probabilities of output and prompt through the whole engine, against those of transformers' logits."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from minisgl_batch.engine import scores
from minisgl_batch.tokenizer import Logprobs
from tests.minisgl_batch.engine.served import Served
from tests.minisgl_batch.models.hf import hf_logits, random_model, save

VOCAB = 70


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    reference = random_model("llama", vocab_size=VOCAB, max_position_embeddings=128)
    return reference, save(reference, tmp_path_factory.mktemp("model"))


def random_prompt(length: int) -> list[int]:
    return [random.randrange(VOCAB) for _ in range(length)]


def check(found: Logprobs | None, logits: torch.Tensor, targets: list[int], num_top: int) -> None:
    """`found` is what these logits, (n, vocab), say of the targets; tokens that all but tie may swap places."""
    assert found is not None
    assert found.num_top == num_top
    want = logits.double().log_softmax(-1)
    of_targets = want.gather(1, torch.tensor(targets).unsqueeze(1))
    np.testing.assert_allclose(found.logprobs, of_targets.squeeze(1), atol=1e-4)
    ranks = torch.from_numpy(found.ranks) - 1
    assert ((want > of_targets + 1e-4).sum(-1) <= ranks).all()
    assert (ranks <= (want > of_targets - 1e-4).sum(-1)).all()
    np.testing.assert_allclose(found.top_logprobs, want.topk(num_top).values, atol=1e-4)
    of_top = want.gather(1, torch.from_numpy(found.top_ids).long())
    np.testing.assert_allclose(found.top_logprobs, of_top, atol=1e-4)
    assert all(len(set(ids)) == num_top for ids in found.top_ids.tolist())


def check_row(served: Served, reference: Any, uid: int, prompt: list[int], num_top: int, num_prompt_top: int) -> None:
    output = served.outputs[uid]
    (logits,) = hf_logits(reference, [prompt + output])
    found = served.scores[uid].output(output)
    if num_top < 0:
        assert found is None
    else:
        check(found, logits[len(prompt) - 1 : -1], output, num_top)
    if num_prompt_top < 0:
        assert served.scores[uid].prompt() is None
    else:
        check(served.scores[uid].prompt(), logits[: len(prompt) - 1], prompt[1:], num_prompt_top)


@pytest.mark.parametrize("overlap", [False, True], ids=["normal_loop", "overlap_loop"])
@pytest.mark.parametrize("mixed", [False, True])
def test_scores_are_those_of_transformers(
    model: tuple[Any, Path], overlap: bool, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that ask for different ones, in one batch, in pieces and in slices of any size, cold and warm."""
    reference, folder = model
    monkeypatch.setattr(scores, "_SLICE_VALUES", random.choice([1, 3 * VOCAB, 1 << 25]))
    options = {"page_size": 4, "max_running": 4, "max_prefill_tokens": random.choice([3, 9, 64])}
    served = Served(folder, overlap=overlap, mixed=mixed, **options)
    stem = random_prompt(13)
    rows = [
        (random_prompt(random.randint(2, 30)), random.choice([-1, 0, 5, 20]), random.choice([-1, 0, 3, 20]))
        for _ in range(4)
    ]
    rows += [(stem, 2, 4), (stem, 2, 4), (stem + random_prompt(3), 0, 1), (stem + random_prompt(3), 3, -1)]
    rows += [(random_prompt(1), 1, 1), (random_prompt(9), -1, -1)]
    for _ in range(2):
        uids = [
            served.add([prompt], num_logprobs=num_top, num_prompt_logprobs=num_prompt_top)[0]
            for prompt, num_top, num_prompt_top in rows
        ]
        while served.is_busy:
            served.tick()
        for uid, row in zip(uids, rows, strict=True):
            check_row(served, reference, uid, *row)
            assert row[2] < 0 or len(row[0]) == 1 or served.cached[uid] == 0
    assert served.cached[uids[-3]] > 0


def test_a_long_prompt_is_scored_in_slices() -> None:
    num_tokens, vocab = 16_384, 2100
    hidden, head = torch.randn(num_tokens, 4), torch.randn(4, vocab)
    targets = torch.randint(0, vocab, (num_tokens,), dtype=torch.int32)
    sizes = []

    def logits(part: torch.Tensor) -> torch.Tensor:
        sizes.append(len(part))
        return part @ head

    model: Any = SimpleNamespace(config=SimpleNamespace(vocab_size=vocab), logits=logits, gather_logits=lambda x: x)
    found = scores.score_hidden(model, hidden, targets, 3)

    assert sizes == [15_978, 406]  # of 128 MiB at most
    looked = [0, 15_977, 15_978, num_tokens - 1, *random.sample(range(num_tokens), 50)]
    want = (hidden[looked].double() @ head.double()).log_softmax(-1)
    of_targets = want.gather(1, targets[looked].long().unsqueeze(1)).squeeze(1)
    words = found[looked].contiguous()
    np.testing.assert_allclose(words.view(torch.float32)[:, 0], of_targets, atol=1e-4)
    np.testing.assert_allclose(words.view(torch.float32)[:, 5:], want.topk(3).values, atol=1e-4)


def test_retracted_rows_score_nothing_twice(model: tuple[Any, Path]) -> None:
    reference, folder = model
    served = Served(folder, page_size=4, num_pages=14, max_running=4, max_seq_len=56, max_prefill_tokens=5)
    prompts = [random_prompt(11) for _ in range(5)]
    served.run(prompts, max_tokens=30, num_logprobs=1, num_prompt_logprobs=1)
    assert served.scheduler.stats().num_retractions > 0
    for uid, prompt in enumerate(prompts):
        check_row(served, reference, uid, prompt, 1, 1)
        assert len(served.scores[uid]._output) == 30


def test_scores_are_of_the_model_and_not_of_the_changed_logits(model: tuple[Any, Path]) -> None:
    reference, folder = model
    served = Served(folder)
    prompt = random_prompt(6)
    served.run(
        [prompt], temperature=2.0, seed=3, top_k=4, num_logprobs=3, logit_bias=((5, 50.0),), num_prompt_logprobs=0
    )
    assert served.outputs[0] == [5] * 8
    check_row(served, reference, 0, prompt, 3, 0)


def test_aborted_rows_leave_the_others_their_scores(model: tuple[Any, Path]) -> None:
    reference, folder = model
    served = Served(folder, overlap=True, max_prefill_tokens=7)
    prompts = [random_prompt(12) for _ in range(3)]
    for ticks in range(8):
        uids = served.add(prompts, num_logprobs=2, num_prompt_logprobs=2)
        for _ in range(ticks):
            served.tick()
        served.abort(uids[1])
        while served.is_busy:
            served.tick()
        for i in (0, 2):
            check_row(served, reference, uids[i], prompts[i], 2, 2)


@pytest.mark.parametrize("overlap", [False, True], ids=["normal_loop", "overlap_loop"])
def test_endings_are_scored_behind_a_cached_prompt(model: tuple[Any, Path], overlap: bool) -> None:
    """Endings of any length, of which all but the first find the prompt in the cache; in pieces of any size."""
    reference, folder = model
    budget = random.choice([3, 9, 64])
    served = Served(folder, overlap=overlap, page_size=4, max_running=4, max_prefill_tokens=budget)
    prompt = random_prompt(21)
    endings = [random_prompt(length) for length in (1, 2, 7, 1, 12)]
    for is_cold in (True, False):
        uids = [served.add([prompt], ending, max_tokens=1, num_prompt_logprobs=1)[0] for ending in endings]
        while served.is_busy:
            served.tick()
        assert [served.cached[uid] for uid in uids] == [0 if is_cold and uid == uids[0] else 20 for uid in uids]
        for uid, ending in zip(uids, endings, strict=True):
            (logits,) = hf_logits(reference, [prompt + ending])
            check(served.scores[uid].prompt(), logits[len(prompt) - 1 : -1], ending, 1)
