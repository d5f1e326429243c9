"""What good rows become: shapes, sampling overrides, templates and options."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minisgl_batch.errors import Fault, InvalidInputError, InvalidParameterError
from minisgl_batch.sampling_params import SamplingParams
from minisgl_batch.structured_outputs import StructuredOutputsParams
from minisgl_jobs.model import Row
from minisgl_jobs.rows import ReadOptions, RowReader, read_rows
from minisgl_jobs.sources import object_lines


def read(*lines: str | dict[str, Any], **options: Any) -> list[Row]:
    encoded = [(line if isinstance(line, str) else json.dumps(line)).encode() for line in lines]
    return list(RowReader("in", ReadOptions(**options)).rows(encoded))


def read_fault(line: dict[str, Any], **options: Any) -> Fault:
    (item,) = read_rows([json.dumps(line).encode()], ReadOptions(**options))
    assert isinstance(item, Fault)
    return item


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_whole_numbers_may_be_floats() -> None:
    """As pandas' to_json has a column of numbers with gaps."""
    first, second = read({"prompt": "a", "max_tokens": 4.0, "seed": None}, {"prompt": "b", "logprobs": True, "n": 2.0})
    assert (first.params, second.params) == (SamplingParams(max_tokens=4), SamplingParams(n=2, logprobs=0))


def test_each_shape_of_prompt() -> None:
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "Ahoj, světe 👩‍💻"}]
    rows = read({"prompt": "안녕"}, {"messages": messages}, {"prompt_token_ids": [0, 7, 2**31 - 1]})
    assert rows == [
        Row(row_index=0, prompt="안녕"),
        Row(row_index=1, messages=messages),
        Row(row_index=2, prompt_token_ids=[0, 7, 2**31 - 1]),
    ]


def test_sampling_at_the_top_and_nested() -> None:
    (row,) = read({"prompt": "a", "max_tokens": 5, "temperature": 1, "seed": None, "sampling_params": {"stop": ["x"]}})
    assert row.params == SamplingParams(max_tokens=5, temperature=1.0, stop=("x",))
    (row,) = read({"prompt": "a", "max_completion_tokens": 5, "max_tokens": 5, "stop": "end", "sampling_params": None})
    assert row.params == SamplingParams(max_tokens=5, stop="end")


def test_structured_outputs_of_vllm_and_openai() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    line = {"url": "/v1/chat/completions", "body": {"messages": user("hi"), "response_format": asked}}
    plain, nested, openai, free, any_object = read(
        {"prompt": "a", "structured_outputs": {"json": schema}},
        {"prompt": "a", "sampling_params": {"structured_outputs": {"json": schema}}},
        line,
        {"prompt": "a", "response_format": {"type": "text"}},
        {"prompt": "a", "response_format": {"type": "json_object"}},
    )
    assert plain.params == nested.params == openai.params
    assert plain.params.structured_outputs == StructuredOutputsParams(json=schema)
    assert list(plain.params.structured_outputs.json["properties"]) == ["b", "a"]  # the order of the answer
    assert free.params.structured_outputs == StructuredOutputsParams()
    assert any_object.params.structured_outputs == StructuredOutputsParams(json_object=True)


def test_metadata_keeps_its_text() -> None:
    text = '{"id": 123456789012345678901234567890, "x": 1.50, "y": 1e400, "k": [null, "\\u00e9"]}'
    plain, in_body = read(
        f'\ufeff {{"prompt": "a", "metadata" : {text} , "custom_id": "č"}}',
        f'{{"url": "/v1/completions", "body": {{"metadata": {text}, "prompt": "a"}}}}',
    )
    assert plain.metadata == in_body.metadata == text
    assert plain.custom_id == "č"


def test_openai_batch_lines() -> None:
    reader = RowReader("in")
    lines = [
        {
            "custom_id": "r1",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "gpt-x", "messages": user("hi"), "max_completion_tokens": 9, "user": "me", "n": 2},
        },
    ]
    rows = list(reader.rows(json.dumps(line).encode() for line in lines))
    assert rows == [Row(row_index=0, custom_id="r1", messages=user("hi"), params=SamplingParams(max_tokens=9, n=2))]
    reader = RowReader("in")
    lines = [
        {"url": "/v1/completions", "body": {"model": "gpt-x", "prompt": "Once", "max_tokens": 3, "echo": False}},
        {"url": "/v1/completions", "body": {"model": "other", "prompt": [5, 6]}},
    ]
    rows = list(reader.rows(json.dumps(line).encode() for line in lines))
    assert rows == [
        Row(row_index=0, prompt="Once", params=SamplingParams(max_tokens=3)),
        Row(row_index=1, prompt_token_ids=[5, 6]),
    ]
    assert reader.models == ["gpt-x", "other"]


def test_an_openai_batch_has_one_url() -> None:
    """Its output has one shape."""
    lines = [
        json.dumps({"url": "/v1/chat/completions", "body": {"messages": user("hi")}}),
        json.dumps({"url": "/v1/completions", "body": {"prompt": "hi"}}),
    ]
    _, fault = RowReader("in").read(line.encode() for line in lines)
    assert isinstance(fault, Fault)
    assert (fault.line, fault.field, fault.problem) == (2, "url", "isn't that of line 1, /v1/chat/completions")
    part = RowReader("in", first_row=256, is_whole=False)
    assert all(isinstance(row, Row) for row in part.read(line.encode() for line in lines))


def test_api_fields_that_change_nothing_are_passed_over() -> None:
    neutral = {
        "stream": False,
        "length_penalty": 1.0,
        "logprobs": None,
        "tool_choice": "none",
        "best_of": 1,
        "guided_json": None,
        "store": True,
    }
    (row,) = read({"prompt": "a", **neutral})
    assert row == Row(row_index=0, prompt="a")


def test_what_a_chat_template_gets() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = {"tools": tools, "tool_choice": "auto", "chat_template_kwargs": {"enable_thinking": False}}
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    rows = read(*({"messages": user("a"), **fields} for fields in (chat, going_on, {"tools": []})))
    assert [row.params for row in rows] == [
        SamplingParams(tools=tuple(tools), chat_template_kwargs={"enable_thinking": False}),
        SamplingParams(continue_final_message=True),
        SamplingParams(tools=()),
    ]


@pytest.mark.parametrize(
    ("fields", "num_logprobs"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"logprobs": 5, "top_logprobs": 5}, 5),
        ({"logprobs": 0}, 0),
        ({"logprobs": False}, False),
        ({"logprobs": False, "top_logprobs": 0}, False),
        ({"sampling_params": {"logprobs": False}}, False),
        ({"top_logprobs": None}, None),
        ({"sampling_params": {"logprobs": 3}}, 3),
    ],
    ids=str,
)
def test_logprobs_as_chats_completions_and_vllm_ask_for_them(
    fields: dict[str, Any], num_logprobs: int | bool | None
) -> None:
    (row,) = read({"prompt": "a", **fields})
    assert row.params.logprobs is num_logprobs


def test_text_parts_are_joined_and_tool_messages_stay() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    (row,) = read(
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    "name": None,
                },
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": ""},
            ]
        }
    )
    assert row.messages == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": ""},
    ]


def test_blank_lines_and_marks_are_no_rows() -> None:
    lines = [b"\xef\xbb\xbf\n", b'\xef\xbb\xbf{"prompt": "a"}\r\n', b" \t\r\n", b"\n", b'  {"prompt": "b"}  ', b"\r\n"]
    assert [(row.row_index, row.prompt) for row in RowReader("in").rows(lines)] == [(0, "a"), (1, "b")]


def test_limit_reads_no_line_more() -> None:
    def lines() -> Any:
        yield b'{"prompt": "a"}'
        yield b""
        yield b'{"prompt": "b"}'
        raise AssertionError("a line too many was read")

    assert [row.prompt for row in RowReader("in", ReadOptions(limit=2)).rows(lines())] == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Row(row_index=0, prompt="hi")),
        ({"chat": True}, Row(row_index=0, messages=user("hi"))),
        ({"system": "Be kind."}, Row(row_index=0, messages=user("hi"))),
        ({"template": "Say {prompt}"}, Row(row_index=0, messages=user("Say hi"))),
        ({"template": "Say {prompt}", "chat": False}, Row(row_index=0, prompt="Say hi")),
    ],
)
def test_prompts_become_chat_when_asked_or_implied(options: dict[str, Any], expected: Row) -> None:
    assert read({"prompt": "hi"}, **options) == [expected]


def test_system_message_needs_text() -> None:
    fault = read_fault({"prompt_token_ids": [1]}, system="Be kind.")
    assert (fault.field, fault.problem) == ("prompt_token_ids", "can't take the job's system message")


def test_template_fills_columns_and_leaves_settings() -> None:
    row = {"text": "a{b}", "n": 3, "tags": ["x", 1], "ok": True, "id": 9, "model": "m", "body": "B", "max_tokens": 4}
    (filled,) = read(row, template="{{{n}}} {text} {tags} {ok} {n}", chat=False)
    assert filled == Row(row_index=0, prompt='{3} a{b} ["x", 1] true 3', params=SamplingParams(max_tokens=4))


@pytest.mark.parametrize(
    ("row", "field", "problem"),
    [
        ({}, "text", "is missing; the template uses it"),
        ({"text": None}, "text", "is null; the template uses it"),
        ({"text": ""}, "prompt", "is empty"),
        ({"text": "a", "prompt": "b"}, "prompt", "stands beside a template"),
        ({"text": "a", "max_token": 5}, "max_token", "isn't a known field"),
        ({"text": "a", "max_new_tokens": 5}, "max_new_tokens", "isn't a known field"),
        ({"text": "a", "echo": True}, "echo", "isn't supported (it is true)"),
        ({"text": "a", "max_tokens": 0}, "max_tokens", "must be between 1 and 16777216, got 0"),
    ],
)
def test_rows_that_a_template_cannot_use(row: dict[str, Any], field: str, problem: str) -> None:
    fault = read_fault(row, template="{text}")
    assert (fault.field, fault.problem) == (field, problem)


@pytest.mark.parametrize(
    "template",
    ["plain", "{", "}", "{}", "{0.__class__}", "{a.b}", "{a[0]}", "{a!r}", "{a:>10}", "{a:{b}}", "", "{{a}}", "{a{b}}"],
)
def test_templates_that_are_refused(template: str) -> None:
    with pytest.raises(InvalidParameterError, match=r"^template: "):
        ReadOptions(template=template)


def test_options_that_contradict() -> None:
    for options in ({"limit": 0}, {"system": ""}, {"system": "x", "chat": False}, {"on_error": "recrod"}):
        with pytest.raises(InvalidParameterError):
            ReadOptions(**options)  # type: ignore[arg-type]


def test_chats_and_token_ids_of_a_program() -> None:
    chat = [{"role": "user", "content": "a"}]
    first, second, third, *faults = read_rows(object_lines([chat, "b", (3, 4), [], ["c"]]))
    assert first == Row(row_index=0, messages=chat)
    assert second == Row(row_index=1, prompt="b")
    assert third == Row(row_index=2, prompt_token_ids=[3, 4])
    assert [f.field for f in faults if isinstance(f, Fault)] == ["messages", "messages[0]"]
    (message,) = read_rows(object_lines(chat))  # one chat isn't a list of chats
    assert isinstance(message, Fault)
    assert (message.field, message.hint.partition("?")[0]) == ("role", "did you mean messages")


def test_rows_of_a_program_are_checked_alike() -> None:
    rows = ["a", {"prompt": "b", "max_tokens": 3}, {"prompt": "\ud800"}, {"prompt": "c", "top_p": float("nan")}]
    first, second, *faults = read_rows(object_lines(rows))
    assert first == Row(row_index=0, prompt="a")
    assert second == Row(row_index=1, prompt="b", params=SamplingParams(max_tokens=3))
    assert [(f.line, f.field) for f in faults if isinstance(f, Fault)] == [(3, "prompt"), (4, "top_p")]
    with pytest.raises(InvalidInputError, match="row 2"):
        list(object_lines(["a", {"prompt": object()}]))
