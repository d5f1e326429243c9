from __future__ import annotations

import json
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from minisgl_batch.engine_sampling import EngineSampling
from minisgl_batch.errors import RequestError
from minisgl_batch.grammar_check import GrammarCheck
from minisgl_batch.messages import AddRequests, Constraint, encoder, to_engine_decoder
from minisgl_batch.sampling_params import SamplingParams
from minisgl_batch.structured_outputs import StructuredOutputsParams
from minisgl_batch.tokenizer import (
    ChatOptions,
    ModelTokenizer,
    PromptInput,
    ResolvedRequest,
    StopRules,
    derive_seed,
    resolve_request,
    resolve_requests,
)


@pytest.fixture
def tokenizer(chatml_folder: Path) -> ModelTokenizer:
    (chatml_folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "eos_token_id": [0, 2]}')
    return ModelTokenizer.load(chatml_folder)


def resolve(
    tokenizer: ModelTokenizer, *layers: SamplingParams, num_tokens: int = 10, max_len: int = 100, row_index: int = 0
) -> ResolvedRequest:
    ids = np.arange(num_tokens, dtype=np.int32) % tokenizer.vocab_size
    return resolve_request(tokenizer, ids, *layers, max_len=max_len, job_seed=5, row_index=row_index)


def test_layers_from_row_to_neutral(tokenizer: ModelTokenizer) -> None:
    row, job = SamplingParams(temperature=0.1, seed=3), SamplingParams(temperature=0.2, top_p=0.9, max_tokens=7)
    sampling = resolve(tokenizer, row, job).sampling
    assert sampling == EngineSampling(
        max_tokens=7, temperature=0.1, top_k=20, top_p=0.9, min_p=0.0, seed=3, sample_index=0, stop_ids=(0, 2)
    )


def test_nothing_given(tokenizer: ModelTokenizer) -> None:
    request = resolve(tokenizer)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.6, 20, 1.0, 0.0)
    assert sampling.max_tokens == 90  # what the context leaves
    assert request.stops == StopRules()


def test_stops(tokenizer: ModelTokenizer) -> None:
    params = SamplingParams(stop="END", stop_token_ids=(30, 2), include_stop_str_in_output=True)
    request = resolve(tokenizer, params)
    assert request.sampling.stop_ids == (0, 2, 30)
    assert request.stops == StopRules(strings=("END",), token_ids=frozenset({30}), include_in_output=True)


def test_ignored_eos_can_still_be_a_stop_token(tokenizer: ModelTokenizer) -> None:
    request = resolve(tokenizer, SamplingParams(ignore_eos=True, stop_token_ids=(2,)))
    assert request.sampling.stop_ids == (2,)
    assert request.stops.token_ids == frozenset({2})


def test_answers_alone_begin_without_their_first_space(strict_folder: Path) -> None:
    tokenizer = ModelTokenizer.load(strict_folder)
    dog = [int(token) for token in tokenizer.encode_prompt("dog") if token > 2]
    user, begun = {"role": "user", "content": "the"}, {"role": "assistant", "content": "the"}

    def text(prompt: PromptInput, **given: Any) -> str:
        params = SamplingParams(**given)
        (ids,) = tokenizer.encode_inputs([prompt], options=[ChatOptions.of(params)])
        assert not isinstance(ids, RequestError)
        request = resolve_request(tokenizer, ids, params, max_len=100, job_seed=5, row_index=0, prompt=prompt)
        assert request.detokenizer is not None
        return request.detokenizer.decode_full(dog)

    assert text([user]) == "dog"  # as transformers decodes it
    assert text("the") == text(tokenizer.encode_prompt("the").tolist()) == " dog"
    assert text([user, begun], continue_final_message=True) == " dog"
    assert text([user], structured_outputs={"choice": [" dog"]}) == " dog"  # the grammar asks for it


def test_constraints(tokenizer: ModelTokenizer) -> None:
    job = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]), n=2)
    request = resolve(tokenizer, job)
    grammar = {"grammars": [{"lark_grammar": 'start: CHOICE\nCHOICE: "a"'}]}
    assert request.constraint == Constraint(json.dumps(grammar))
    message = AddRequests([request.message(7)])
    assert to_engine_decoder.decode(encoder.encode(message)) == message
    assert resolve(tokenizer, SamplingParams(structured_outputs=StructuredOutputsParams()), job).constraint is None


def test_reasoning_is_not_constrained(chatml_folder: Path, byte_level_tokenizer: Tokenizer) -> None:
    """Where it is split off, and its marks are tokens of their own: this tokenizer has one of them."""
    job = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True), split_reasoning=True)
    plain = Constraint('{"grammars":[{"json_schema":{"type":"object"}}]}')
    assert resolve(ModelTokenizer.load(chatml_folder), job).constraint == plain
    both = Tokenizer.from_str(byte_level_tokenizer.to_str())
    both.add_tokens([AddedToken("</think>", normalized=False)])
    both.save(str(chatml_folder / "tokenizer.json"))
    sizes = {"vocab_size": both.get_vocab_size(), "max_position_embeddings": 100}
    (chatml_folder / "config.json").write_text(json.dumps(sizes))
    tokenizer = ModelTokenizer.load(chatml_folder)

    def constraint(text: str, **given: bool) -> Constraint | None:
        ids = tokenizer.encode_prompt(text)
        return resolve_request(
            tokenizer, ids, SamplingParams(**given), job, max_len=100, job_seed=5, row_index=0
        ).constraint

    marks = [(both.token_to_id(mark),) for mark in ("<think>", "</think>")]
    may_reason = Constraint(plain.grammar, *marks)
    assert constraint("a") == may_reason
    assert constraint("a<think>\n") == msgspec.structs.replace(may_reason, in_reasoning=True)
    assert constraint("a<think>\n\n</think>\n\n") == plain  # as templates switch it off
    assert constraint("a", split_reasoning=False) == plain


def test_what_changes_logits(tokenizer: ModelTokenizer) -> None:
    job = SamplingParams(presence_penalty=1, logit_bias={"7": 3, "5": -1.5}, min_tokens=4, bad_words=["dog"])
    request = resolve(tokenizer, SamplingParams(repetition_penalty=1.2, frequency_penalty=-1, stop="x"), job)
    sampling = request.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.0, -1.0, 1.2)
    assert sampling.logit_bias == ((5, -1.5), (7, 3.0))
    assert sampling.min_tokens == request.stops.min_tokens == 4
    assert sampling.bad_words == tokenizer.encode_words(("dog",))
    assert sampling.num_rules == 2 + len(sampling.stop_ids) + sum(map(len, sampling.bad_words))
    assert (sampling.has_penalty, sampling.num_adjusted, sampling.reads_tokens) == (True, None, True)


def test_nothing_changes_logits_by_default(tokenizer: ModelTokenizer) -> None:
    sampling = resolve(tokenizer).sampling
    assert (sampling.num_rules, sampling.num_adjusted, sampling.reads_tokens) == (0, 0, False)


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ([SamplingParams(min_tokens=6), SamplingParams(max_tokens=5)], "min_tokens: must be at most max_tokens"),
        ([SamplingParams(logit_bias={10**6: 1})], r"logit_bias: ids of this model are in \[0, \d+\), 1000000 isn't"),
        ([SamplingParams(bad_words=["dog " * 3000])], "come to .* more than 2048"),
    ],
)
def test_parameters_that_cannot_be_served(
    tokenizer: ModelTokenizer, layers: list[SamplingParams], problem: str
) -> None:
    with pytest.raises(RequestError, match=problem) as caught:
        resolve(tokenizer, *layers)
    assert caught.value.error_type == "invalid_request"


def test_a_row_may_turn_off_the_jobs_log_probabilities(tokenizer: ModelTokenizer) -> None:
    row, job = SamplingParams(logprobs=False), SamplingParams(logprobs=3, prompt_logprobs=2)
    sampling = resolve(tokenizer, row, job).sampling
    assert (sampling.num_logprobs, sampling.num_prompt_logprobs) == (-1, 2)


def test_something_must_be_left_to_generate(tokenizer: ModelTokenizer) -> None:
    tokenizer.vocab_size = 60
    every = SamplingParams(stop_token_ids=tuple(range(60)), min_tokens=1)
    with pytest.raises(RequestError, match="are all of the model's 60 tokens: nothing is left to generate"):
        resolve(tokenizer, every)
    assert resolve(tokenizer, SamplingParams(min_tokens=0), every).sampling.min_tokens == 0
    assert len(resolve(tokenizer, SamplingParams(stop_token_ids=tuple(range(59))), every).sampling.stop_ids) == 59


def test_top_k_minus_one_keeps_all(tokenizer: ModelTokenizer) -> None:
    assert resolve(tokenizer, SamplingParams(top_k=-1)).sampling.top_k == 0


def test_max_tokens_is_cut_to_the_context(tokenizer: ModelTokenizer) -> None:
    assert resolve(tokenizer, SamplingParams(max_tokens=10_000)).sampling.max_tokens == 90
    assert resolve(tokenizer, SamplingParams(max_tokens=10_000), num_tokens=99).sampling.max_tokens == 1


def test_samples_share_all_but_their_index(tokenizer: ModelTokenizer) -> None:
    request = resolve(tokenizer, SamplingParams(n=3, prompt_logprobs=1), row_index=8)
    assert request.sampling.seed == derive_seed(5, 8)
    sent = to_engine_decoder.decode(encoder.encode(AddRequests([request.message(40, [0, 2])])))
    assert isinstance(sent, AddRequests)
    (prompt,) = sent.prompts
    assert [(r.uid, r.sample_index) for r in prompt.requests] == [(40, 0), (41, 2)]
    np.testing.assert_array_equal(np.frombuffer(prompt.prompt_ids, dtype="<i4"), request.prompt_ids)
    first, other = map(prompt.sampling_of, prompt.requests)
    assert first == request.sampling
    assert other == msgspec.structs.replace(first, sample_index=2, num_prompt_logprobs=-1)


def test_rules_travel_once_for_all_samples(tokenizer: ModelTokenizer) -> None:
    rules = SamplingParams(logit_bias=dict.fromkeys(range(60), 1.0), n=1024)
    alone, all_of_them = (
        len(encoder.encode(resolve(tokenizer, rules).message(0, samples))) for samples in ([0], range(1024))
    )
    assert all_of_them < alone + 1024 * 10


def test_seeds_never_change() -> None:
    """A dataset made again by a later release must come out the same: these values are a promise."""
    assert derive_seed(0, 0) == 1041621211125469266
    assert derive_seed((1 << 63) - 1, 9_999_999) == 4560638005209661407


def test_seeds_differ_by_job_and_row() -> None:
    seeds = {derive_seed(job, row) for job in range(40) for row in range(40)}
    assert len(seeds) == 1600
    assert all(0 <= seed < 1 << 63 for seed in seeds)


@pytest.mark.parametrize("num_tokens", [100, 101, 400])
def test_prompt_without_room_for_output(tokenizer: ModelTokenizer, num_tokens: int) -> None:
    with pytest.raises(RequestError) as caught:
        resolve(tokenizer, num_tokens=num_tokens)
    assert caught.value.error_type == "prompt_too_long"
    assert f"{num_tokens} tokens" in str(caught.value)
    assert "100" in str(caught.value)


@pytest.mark.parametrize(
    ("truncate", "num_tokens", "kept"),
    [
        ("left", 80, range(80)),
        ("left", 81, range(1, 81)),
        ("right", 81, range(80)),
        ("left", 400, range(320, 400)),
        ("right", 400, range(80)),
    ],
)
def test_a_cut_prompt_leaves_room_for_all_of_max_tokens(
    tokenizer: ModelTokenizer, truncate: Any, num_tokens: int, kept: range
) -> None:
    request = resolve(tokenizer, SamplingParams(truncate=truncate, max_tokens=20), num_tokens=num_tokens)
    assert request.prompt_ids.tolist() == list(kept)
    assert request.sampling.max_tokens == 20


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        (SamplingParams(truncate="left"), "400 tokens and the engine has room for 100 .*: truncate needs max_tokens"),
        (SamplingParams(truncate="right", max_tokens=100), "of which max_tokens takes 100: nothing is left"),
        (SamplingParams(truncate="error", max_tokens=5), "400 tokens and the engine has .*, which leaves no room"),
    ],
)
def test_a_prompt_that_cannot_be_cut(tokenizer: ModelTokenizer, params: SamplingParams, problem: str) -> None:
    with pytest.raises(RequestError, match=problem) as caught:
        resolve(tokenizer, params, num_tokens=400)
    assert caught.value.error_type == "prompt_too_long"


@pytest.mark.parametrize("choices", [None, ("a", "b")])
def test_whether_the_engine_or_the_model_has_no_room(
    tokenizer: ModelTokenizer, choices: tuple[str, ...] | None
) -> None:
    """A KV cache that is smaller than the context is the engine's."""
    params, context_len = SamplingParams(choices=choices), tokenizer.max_len
    with pytest.raises(RequestError, match=f"tokens and the context {context_len}.* a model with a longer context"):
        resolve(tokenizer, params, num_tokens=context_len, max_len=context_len)
    with pytest.raises(RequestError, match=f" has room for 32 of the context's {context_len}.* KV cache") as caught:
        resolve(tokenizer, params, num_tokens=32, max_len=32)
    assert "num_pages" in str(caught.value)
    assert "longer context" not in str(caught.value)


def test_truncate_without_max_tokens_leaves_prompts_that_fit(tokenizer: ModelTokenizer) -> None:
    request = resolve(tokenizer, SamplingParams(truncate="left"), num_tokens=99)
    assert (len(request.prompt_ids), request.sampling.max_tokens) == (99, 1)


def test_empty_prompt(tokenizer: ModelTokenizer) -> None:
    with pytest.raises(RequestError, match="empty") as caught:
        resolve(tokenizer, num_tokens=0)
    assert caught.value.error_type == "invalid_request"


def test_token_that_the_model_does_not_have(tokenizer: ModelTokenizer) -> None:
    ids = np.array([1, tokenizer.vocab_size], dtype=np.int32)
    with pytest.raises(RequestError, match="token 1 of the prompt"):
        resolve_request(tokenizer, ids, max_len=100, job_seed=0, row_index=0)


def test_many_at_once_are_as_each_by_itself(tokenizer: ModelTokenizer, rng: random.Random) -> None:
    """Of every kind, in their order, with errors in the places of those that can't be served."""
    job, chat = SamplingParams(temperature=0.5, max_tokens=3), [{"role": "user", "content": "the"}]
    bad_grammar = SamplingParams(structured_outputs=StructuredOutputsParams(grammar="start: foo"))
    wanted: list[tuple[PromptInput, SamplingParams, str]] = [
        ("the dog", SamplingParams(seed=7), ""),
        (chat, SamplingParams(n=2), ""),
        ([5, 6], SamplingParams(tools=({"type": "function"},)), "tools: only messages"),
        ([5, 6], SamplingParams(), ""),
        ([], SamplingParams(), "the prompt is empty"),
        ("the", bad_grammar, "structured_outputs: "),
    ]
    order = rng.sample(range(len(wanted)), len(wanted))
    inputs, rows, problems = zip(*(wanted[i] for i in order), strict=True)
    with closing(GrammarCheck()) as check:
        given = (tokenizer, inputs, rows, order)
        found = list(resolve_requests(*given, defaults=job, max_len=100, job_seed=5, system="be brief", check=check))
        unchecked = list(resolve_requests(*given, defaults=job, max_len=100, job_seed=5, system="be brief"))
    for prompt, row, problem, row_index, request, other in zip(
        inputs, rows, problems, order, found, unchecked, strict=True
    ):
        if problem:
            assert isinstance(request, RequestError)
            assert problem in str(request)
            assert isinstance(other, ResolvedRequest) == (row is bad_grammar)
            continue
        (ids,) = tokenizer.encode_inputs([prompt], system="be brief")
        assert not isinstance(ids, RequestError)
        alone = resolve_request(tokenizer, ids, row, job, max_len=100, job_seed=5, row_index=row_index, prompt=prompt)
        assert isinstance(request, ResolvedRequest)
        assert request.message(0) == alone.message(0)
        assert request.num_samples == alone.num_samples
