"""Penalties, biases and tokens that mustn't come, through the whole engine and against transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from minisgl_batch.engine import sampler, tables
from minisgl_kernels.adjust_logits import AdjustedRows
from tests.minisgl_batch.engine.served import Served
from tests.minisgl_batch.models.hf import random_model, save

NUM_TOKENS = 12
VOCAB = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    reference = random_model("qwen3", vocab_size=VOCAB, max_position_embeddings=128)
    return reference, save(reference, tmp_path_factory.mktemp("model"))


class OutputPenalty(LogitsProcessor):
    """What the OpenAI API documents; transformers has none."""

    def __init__(self, num_prompt: int, presence: float, frequency: float) -> None:
        self._num_prompt, self._presence, self._frequency = num_prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self._num_prompt :], minlength=scores.shape[1])
        return scores - self._frequency * counts - self._presence * (counts > 0)


@torch.inference_mode()
def expected(reference: Any, prompt: list[int], **sampling: Any) -> tuple[list[int], torch.Tensor]:
    """Greedy ids of transformers' `generate`, and the scores that they were picked by."""
    bias = sampling.get("logit_bias", ())
    penalties = sampling.get("presence_penalty", 0.0), sampling.get("frequency_penalty", 0.0)
    stop_ids = list(sampling.get("stop_ids", ()))
    out = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=sampling.get("max_tokens", NUM_TOKENS),
        eos_token_id=stop_ids or None,
        pad_token_id=0,
        repetition_penalty=sampling.get("repetition_penalty", 1.0),
        sequence_bias={(token,): value for token, value in bias} or None,
        bad_words_ids=[list(word) for word in sampling.get("bad_words", ())] or None,
        min_new_tokens=sampling.get("min_tokens"),
        logits_processor=LogitsProcessorList([OutputPenalty(len(prompt), *penalties)]),
        output_scores=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.scores)


class Scores:
    """The logits that each request's tokens were picked from."""

    def __init__(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: dict[int, list[torch.Tensor]] = {}
        adjust = sampler.adjust_logits

        def recording(logits: torch.Tensor, rows: AdjustedRows, vocab_start: int) -> torch.Tensor:
            out = adjust(logits, rows, vocab_start)
            for slot, row in zip(rows.slots.tolist(), out, strict=True):
                self.of.setdefault(int(served.scheduler.table.uid[slot]), []).append(row.clone())
            return out

        monkeypatch.setattr(sampler, "adjust_logits", recording)


def random_prompt(length: int) -> list[int]:
    return [random.randrange(VOCAB) for _ in range(length)]


def random_prompts(num_prompts: int) -> list[list[int]]:
    return [random_prompt(random.randint(1, 30)) for _ in range(num_prompts)]


def random_adjustments(prompt: list[int]) -> dict[str, Any]:
    """Some of all kinds together. No word begins in the prompt, where transformers looks for them too."""
    absent = sorted(set(range(VOCAB)) - set(prompt))
    words = [(token,) for token in random.sample(range(VOCAB), 15)]
    words += [(random.choice(absent), *random_prompt(random.randint(1, 2))) for _ in range(40)]
    kinds: dict[str, Any] = {
        "presence_penalty": random.uniform(-2, 2),
        "frequency_penalty": random.uniform(-2, 2),
        "repetition_penalty": random.uniform(0.5, 3),
        "logit_bias": tuple((token, random.uniform(-3, 3)) for token in random.sample(range(VOCAB), 9)),
        "bad_words": tuple(words),
    }
    return dict(random.sample(sorted(kinds.items()), random.randint(1, len(kinds))))


@pytest.mark.parametrize("overlap", [False, True], ids=["normal_loop", "overlap_loop"])
def test_ids_and_scores_are_those_of_transformers(
    model: tuple[Any, Path], overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of all kinds in one batch, cold and with their prompts cached."""
    reference, folder = model
    served = Served(folder, page_size=4, max_running=4, max_prefill_tokens=9, overlap=overlap)
    scores = Scores(served, monkeypatch)
    rows = [(prompt, random_adjustments(prompt)) for prompt in random_prompts(6)]
    rows.append((random_prompt(9), {}))
    for _ in range(2):
        uids = [served.add([prompt], max_tokens=NUM_TOKENS, **adjustments)[0] for prompt, adjustments in rows]
        while served.is_busy:
            served.tick()
        for uid, (prompt, adjustments) in zip(uids, rows, strict=True):
            ids, want = expected(reference, prompt, **adjustments)
            assert served.outputs[uid] == ids, adjustments
            if adjustments:
                got = torch.stack(scores.of[uid][:NUM_TOKENS])
                torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert sum(served.cached.values()) > 0


def test_retracted_rows_count_all_their_tokens(model: tuple[Any, Path]) -> None:
    reference, folder = model
    served = Served(folder, page_size=4, num_pages=14, max_running=4, max_seq_len=56, overlap=random.random() < 0.5)
    prompts = [random_prompt(6) for _ in range(5)]
    sampling = {"frequency_penalty": 0.3, "repetition_penalty": 1.2, "max_tokens": 30}
    outputs = served.run(prompts, **sampling)
    assert served.scheduler.stats().num_retractions > 0
    assert outputs == [expected(reference, prompt, **sampling)[0] for prompt in prompts]


def test_long_edits_take_several_uploads(model: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that start together, with texts and rules of more values than one upload has."""
    reference, folder = model
    prompts = [random_prompt(40) for _ in range(3)]
    sampling = {"repetition_penalty": 1.4, "bad_words": ((1,), (2,), (3,))}
    served = Served(folder)
    want = served.run(prompts, **sampling)
    assert want == [expected(reference, prompt, max_tokens=8, **sampling)[0] for prompt in prompts]
    monkeypatch.setattr(tables, "MAX_UPLOAD", 30)
    assert Served(folder).run(prompts, **sampling) == want


def test_biases_force_and_ban_a_token(model: tuple[Any, Path]) -> None:
    _, folder = model
    prompt = random_prompt(5)
    assert Served(folder).run([prompt], logit_bias=((17, 100.0),)) == [[17] * 8]
    (plain,) = Served(folder).run([prompt])
    (other,) = Served(folder).run([prompt], logit_bias=((plain[0], -100.0),))
    assert plain[0] not in other


@pytest.mark.parametrize("overlap", [False, True], ids=["normal_loop", "overlap_loop"])
def test_stop_tokens_wait_for_min_tokens(model: tuple[Any, Path], overlap: bool) -> None:
    reference, folder = model
    prompt = random_prompt(7)
    (plain,) = Served(folder).run([prompt])
    stop_ids = (plain[0], plain[3])
    for min_tokens in (0, 1, 5, 8):
        sampling = {"stop_ids": stop_ids, "min_tokens": min_tokens, "max_tokens": 20}
        served = Served(folder, overlap=overlap)
        (output,) = served.run([prompt], **sampling)
        assert output == expected(reference, prompt, **sampling)[0]
        assert not set(output[:min_tokens]) & set(stop_ids)
        assert served.finished[0] == "length" or output[-1] in stop_ids


def test_the_first_tokens_alone_are_adjusted_for_min_tokens(
    model: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(model[1])
    scores = Scores(served, monkeypatch)
    served.run([random_prompt(3)], stop_ids=(5,), min_tokens=3, max_tokens=9)
    assert len(scores.of[0]) == 3


@pytest.mark.parametrize("overlap", [False, True], ids=["normal_loop", "overlap_loop"])
def test_words_of_several_tokens_never_come_whole(model: tuple[Any, Path], overlap: bool) -> None:
    _, folder = model
    prompt = random_prompt(6)
    served = Served(folder, overlap=overlap)
    words: list[tuple[int, ...]] = []
    for length in (1, 2, 3, 4, 3, 2):
        (output,) = served.run([prompt], max_tokens=NUM_TOKENS, bad_words=tuple(words))
        for word in words:
            assert word not in [tuple(output[i : i + len(word)]) for i in range(NUM_TOKENS)]
        first = random.randrange(NUM_TOKENS - length)
        words.append(tuple(output[first : first + length]))


def test_a_word_begun_by_the_prompt_may_go_on(model: tuple[Any, Path]) -> None:
    """Only the output is searched, as in vLLM."""
    _, folder = model
    prompt = random_prompt(6)
    (plain,) = Served(folder).run([prompt])
    assert Served(folder).run([prompt], bad_words=((prompt[-1], plain[0]),))[0][0] == plain[0]


@pytest.mark.parametrize("filters", [{}, {"top_k": 4}], ids=str)
def test_samples_follow_the_changed_distribution(model: tuple[Any, Path], filters: dict[str, Any]) -> None:
    """By chi-square over many draws of one token."""
    reference, folder = model
    prompt, num_draws = random_prompt(9), 1500
    adjustments = {"logit_bias": ((3, 2.0), (4, 1.5), (5, -9.0)), "repetition_penalty": 1.5, "bad_words": ((6,),)}
    _, (scores, *_) = expected(reference, prompt, max_tokens=1, **adjustments)
    if filters:
        scores = scores.masked_fill(scores < scores.topk(4).values[-1], -torch.inf)
    served = Served(folder)
    for seed in range(num_draws):
        served.add([prompt], max_tokens=1, temperature=0.8, seed=seed, **filters, **adjustments)
    while served.is_busy:
        served.tick()
    seen = torch.bincount(torch.tensor([ids[0] for ids in served.outputs.values()]), minlength=VOCAB)
    want = (scores / 0.8).softmax(-1) * num_draws
    assert not seen[want == 0].any()
    common = want >= 5
    seen, want = (torch.cat([x[common], x[~common].sum().unsqueeze(0)]) for x in (seen, want))
    chi_square = ((seen - want) ** 2 / want.clamp(min=1e-9))[want > 1].sum()
    # Mean + 10 standard deviations of what it is when all is right: less than one failure in 100,000 runs.
    degrees = int((want > 1).sum()) - 1
    assert chi_square < degrees + 10 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9, "top_k": 30}], ids=str)
def test_samples_do_not_depend_on_their_batch(model: tuple[Any, Path], filters: dict[str, Any]) -> None:
    _, folder = model
    common = {"temperature": 1.0, "max_tokens": NUM_TOKENS, **filters}
    rows = [(prompt, random_adjustments(prompt)) for prompt in random_prompts(4)]
    together = Served(folder)
    for seed, (prompt, adjustments) in enumerate(rows):
        together.add([prompt], seed=seed, **common, **adjustments)
    together.add([random_prompt(4)], seed=9, **common)
    while together.is_busy:
        together.tick()
    for seed, (prompt, adjustments) in enumerate(rows):
        alone = Served(folder, overlap=True, page_size=1)
        assert alone.run([prompt], seed=seed, **common, **adjustments) == [together.outputs[seed]]
