"""Given continuations scored by the in-process LLM, against the log-likelihoods that transformers' logits give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from minisgl_batch import LLM, SamplingParams
from minisgl_batch.errors import InvalidParameterError, RequestError, UsageError
from minisgl_batch.hub import model_path

MESSAGES = [{"role": "user", "content": "What is 17 + 25?"}]
CHOICES = ["42", "41", "the answer is 42."]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", dtype="float32", seed=0, max_seq_len=200)


@pytest.fixture(scope="module")
def reference() -> tuple[Any, Any]:
    folder = model_path("demo")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(folder), model.eval()


def log_likelihood(model: Any, prompt: list[int], ending: list[int]) -> tuple[float, bool]:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ending])).logits[0, len(prompt) - 1 : -1].double()
    found = logits.log_softmax(-1).gather(1, torch.tensor(ending).unsqueeze(1))
    return float(found.sum()), logits.argmax(-1).tolist() == ending


def split(tokenizer: Any, prompt: str, choice: str) -> tuple[list[int], list[int]]:
    """As lm-evaluation-harness does it."""
    context = prompt.rstrip()
    known = tokenizer(context)["input_ids"]
    return known, tokenizer(prompt + choice)["input_ids"][len(known) :]


@pytest.mark.parametrize("prompt", ["Question: What is 17 + 25? The answer is", "A", "ends in spaces  \n"])
def test_text_prompts_are_those_of_transformers(llm: LLM, reference: tuple[Any, Any], prompt: str) -> None:
    tokenizer, model = reference
    choices = [" 42", "s", " a few words of text", "\n"]
    for _ in range(2):  # cold, then cached
        (output,) = llm.score(prompt, choices, progress=False)
        found = output.outputs[0].choices
        assert found is not None
        for choice, score in zip(choices, found, strict=True):
            known, ending = split(tokenizer, prompt, choice)
            want, is_greedy = log_likelihood(model, known, ending)
            assert score.logprob == pytest.approx(want, abs=1e-4)
            assert (score.text, score.num_tokens, score.is_greedy) == (choice, len(ending), is_greedy)
        best = max(found, key=lambda score: score.logprob)
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == (best.text, "stop")
        assert (output.prompt_token_ids, output.outputs[0].token_ids) == (known, [])


def test_chats_and_token_ids(llm: LLM, reference: tuple[Any, Any]) -> None:
    tokenizer, model = reference
    ids = llm.tokenizer.encode_chat(MESSAGES).tolist()
    outputs = llm.score([MESSAGES, ids, ids], [CHOICES, CHOICES, CHOICES[1:]], progress=False)
    for output in outputs:
        for score in output.outputs[0].choices or []:
            ending = tokenizer(score.text, add_special_tokens=False)["input_ids"]
            assert score.logprob == pytest.approx(log_likelihood(model, ids, ending)[0], abs=1e-4)
    assert [output.outputs[0].text for output in outputs] == ["42", "42", "41"]
    assert outputs[0].outputs[0].choices == outputs[1].outputs[0].choices
    assert outputs[1].num_cached_tokens == (len(ids) - 1) // 16 * 16


def test_choices_among_prompts_that_generate(llm: LLM) -> None:
    params = [SamplingParams(choices=CHOICES), SamplingParams(max_tokens=8, temperature=0)]
    finished = {event.prompt_index: event for event in llm.stream([MESSAGES] * 2, params) if event.finished}
    scored, generated = finished[0].finished, finished[1].finished
    assert scored is not None
    assert generated is not None
    assert (finished[0].text, scored.text, generated.text) == ("42", "42", "42")
    assert (scored.logprobs, generated.choices) == (None, None)


def test_leaving_a_stream_ends_all_choices(llm: LLM) -> None:
    rows = [SamplingParams(max_tokens=50, ignore_eos=True), *[SamplingParams(choices=CHOICES)] * 20]
    for _ in llm.stream([f"prompt number {i}" for i in range(21)], rows):
        break
    assert llm.stats().num_running == llm.stats().num_waiting == 0


@pytest.mark.parametrize("truncate", ["left", "right"])
def test_long_prompts(llm: LLM, reference: tuple[Any, Any], truncate: Any) -> None:
    prompt = "one two three four five " * 60
    with pytest.raises(RequestError, match=r"prompt 0: the prompt and its longest choice have \d+ \+ 7 tokens and the"):
        llm.score(prompt, CHOICES, progress=False)
    params = SamplingParams(choices=CHOICES, truncate=truncate)
    (output,) = llm.generate(prompt, params, progress=False)
    assert len(output.prompt_token_ids) == 200 - 1 - 7
    (scored,) = llm.score(prompt, CHOICES, truncate=truncate, progress=False)
    assert (scored.prompt_token_ids, scored.outputs[0].choices) == (output.prompt_token_ids, output.outputs[0].choices)
    (score, *_) = output.outputs[0].choices or []
    tokenizer, model = reference
    known, ending = split(tokenizer, prompt, CHOICES[0])
    kept = known[-192:] if truncate == "left" else known[:192]
    assert score.logprob == pytest.approx(log_likelihood(model, kept, ending)[0], abs=1e-4)
    with pytest.raises(RequestError, match=r"of which the longest choice takes \d+: nothing is left for the prompt"):
        llm.generate("a prompt", SamplingParams(choices=["word " * 250], truncate=truncate), progress=False)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"choices": "yes"}, "must be a list of at least one text, got 'yes'"),
        ({"choices": []}, "must be a list of at least one text"),
        ({"choices": ["yes", ""]}, "must not hold an empty string"),
        ({"choices": ["yes", 1]}, "must be a string or a list of strings"),
        ({"choices": ["yes", "no", "yes"]}, "holds 'yes' twice"),
        ({"choices": ["\ud800"]}, "isn't valid Unicode"),
        ({"choices": [str(i) for i in range(1025)]}, "at most 1024 strings, got 1025"),
        ({"choices": ["yes"], "n": 2}, "n: says nothing beside choices"),
        ({"choices": ["yes"], "logprobs": 0}, "logprobs: says nothing beside choices"),
    ],
)
def test_faulty_choices(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidParameterError, match=problem):
        SamplingParams(**fields)


def test_layers_of_parameters() -> None:
    row, job = SamplingParams(choices=["yes"]), SamplingParams(max_tokens=4, truncate="left", temperature=0.5)
    assert row.over(job) == SamplingParams(choices=["yes"], truncate="left")
    with pytest.raises(InvalidParameterError, match="temperature: says nothing beside choices"):
        job.over(row)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("temperature", "remove it, as nothing is generated"),
        ("tools", "use generate with SamplingParams(choices=..., tools=...)"),
        ("sampling_params", "use generate with SamplingParams(choices=...)"),
    ],
)
def test_what_score_does_not_take(llm: LLM, name: str, advice: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        llm.score("a", ["yes"], **{name: None})
    assert (caught.value.field, caught.value.reason) == (name, f"is no argument of score: {advice}")


def test_faulty_arguments(llm: LLM) -> None:
    with pytest.raises(UsageError, match="choices: 1 lists were given for 2 prompts"):
        llm.score(["a", "b"], [["yes", "no"]], progress=False)
    with pytest.raises(UsageError, match="choices: must be a list of at least one text"):
        llm.score("a", "yes", progress=False)
    with pytest.raises(UsageError, match="truncate: must be one of error, left, right, got 'middle'"):
        llm.score("a", ["yes"], truncate="middle", progress=False)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"choices\[1\]: 'ee' has no tokens of its own behind the prompt"):
        llm.score("One, two, thr", [" and", "ee"], progress=False)
    with pytest.raises(RequestError, match="1024 choices behind a prompt of 5000 tokens come to more than 4194304"):
        llm.score([[1] * 5000], [[str(i) for i in range(1024)]], progress=False)
