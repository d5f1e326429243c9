"""Each kind of bad row gives one fault that names the field and the line, and says what to do."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from minisgl_batch.errors import Fault, InvalidInputError, InvalidParameterError
from minisgl_batch.sampling_params import SamplingParams
from minisgl_jobs.model import Row
from minisgl_jobs.rows import ReadOptions, RowReader, read_rows
from minisgl_jobs.sources import open_input

GOOD = b'{"prompt": "fine"}'


def openai(url: str = "/v1/chat/completions", **body: object) -> str:
    fields = {"model": "m", **({"messages": [{"role": "user", "content": "a"}]} if "chat" in url else {}), **body}
    return json.dumps({"custom_id": "r", "method": "POST", "url": url, "body": fields})


def message(**fields: object) -> str:
    return json.dumps({"messages": [{"role": "system", "content": ""}, fields]})


# line, field at fault, a word of the problem, a word of the hint
FAULTS: list[tuple[str | bytes, str, str, str]] = [
    # The line as a whole
    ('{"prompt": "a"', "", "isn't valid JSON", "one JSON object"),
    ("{'prompt': 'a'}", "", "isn't valid JSON", "double quotes"),
    ('{"prompt": "a",}', "", "isn't valid JSON", "comma"),
    ('{"prompt": "a", "ignore_eos": True}', "", "isn't valid JSON", "true, false"),
    ('{"prompt": "a\tb"}', "", "isn't valid JSON", "\\t"),
    ('{"prompt": "a', "", "isn't valid JSON", "close the string"),
    (b'{"prompt": "a\x00b"}', "", "isn't valid JSON", "NUL"),
    ('{"prompt": "a"} {"prompt": "b"}', "", "column 17", "each line"),
    ("hello", "", "isn't valid JSON", "one JSON object"),
    ('["a"]', "", "not a list", "one JSON object"),
    ('"a"', "", "not a string", "one JSON object"),
    ("null", "", "not null", "one JSON object"),
    ("12", "", "not a number", "one JSON object"),
    (b'{"prompt": "caf\xe9"}', "", "byte 16 is 0xe9", "UTF-8"),
    ('{"metadata": ' + '{"a":' * 100_000 + "1" + "}" * 100_001, "", "nested too deeply", "flatten"),
    ('{"prompt": "a", "seed": 1' + "0" * 5000 + "}", "", "thousands of digits", "string"),
    # Prompts
    ("{}", "prompt", "is missing", "messages"),
    ('{"prompt": null}', "prompt", "is null", "messages"),
    ('{"prompt": ""}', "prompt", "is empty", "remove the row"),
    ('{"prompt": 5}', "prompt", "must be a string, not a number", "quotes"),
    ('{"prompt": {"a": 1}}', "prompt", "not an object", "give a text"),
    ('{"prompt": ["a", "b"]}', "prompt", "not a list", "one row for each"),
    ('{"prompt": [1, 2]}', "prompt", "not a list", "prompt_token_ids"),
    ('{"prompt": "a", "messages": []}', "messages", "stands beside prompt", "keep one"),
    ('{"prompt_token_ids": [1], "messages": []}', "prompt_token_ids", "stands beside messages", "keep one"),
    (r'{"prompt": "a \ud800"}', "prompt", "surrogate", "pair"),
    (r'{"prompt": "a", "metadata": {"k": [1, "\udc00"]}}', "metadata.k[1]", "surrogate", "pair"),
    (r'{"prompt": "a", "\ud83d": 1}', r"\ud83d", "surrogate", "pair"),
    ('{"prompt": "a", "prompt": "b"}', "prompt", "twice", "keep one"),
    ('{"prompt": "a", "metadata": {"k": {"x": 1, "x": 1}}}', "metadata.k.x", "twice", "keep one"),
    # Token ids
    ('{"prompt_token_ids": []}', "prompt_token_ids", "is empty", "at least one"),
    ('{"prompt_token_ids": "1"}', "prompt_token_ids", "not a string", "[1, 2, 3]"),
    ('{"prompt_token_ids": [1, -1]}', "prompt_token_ids[1]", "from 0, not -1", "correct"),
    ('{"prompt_token_ids": [true]}', "prompt_token_ids[0]", "not true", "correct"),
    ('{"prompt_token_ids": [1, 2, 3.0]}', "prompt_token_ids[2]", "not 3.0", "correct"),
    ('{"prompt_token_ids": [1, "2"]}', "prompt_token_ids[1]", 'not "2"', "correct"),
    ('{"prompt_token_ids": [4294967296]}', "prompt_token_ids[0]", "4294967296", "correct"),
    # Messages
    ('{"messages": []}', "messages", "is empty", "at least one"),
    ('{"messages": "hi"}', "messages", "not a string", '[{"role"'),
    ('{"messages": ["hi"]}', "messages[0]", "not a string", '{"role"'),
    (message(content="a"), "messages[1].role", "is missing", "whose"),
    (message(role="bot", content="a"), "messages[1].role", "must be one of system", "whose"),
    (message(role=1, content="a"), "messages[1].role", "not 1", "whose"),
    (message(role="user"), "messages[1].content", "is missing", "give the text"),
    (message(role="user", content=None), "messages[1].content", "is null", "give the text"),
    (message(role="user", content=""), "messages[1].content", "is empty", "remove the message"),
    (message(role="user", content=[]), "messages[1].content", "is empty", "remove the message"),
    (message(role="user", content=7), "messages[1].content", "not a number", "quotes"),
    (message(role="user", contents="a"), "messages[1].contents", "isn't a field", "did you mean content?"),
    (message(role="user", text="a"), "messages[1].text", "isn't a field", "did you mean content?"),
    (message(role="user", value="a"), "messages[1].value", "isn't a field", "did you mean content?"),
    (message(role="user", content=["a"]), "messages[1].content[0]", "text part", '"type"'),
    (message(role="user", content=[{"type": "image_url"}]), "messages[1].content[0].type", "only text", "remove"),
    (message(role="user", content=[{"type": "text", "text": 1}]), "messages[1].content[0].text", "string", "quotes"),
    (message(role="user", content="a", name=5), "messages[1].name", "not a number", "quotes"),
    (message(role="user", content="a", tool_calls=[{}]), "messages[1].tool_calls", "of user", "assistant"),
    (message(role="assistant", tool_calls="f()"), "messages[1].tool_calls", "list of objects", "the API"),
    (message(role="assistant", tool_calls=[{"n": 1 << 70}]), "messages[1].tool_calls", "64 bits", "string"),
    # Sampling
    ('{"prompt": "a", "max_tokens": 0}', "max_tokens", "got 0", "leave it out"),
    ('{"prompt": "a", "max_tokens": -1}', "max_tokens", "got -1", "leave it out"),
    ('{"prompt": "a", "max_tokens": 1e9}', "max_tokens", "must be between", "leave it out"),
    ('{"prompt": "a", "max_tokens": 1000000000}', "max_tokens", "must be between", "leave it out"),
    ('{"prompt": "a", "max_tokens": "16"}', "max_tokens", "got '16'", "without quotes"),
    ('{"prompt": "a", "temperature": "hot"}', "temperature", "got 'hot'", "correct it"),
    ('{"prompt": "a", "stop_token_ids": "5"}', "stop_token_ids", "got '5'", "correct it"),
    ('{"prompt": 5}', "prompt", "not a number", 'in quotes: "5"'),
    ('{"prompt": "a", "max_tokens": 1.5}', "max_tokens", "got 1.5", "leave it out"),
    ('{"prompt": "a", "sampling_params": {"n": 4.5}}', "sampling_params.n", "whole number, got 4.5", "correct"),
    ('{"prompt": "a", "max_tokens": true}', "max_tokens", "whole number", "leave it out"),
    ('{"prompt": "a", "temperature": NaN}', "temperature", "is NaN", "null"),
    ('{"prompt": "a", "metadata": {"x": [-Infinity]}}', "metadata.x[0]", "is -Infinity", "null"),
    ('{"prompt": "a", "temperature": 1e400}', "temperature", "got inf", "correct"),
    ('{"prompt": "a", "temperature": -0.1}', "temperature", "[0, 100]", "correct"),
    ('{"prompt": "a", "top_p": 0}', "top_p", "(0, 1]", "correct"),
    ('{"prompt": "a", "top_k": 2.5}', "top_k", "whole number", "correct"),
    ('{"prompt": "a", "n": 0}', "n", "between 1", "correct"),
    ('{"prompt": "a", "seed": -1}', "seed", "between 0", "correct"),
    ('{"prompt": "a", "stop": [""]}', "stop", "empty string", "correct"),
    ('{"prompt": "a", "stop": [1]}', "stop", "list of strings", "correct"),
    ('{"prompt": "a", "stop_token_ids": 5}', "stop_token_ids", "list", "correct"),
    ('{"prompt": "a", "stop_token_ids": [5, "x"]}', "stop_token_ids", "got 'x'", "correct"),
    ('{"prompt": "a", "presence_penalty": 2.5}', "presence_penalty", "[-2, 2]", "correct"),
    ('{"prompt": "a", "frequency_penalty": "1"}', "frequency_penalty", "got '1'", "without quotes"),
    ('{"prompt": "a", "repetition_penalty": 0}', "repetition_penalty", "[0.01, 100]", "correct"),
    ('{"prompt": "a", "logit_bias": "x"}', "logit_bias", "must be an object", '"50256": -100'),
    ('{"prompt": "a", "logit_bias": {"the": 1}}', "logit_bias", "whole number, got 'the'", '"50256": -100'),
    (json.dumps({"prompt": "a", "logit_bias": dict.fromkeys(range(2049), 1)}), "logit_bias", "at most 2048", "fewer"),
    (json.dumps({"prompt": "a", "choices": [str(i) for i in range(1025)]}), "choices", "at most 1024", "fewer"),
    (json.dumps({"prompt": "a", "stop": ["x"] * 65}), "stop", "at most 64 strings", "fewer"),
    ('{"prompt": "a", "logit_bias": {"5": 101}}', "logit_bias", "[-100, 100]", '"50256": -100'),
    ('{"prompt": "a", "logit_bias": {"5": 1, "05": 2}}', "logit_bias", "names token 5 twice", '"50256": -100'),
    ('{"prompt": "a", "min_tokens": 6, "max_tokens": 5}', "min_tokens", "at most max_tokens, which is 5", "correct"),
    ('{"prompt": "a", "bad_words": [""]}', "bad_words", "empty string", "correct"),
    ('{"prompt": "a", "ignore_eos": 1}', "ignore_eos", "true or false", "correct"),
    ('{"prompt": "a", "truncate": "middle"}', "truncate", "one of error, left, right, got 'middle'", "correct"),
    ('{"prompt": "a", "truncate_prompt_tokens": 9}', "truncate_prompt_tokens", "isn't supported", '"truncate": "left"'),
    ('{"prompt": "a", "sampling_params": 5}', "sampling_params", "object", "max_tokens"),
    ('{"prompt": "a", "sampling_params": {"top_p": 2}}', "sampling_params.top_p", "(0, 1]", "correct"),
    ('{"prompt": "a", "sampling_params": {"max_token": 2}}', "sampling_params.max_token", "known", "max_tokens?"),
    ('{"prompt": "a", "top_p": 1, "sampling_params": {"top_p": 0.5}}', "sampling_params.top_p", "contradicts", "keep"),
    ('{"prompt": "a", "max_tokens": 1, "max_completion_tokens": 2}', "max_completion_tokens", "contradicts", "keep"),
    # Unknown and unsupported fields
    ('{"prompt": "a", "max_token": 5}', "max_token", "isn't a known field", "did you mean max_tokens?"),
    ('{"prompt": "a", "maxTokens": 5}', "maxTokens", "isn't a known field", "did you mean max_tokens?"),
    ('{"prompt": "a", "max_new_tokens": 5}', "max_new_tokens", "isn't a known field", "did you mean max_tokens?"),
    ('{"prompt": "a", "Temperature": 5}', "Temperature", "isn't a known field", "did you mean temperature?"),
    ('{"text": "a"}', "text", "isn't a known field", "`prompt_column` text (or `template`)"),
    ('{"conversations": []}', "conversations", "isn't a known field", "did you mean messages?"),
    ('{"prompt": "a", "id": 5}', "id", "isn't a known field", "did you mean custom_id?"),
    ('{"prompt": "a", "label": "x"}', "label", "isn't a known field", "under metadata"),
    ('{"prompt": "a", "length_penalty": 0.5}', "length_penalty", "isn't supported (it is 0.5)", "remove"),
    ('{"prompt": "a", "logprobs": 21}', "logprobs", "must be between 0 and 20", "correct"),
    ('{"prompt": "a", "logprobs": "5"}', "logprobs", "got '5'", "without quotes"),
    ('{"prompt": "a", "prompt_logprobs": true}', "prompt_logprobs", "whole number", "correct"),
    ('{"prompt": "a", "top_logprobs": 2}', "top_logprobs", "says nothing without logprobs", '"logprobs": true'),
    ('{"prompt": "a", "logprobs": false, "top_logprobs": 2}', "top_logprobs", "without logprobs", '"logprobs": true'),
    ('{"prompt": "a", "logprobs": 1, "top_logprobs": 2}', "top_logprobs", "contradicts", '"logprobs": true'),
    (openai(logprobs=True, top_logprobs=21), "body.top_logprobs", "between 0 and 20", "correct"),
    ('{"prompt": "a", "suffix": 0}', "suffix", "isn't supported (it is 0)", "into the prompt"),
    ('{"prompt": "a", "stream": true}', "stream", "isn't supported", "tail"),
    ('{"prompt": "a", "best_of": 4}', "best_of", "isn't supported (it is 4)", "use n with logprobs"),
    ('{"prompt": "a", "use_beam_search": true}', "use_beam_search", "isn't supported", "no beam search: use n"),
    ('{"prompt": "a", "num_beams": 4}', "num_beams", "isn't supported", "no beam search: use n"),
    (
        '{"prompt": "a", "skip_special_tokens": false}',
        "skip_special_tokens",
        "isn't supported",
        "results with `token_ids`",
    ),
    ('{"prompt": "a", "detokenize": false}', "detokenize", "isn't supported", "outputs of LLM have the ids"),
    ('{"prompt": "a", "echo": true}', "echo", "isn't supported", "prompt_logprobs"),
    ('{"prompt": "a", "allowed_token_ids": [1]}', "allowed_token_ids", "isn't supported", "logit_bias"),
    ('{"prompt": "a", "no_repeat_ngram_size": 3}', "no_repeat_ngram_size", "isn't supported", "repetition_penalty"),
    ('{"prompt": "a", "do_sample": false}', "do_sample", "isn't supported", "temperature: 0"),
    ('{"prompt": "a", "min_new_tokens": 3}', "min_new_tokens", "isn't a known field", "did you mean min_tokens?"),
    ('{"prompt": "a", "sampling_params": {"best_of": 2}}', "sampling_params.best_of", "isn't supported", "use n"),
    ('{"prompt": "a", "choices": "yes"}', "choices", "must be a list of at least one text", 'write ["yes", "no"]'),
    ('{"prompt": "a", "choices": {"text": ["x"]}}', "choices", "must be a list", "`settings=False`"),
    ('{"prompt": "a", "choices": ["x", "x"]}', "choices", "holds 'x' twice", "write"),
    ('{"prompt": "a", "choices": ["x", null]}', "choices", "must be a string or a list of strings", "write"),
    ('{"prompt": "a", "choices": ["x"], "max_tokens": 1}', "max_tokens", "nothing is generated", "leave it out"),
    # Names and metadata
    ('{"prompt": "a", "custom_id": 7}', "custom_id", "must be a string, not a number", 'quotes: "7"'),
    ('{"prompt": "a", "custom_id": ""}', "custom_id", "is empty", "leave it out"),
    (r'{"prompt": "a", "custom_id": "a\u0000"}', "custom_id", "holds \\x00, which can't be printed", "a name"),
    ('{"prompt": "a", "metadata": "x"}', "metadata", "must be an object, not a string", "metadata"),
    ('{"prompt": "a", "model": 1}', "model", "must be a string", "quotes"),
    # OpenAI batch lines
    (openai("/v1/embeddings"), "url", '"/v1/embeddings"', "/v1/completions"),
    ('{"custom_id": "a", "method": "POST", "body": {}}', "url", "is missing", "/v1/chat/completions"),
    (openai().replace("POST", "GET"), "method", 'must be "POST", not "GET"', "correct"),
    ('{"url": "/v1/completions", "method": "POST"}', "body", "is missing", "model"),
    ('{"url": "/v1/completions", "body": []}', "body", "not a list", "model"),
    ('{"url": "/v1/completions", "body": {}, "max_tokens": 5}', "max_tokens", "OpenAI batch", "into body"),
    ('{"url": "/v1/completions", "boddy": {}}', "boddy", "OpenAI batch", "did you mean body?"),
    (openai(prompt="a"), "body.prompt", "doesn't belong to /v1/chat", "correct"),
    (openai(messages=None), "body.prompt", "is missing", "messages"),
    (openai("/v1/completions"), "body.prompt", "is missing", "messages"),
    (openai("/v1/completions", prompt=["a", "b"]), "body.prompt", "not a list", "one row for each"),
    (openai("/v1/completions", prompt=[1, -2]), "body.prompt[1]", "not -2", "correct"),
    (openai(max_tokens=0), "body.max_tokens", "got 0", "leave it out"),
    (openai(max_completion_tokens="9"), "body.max_completion_tokens", "'9'", "without quotes"),
    (openai(temprature=0), "body.temprature", "isn't a known field", "did you mean temperature?"),
    (openai(tools="x"), "body.tools", "list of objects", '[{"type": "function"'),
    (openai(tools=[{}], tool_choice="required"), "body.tool_choice", "isn't supported", "itself decides"),
    (openai(tools=[{}], tool_choice="none"), "body.tool_choice", "isn't supported", "body.tools"),
    (openai(tools=[{}], parallel_tool_calls=False), "body.parallel_tool_calls", "isn't supported", "body.tools"),
    (openai(reasoning_effort="low"), "body.reasoning_effort", "isn't supported", "chat_template_kwargs"),
    (openai(chat_template_kwargs="x"), "body.chat_template_kwargs", "must be an object", '"enable_thinking": false'),
    (
        openai(chat_template_kwargs={"messages": 1}),
        "body.chat_template_kwargs",
        "can't set messages",
        "enable_thinking",
    ),
    (
        openai(continue_final_message=True, add_generation_prompt=True),
        "body.add_generation_prompt",
        "contradicts body.continue_final_message",
        "one of them",
    ),
    (openai(add_generation_prompt=False), "body.add_generation_prompt", "isn't supported", "remove"),
    (openai(response_format={"type": "xml"}), "body.response_format", "must be an object whose type", "json_schema"),
    (
        openai(response_format={"type": "text"}, structured_outputs={"regex": "a"}),
        "body.structured_outputs",
        "contradicts body.response_format",
        "one of them",
    ),
    (openai(structured_outputs={"choice": []}), "body.structured_outputs", "at least one text", "regex"),
    ('{"prompt": "a", "json_schema": {}}', "json_schema", "isn't supported", 'structured_outputs: {"json": ...}'),
    ('{"prompt": "a", "choices": ["b"], "max_tokens": 5}', "max_tokens", "nothing is generated", "leave it out"),
    ('{"prompt": "a", "guided_json": {}}', "guided_json", "isn't supported", "structured_outputs"),
    (openai(messages=[{"role": "x", "content": "a"}]), "body.messages[0].role", "must be one of", "whose"),
    (openai(metadata=5), "body.metadata", "not a number", "metadata"),
    (openai(custom_id="x"), "body.custom_id", "isn't a known field", "metadata"),
]


@pytest.mark.parametrize(("line", "field", "problem", "hint"), FAULTS, ids=range(len(FAULTS)))
def test_fault_names_line_field_problem_and_remedy(
    rng: random.Random, line: str | bytes, field: str, problem: str, hint: str
) -> None:
    bad = line if isinstance(line, bytes) else line.encode()
    num_before = rng.randrange(3)
    items = list(read_rows([*[GOOD] * num_before, b"\r\n", bad, GOOD], file="in.jsonl"))

    fault = items[num_before]
    assert isinstance(fault, Fault)
    assert (fault.file, fault.line, fault.field) == ("in.jsonl", num_before + 2, field)
    assert problem in fault.problem
    assert hint in fault.hint
    rest = items[:num_before] + items[num_before + 1 :]
    assert [row.row_index for row in rest if isinstance(row, Row)] == [*range(num_before), num_before + 1]


@pytest.mark.parametrize("where", ["left", "right"])
def test_truncate_needs_to_know_how_much_room_to_make(where: Any) -> None:
    def read(job: SamplingParams, *rows: dict[str, Any]) -> list[Row | Fault]:
        return list(RowReader("rows", defaults=job).read([json.dumps({"prompt": "a"} | row).encode() for row in rows]))

    own, room, choices = {"truncate": where}, {"max_tokens": 2}, {"choices": ["a"]}
    (fault,) = read(SamplingParams(), own)
    assert isinstance(fault, Fault)
    assert (fault.field, fault.hint) == ("truncate", "give max_tokens, or leave it out")
    (nested,) = read(SamplingParams(), {"sampling_params": own})
    assert isinstance(nested, Fault)
    assert nested.field == "sampling_params.truncate"
    good = [own | room, own | choices, {}, {"truncate": "error"}]
    assert not any(isinstance(row, Fault) for row in read(SamplingParams(), *good))
    assert isinstance(read(SamplingParams(max_tokens=1), own)[0], Row)
    job = SamplingParams(truncate=where)
    assert all(isinstance(row, Row) for row in read(job, room, choices, {"truncate": "error"}))
    for row in ({}, {"top_k": 1}):
        with pytest.raises(InvalidParameterError, match="needs max_tokens"):  # once, as it is the job's
            read(job, room, row)
    assert isinstance(next(read_rows([json.dumps({"prompt": "a"} | own).encode()])), Row)  # a worker's reading


def test_too_long_line_is_a_fault_and_the_others_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("sources", "jsonl"):
        monkeypatch.setattr(f"minisgl_jobs.{module}.MAX_LINE_BYTES", 3 << 20)
    path = tmp_path / "in.jsonl"
    path.write_bytes(GOOD + b"\n" + b'{"prompt": "' + b"a" * (5 << 20) + b'"}\n' + GOOD)
    with open_input(path) as source:
        first, fault, last = read_rows(source)
    assert isinstance(first, Row)
    assert isinstance(fault, Fault)
    assert (fault.line, fault.problem) == (2, "is longer than 3 MiB")
    assert isinstance(last, Row)
    assert last.row_index == 2


def test_repeated_custom_id_names_the_first_line() -> None:
    lines = [
        b'{"custom_id": "a", "prompt": "x"}',
        b"",
        b'{"custom_id": "b", "prompt": ""}',
        b'{"custom_id": "b", "prompt": "y"}',
    ]
    items = list(read_rows([*lines, lines[0]]))
    faults = [item for item in items if isinstance(item, Fault)]
    assert [(fault.line, fault.field) for fault in faults] == [(3, "prompt"), (4, "custom_id"), (5, "custom_id")]
    assert faults[1].problem == '"b" stands on line 3 already'
    assert faults[2].problem == '"a" stands on line 1 already'


def test_all_faults_are_counted_and_the_first_are_shown(rng: random.Random) -> None:
    num_bad = rng.randint(21, 60)
    lines = [GOOD, *[b'{"prompt": ""}'] * num_bad, GOOD]
    reader = RowReader("prompts.jsonl")
    with pytest.raises(InvalidInputError) as caught:
        list(reader.rows(lines))

    error = caught.value
    assert error.exit_code == 2
    assert (error.num_faults, len(error.faults)) == (num_bad, 20)
    text = str(error).splitlines()
    assert text[0] == f"prompts.jsonl: {num_bad} of {num_bad + 2} rows can't be used"
    assert text[1].split() == ["line", "field", "problem", "what", "to", "do"]
    assert text[2].split()[:4] == ["2", "prompt", "is", "empty"]
    assert text[-1] == f"... and {num_bad - 20} more"


def test_user_data_in_a_fault_is_cut_and_escaped() -> None:
    noisy = json.dumps({"prompt": "a", "\x1b[31m": 1}).encode()
    long = json.dumps({"prompt": "a", "x" * 10_000: 1}).encode()
    value = json.dumps({"prompt": "a", "stop": ["y" * 10_000, 1]}).encode()
    for fault in read_rows([noisy, long, value]):
        assert isinstance(fault, Fault)
        assert "\x1b" not in fault.field
        assert max(len(fault.field), len(fault.problem), len(fault.hint)) < 300


def test_recorded_faults_become_error_rows_that_keep_their_names() -> None:
    lines = [
        b'{"custom_id": "a", "prompt": "x", "metadata": {"k": 1.50}}',
        b'{"custom_id": "b", "prompt": "", "metadata": {"k": 2}}',
        b'{"custom_id": "a", "prompt": "y"}',
        b'{"custom_id": 5, "prompt": "z"}',
        b"not json",
    ]
    reader = RowReader("in", ReadOptions(on_error="record"))
    rows = list(reader.rows(lines))
    assert [row.row_index for row in rows] == [0, 1, 2, 3, 4]
    assert [row.custom_id for row in rows] == ["a", "b", "a", "", ""]
    assert [row.metadata for row in rows] == ['{"k": 1.50}', '{"k": 2}', "", "", ""]
    assert rows[0].error is None
    assert {row.error.type for row in rows[1:] if row.error} == {"invalid_request"}
    assert rows[1].error is not None
    assert rows[1].error.message.startswith("line 2: prompt is empty (")
    assert reader.faults.num_faults == 4


def test_input_without_rows_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"in\.jsonl holds no rows"):
        list(RowReader("in.jsonl").rows([b"\n", b"  \r\n"]))
