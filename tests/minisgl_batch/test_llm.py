"""The in-process LLM with the demo model: every kind of prompt, streams, stops, errors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_batch import LLM, SamplingParams
from minisgl_batch.errors import InvalidParameterError, ModelError, RequestError, UsageError
from tests.minisgl_batch.models.overflowing import SPOILER, save_overflowing

QUESTION = "What is 17 + 25?"
MESSAGES = [{"role": "user", "content": QUESTION}]
EXAMPLES = Path(__file__).parents[2] / "examples" / "prompts.jsonl"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", dtype="float32", seed=0)


def example_messages(num_rows: int) -> list[list[dict[str, str]]]:
    lines = EXAMPLES.read_text(encoding="utf-8").splitlines()[:num_rows]
    return [json.loads(line)["messages"] for line in lines]


def test_text_messages_and_ids_are_prompts(llm: LLM) -> None:
    ids = llm.tokenizer.encode_chat(MESSAGES).tolist()
    for prompt in (MESSAGES, ids, [MESSAGES], [ids]):
        (output,) = llm.generate(prompt, progress=False)
        assert output.outputs[0].text == "42"
        assert output.outputs[0].finish_reason == "stop"
        assert output.prompt_token_ids == ids
    outputs = llm.generate([QUESTION, MESSAGES, ids], progress=False)
    assert [output.prompt for output in outputs] == [QUESTION, MESSAGES, ids]
    assert len(llm.generate([], progress=False)) == 0


def test_outputs_come_in_the_order_of_prompts(llm: LLM) -> None:
    prompts = [[{"role": "user", "content": f"What is {a} + 1?"}] for a in range(10, 60)]
    outputs = llm.chat(prompts, progress=False)
    assert [output.outputs[0].text for output in outputs] == [str(a + 1) for a in range(10, 60)]


def test_second_call_is_served_from_the_cache(llm: LLM) -> None:
    (messages,) = example_messages(1)
    first, second = (llm.generate(messages, progress=False)[0] for _ in range(2))
    assert first.outputs == second.outputs
    assert second.num_cached_tokens == (len(second.prompt_token_ids) - 1) // 16 * 16


def test_streamed_text_is_the_generated_text(llm: LLM) -> None:
    prompts = example_messages(40)
    texts = [""] * len(prompts)
    finished = {}
    for event in llm.stream(prompts):
        assert event.prompt_index not in finished
        texts[event.prompt_index] += event.text
        if event.finished is not None:
            finished[event.prompt_index] = event.finished
    outputs = [output.outputs[0] for output in llm.generate(prompts, progress=False)]
    assert [finished[i] for i in range(len(prompts))] == outputs
    assert texts == [output.text for output in outputs]


def test_leaving_a_stream_ends_its_requests(llm: LLM) -> None:
    params = SamplingParams(ignore_eos=True, max_tokens=500)
    for event in llm.stream([QUESTION] * 5, params):
        assert event.finished is None
        break
    assert llm.stats().num_running == 0
    assert llm.generate(MESSAGES, progress=False)[0].outputs[0].text == "42"


def test_samples_differ_and_seeds_repeat(llm: LLM) -> None:
    params = SamplingParams(n=8, temperature=5.0, seed=3, max_tokens=12, ignore_eos=True)
    (first,), (second,) = (llm.generate(QUESTION, params, progress=False) for _ in range(2))
    assert [sample.index for sample in first.outputs] == list(range(8))
    assert len({sample.text for sample in first.outputs}) == 8
    assert first.outputs == second.outputs


def test_samples_share_their_prompt(llm: LLM) -> None:
    """It is computed once, but for the last tokens that fill no page."""
    (messages,) = example_messages(1)
    ids = [7, *llm.tokenizer.encode_chat(messages).tolist() * 3]  # in no cache yet
    before = llm.stats()
    llm.generate(ids, SamplingParams(n=4, temperature=1.0, max_tokens=2), progress=False)
    after = llm.stats()
    num_computed = (after.prompt_tokens - before.prompt_tokens) - (after.cached_tokens - before.cached_tokens)
    assert num_computed == len(ids) + 3 * (len(ids) - (len(ids) - 1) // 16 * 16)


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 5, 9)]
    outputs = llm.generate([QUESTION] * 3, params, progress=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 9]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    with pytest.raises(UsageError, match="2 were given for 3 prompts"):
        llm.generate([QUESTION] * 3, params[:2], progress=False)


def test_stop_string_ends_a_row_and_names_itself(llm: LLM) -> None:
    (output,) = llm.generate(MESSAGES, SamplingParams(stop=["2"]), progress=False)
    sample = output.outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("4", "stop", "2")
    params = SamplingParams(stop="2", include_stop_str_in_output=True)
    assert llm.generate(MESSAGES, params, progress=False)[0].outputs[0].text == "42"


def test_stop_token_ends_a_row(llm: LLM) -> None:
    token_ids = llm.generate(MESSAGES, progress=False)[0].outputs[0].token_ids
    (output,) = llm.generate(MESSAGES, SamplingParams(stop_token_ids=[token_ids[1]]), progress=False)
    assert output.outputs[0].token_ids == token_ids[:2]
    assert output.outputs[0].stop_reason == token_ids[1]


def test_a_cut_prompt_is_told_as_it_was_read(llm: LLM) -> None:
    ids = llm.tokenizer.encode_chat(MESSAGES).tolist()
    params = SamplingParams(truncate="left", max_tokens=4)
    prompts = [[5] * llm.max_seq_len + ids, ids]
    cut, whole = llm.generate(prompts, params, progress=False)
    assert cut.prompt_token_ids == prompts[0][-(llm.max_seq_len - 4) :]
    assert whole.prompt_token_ids == ids
    # Without max_tokens a text ends with the context.
    (output,) = llm.generate([[*cut.prompt_token_ids, 7]], SamplingParams(ignore_eos=True), progress=False)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (3, "length")


def test_an_answer_that_goes_on(llm: LLM) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "4"}]
    (output,) = llm.chat(begun, progress=False, continue_final_message=True)
    assert output.outputs[0].text == "2"
    with pytest.raises(RequestError, match="prompt 0: continue_final_message: the last message must be"):
        llm.chat(MESSAGES, SamplingParams(continue_final_message=True), progress=False)
    with pytest.raises(RequestError, match=r"prompt 1: tools: only messages .*: give messages, to LLM\.chat$"):
        llm.generate([MESSAGES, QUESTION], SamplingParams(tools=({"name": "f"},)), progress=False)


def test_reasoning_that_the_prompt_opens(llm: LLM) -> None:
    params = SamplingParams(split_reasoning=True, max_tokens=5, ignore_eos=True)
    prompts = ["17 + 25 = <think>\n", "17 + 25 ="]
    thinking, plain = (output.outputs[0] for output in llm.generate(prompts, params, progress=False))
    assert thinking.raw_text is not None
    assert thinking.reasoning_text == thinking.raw_text.strip() != ""
    assert thinking.text == ""
    assert (plain.reasoning_text, plain.raw_text) == ("", plain.text)
    streamed = {0: "", 1: ""}
    for event in llm.stream(prompts, params):
        assert event.prompt_index == 0 or not event.reasoning_text
        streamed[event.prompt_index] += event.reasoning_text + event.text
    assert streamed == {0: thinking.reasoning_text, 1: plain.text}


def test_long_tails_are_cut(llm: LLM) -> None:
    two = llm.get_tokenizer().convert_tokens_to_ids("2")
    endless = {"logit_bias": {two: 100.0}, "max_tokens": 1000}
    guarded = SamplingParams(**endless, repetition_guard=16)
    late = SamplingParams(**endless, row_timeout=0.001)
    outputs = [output.outputs[0] for output in llm.generate([QUESTION] * 2, [guarded, late], progress=False)]
    assert [output.finish_reason for output in outputs] == ["repetition", "timeout"]
    assert outputs[0].text == "2" * 16
    assert set(outputs[1].text) == {"2"}


def test_what_changes_logits(llm: LLM) -> None:
    """42 is what the model says, as "4" and "2"."""

    def text(**fields: Any) -> str:
        (output,) = llm.generate(MESSAGES, SamplingParams(max_tokens=6, **fields), progress=False)
        return output.outputs[0].text

    four, two = llm.get_tokenizer().convert_tokens_to_ids(["4", "2"])
    assert text() == "42"
    assert "4" not in text(bad_words=["4"])
    assert not text(bad_words=["42"]).startswith("42")
    assert text(logit_bias={two: 100}) == "2" * 6
    assert text(logit_bias={two: 100}, frequency_penalty=2, presence_penalty=2, stop_token_ids=[four]).startswith("22")
    assert len(text(min_tokens=6)) > 2
    assert text(stop=["4", "2"], min_tokens=1) == "4"


def test_logprobs_as_vllm_has_them(llm: LLM) -> None:
    params = SamplingParams(logprobs=2, prompt_logprobs=1, n=2, temperature=1.0, max_tokens=3, ignore_eos=True)
    (output,) = llm.generate(QUESTION, params, progress=False)
    for sample in output.outputs:
        assert sample.logprobs is not None
        assert len(sample.logprobs) == 3
        for token, entries in zip(sample.token_ids, sample.logprobs, strict=True):
            assert entries[token].decoded_token == llm.get_tokenizer().decode([token])
            assert {1, 2} <= {entry.rank for entry in entries.values()} <= {1, 2, entries[token].rank}
            assert sum(math.exp(entry.logprob) for entry in entries.values()) < 1 + 1e-4
        chosen = [entries[token].logprob for token, entries in zip(sample.token_ids, sample.logprobs, strict=True)]
        assert sample.cumulative_logprob == pytest.approx(sum(chosen))
    prompt_logprobs = output.prompt_logprobs
    assert prompt_logprobs is not None
    assert prompt_logprobs[0] is None
    assert [token in entries for token, entries in zip(output.prompt_token_ids[1:], prompt_logprobs[1:], strict=True)]
    (plain,) = llm.generate(QUESTION, SamplingParams(max_tokens=1), progress=False)
    assert (plain.prompt_logprobs, plain.outputs[0].logprobs, plain.outputs[0].cumulative_logprob) == (None, None, None)


def test_a_prompt_of_one_token_has_no_logprobs_of_its_own(llm: LLM) -> None:
    (output,) = llm.generate([[5]], SamplingParams(max_tokens=1, prompt_logprobs=3), progress=False)
    assert output.prompt_logprobs == [None]


def test_unservable_prompt_is_named_and_nothing_runs(llm: LLM) -> None:
    steps = llm.stats().num_steps
    for bad, problem in (("", "empty"), ([1] * 5000, "context"), ([10**6], "1024"), ([], "messages|empty")):
        with pytest.raises(RequestError, match=f"prompt 1.*({problem})"):
            llm.generate([QUESTION, bad], progress=False)
    assert llm.stats().num_steps == steps
    assert not llm._outputs._live  # the prompt before it is forgotten
    assert llm.generate(MESSAGES, progress=False)[0].outputs[0].text == "42"


def test_prompts_as_vllm_has_them(llm: LLM) -> None:
    ids = llm.tokenizer.encode_chat(MESSAGES).tolist()
    assert QUESTION in llm.get_tokenizer().decode(ids)
    params = SamplingParams(max_tokens=1)
    for prompt in ({"prompt": QUESTION}, {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}]):
        (output,) = llm.generate(prompt, sampling_params=params, progress=False)
        assert len(output.outputs[0].token_ids) == 1
        assert output.prompt == (QUESTION if "prompt" in prompt else ids)
    outputs = llm.generate([{"prompt": QUESTION}, {"prompt_token_ids": ids}], [params, params], progress=False)
    assert [output.prompt for output in outputs] == [QUESTION, ids]


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ({"prompt": QUESTION, "multi_modal_data": {}}, "must hold prompt or prompt_token_ids and nothing else"),
        ({"prompt": [1, 2]}, "prompt must be a text, not a list"),
        ({"prompt_token_ids": "1 2"}, "prompt_token_ids must be token ids, not a string"),
        ([{"role": "x", "content": "a"}], r"messages\[0\].role must be one of"),
        (None, "must be a text, token ids or chat messages, not null"),
        ([{"role": "user"}], r"messages\[0\].content is missing"),
    ],
)
def test_what_is_no_prompt(llm: LLM, bad: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=f"^prompt 1: {problem}"):
        llm.generate([QUESTION, bad], progress=False)
    with pytest.raises(RequestError, match=f"^prompt 0: {problem}"):
        llm.generate([bad], progress=False)
    with pytest.raises(UsageError, match="must be a prompt or a list of prompts, not a number"):
        llm.generate(5, progress=False)  # type: ignore[arg-type]


def test_what_is_no_chat(llm: LLM) -> None:
    for bad in (QUESTION, MESSAGES[0], None):
        with pytest.raises(UsageError, match="chat: messages must be a list such as"):
            llm.chat(bad, progress=False)  # type: ignore[arg-type]
    for worse in ([MESSAGES, QUESTION], [MESSAGES, [1, 2]]):
        with pytest.raises(RequestError, match=r"^prompt 1: must be a list of chat messages, not a"):
            llm.chat(worse, progress=False)
    with pytest.raises(RequestError, match=r"^prompt 0: messages"):
        llm.chat([{"role": "x"}], progress=False)


def test_an_overflow_ends_its_row_alone_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(str(save_overflowing(tmp_path / "model")), dtype="float16") as llm:
        prompts = ["1 + 1 =", f"1 {SPOILER} 1 =", f"2 {SPOILER}"]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=3), progress=False)
        assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "error"]
        (score,) = llm.score([prompts[1]], ["1", "2"], progress=False)
        assert (score.outputs[0].finish_reason, score.outputs[0].choices) == ("error", None)
    told = [record.getMessage() for record in caplog.records if "overflowed in float16" in record.getMessage()]
    assert [message.partition(":")[0] for message in told] == ["prompt 1", "prompt 0"]


def test_overlap_loop_gives_the_same_answers(llm: LLM) -> None:
    prompts = example_messages(30)
    overlapped = LLM("demo", dtype="float32", overlap=True, max_running=7, max_prefill_tokens=33, page_size=4)
    assert [output.outputs for output in overlapped.chat(prompts, progress=False)] == [
        output.outputs for output in llm.chat(prompts, progress=False)
    ]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": "/no/such/folder"}, ModelError, "/no/such/folder"),
        ({"model": "demo", "page_size": 0}, InvalidParameterError, "page_size"),
        ({"model": "demo", "max_seq_len": 10**6}, InvalidParameterError, "2048"),
        ({"model": "demo", "num_pages": 2, "max_seq_len": 64}, InvalidParameterError, "don't fit"),
        ({"model": "demo", "attention_backend": "magic"}, InvalidParameterError, "torch"),
        ({"model": None}, InvalidParameterError, "model: must be a name or a folder"),
        ({"model": ""}, InvalidParameterError, "model: must be a name or a folder"),
        ({"model": "demo", "tensor_parallel_size": 1}, InvalidParameterError, "no argument of LLM; did you mean tp?"),
        ({"model": "demo", "gpu_memory_utilization": 0.5}, InvalidParameterError, "did you mean memory_ratio?"),
        ({"model": "demo", "max_model_len": 64}, InvalidParameterError, "did you mean max_seq_len?"),
        ({"model": "demo", "quantisation": "fp8"}, InvalidParameterError, "did you mean quantization?"),
        ({"model": "demo", "enforce_eager": True}, InvalidParameterError, "for True give cuda_graph_max_bs=0"),
        ({"model": "demo", "enable_prefix_caching": False}, InvalidParameterError, 'for False give cache="naive"'),
        ({"model": "demo", "trust_remote_code": True}, InvalidParameterError, "argument of LLM; leave it out"),
        ({"model": "demo", "tp": "2"}, InvalidParameterError, "tp: must be a whole number, got '2'"),
        ({"model": "demo", "memory_ratio": "0.5"}, InvalidParameterError, "memory_ratio: must be a number"),
        ({"model": "demo", "dtype": "bf16"}, InvalidParameterError, "dtype: must be one of auto, float32, .*'bf16'"),
        ({"model": "demo", "dtype": torch.float16}, InvalidParameterError, "dtype: must be one of"),
        ({"model": "demo", "cache": "lru"}, InvalidParameterError, "cache: must be one of radix, naive"),
        ({"model": "demo", "overlap": "no"}, InvalidParameterError, "overlap: must be true or false"),
        (
            {"model": "demo", "device": "tpu"},
            InvalidParameterError,
            "device: must be one of auto, cpu, cuda, got 'tpu'",
        ),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLM(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["generate", "chat", "score"])
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("use_tqdm", "is no argument of {}; did you mean progress?"),
        ("Progress", "is no argument of {}; did you mean progress?"),
        ("lora_request", "is no argument of {}"),
    ],
)
def test_arguments_that_there_are_not(llm: LLM, method: str, name: str, problem: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        getattr(llm, method)(["a"], ["b"], **{name: False})
    assert (caught.value.field, caught.value.reason) == (name, problem.format(method))


@pytest.mark.parametrize(
    ("seed", "problem"),
    [
        ("a", "must be a whole number, got 'a'"),
        (1.5, "must be a whole number, got 1.5"),
        (2**63, f"must be between 0 and {2**63 - 1}, got {2**63}"),
        (-1, f"must be between 0 and {2**63 - 1}, got -1"),
    ],
)
def test_seeds_that_are_none_are_refused_at_once(seed: Any, problem: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        LLM("demo", seed=seed)
    assert (caught.value.field, caught.value.reason) == ("seed", problem)


def test_prompts_by_other_names(llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match=r"^prompt_token_ids: .* generate: give the ids for"):
        llm.generate(prompt_token_ids=[[1, 2]])
    with pytest.raises(InvalidParameterError, match=r"^prompt: .* generate; did you mean prompts\?"):
        llm.generate(prompt="a")
    with pytest.raises(UsageError, match="prompts: must be a prompt or a list of prompts, not null"):
        llm.generate()


@pytest.mark.parametrize("tools", ["x", {"name": "f"}, 5, ["x"], [5]])
def test_tools_that_are_none_are_told_as_they_were_given(llm: LLM, tools: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        llm.chat(MESSAGES, tools=tools)
    assert str(caught.value) == f"tools: must be a list of objects, got {tools!r}"


@pytest.mark.parametrize("method", ["generate", "chat"])
def test_sampling_parameters_are_no_arguments(llm: LLM, method: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        getattr(llm, method)(["a"], temperature=0)
    assert str(caught.value) == f"temperature: is no argument of {method}: give SamplingParams(temperature=...)"


def test_a_closed_llm_says_so() -> None:
    closed = LLM("demo")
    closed.close()
    for use in (closed.stats, lambda: closed.generate("a"), lambda: next(closed.stream("a"))):
        with pytest.raises(UsageError, match="this LLM is closed"):
            use()


@pytest.mark.parametrize("params", [5, {"temperature": 0}, [{"temperature": 0}]])
def test_sampling_params_of_another_type_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(UsageError, match="sampling_params: must be SamplingParams"):
        llm.generate("a", params)
