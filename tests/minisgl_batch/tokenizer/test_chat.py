"""What a chat template gets beside the messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minisgl_batch.errors import RequestError
from minisgl_batch.sampling_params import SamplingParams
from minisgl_batch.tokenizer import ChatOptions, ModelTokenizer

USER = {"role": "user", "content": "Hi dog"}
BEGUN = {"role": "assistant", "content": "The quick "}
TOOLS = ({"type": "function", "function": {"name": "bark", "parameters": {"type": "object", "properties": {}}}},)
TEMPLATE = (
    "{% if tools %}[{% for tool in tools %}{{ tool | tojson }}{% endfor %}]{% endif %}"
    "{% if temper == 'bad' %}{{ raise_exception('no bad temper\\nplease') }}{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)


@pytest.fixture
def tokenizer(model_folder: Callable[..., Path]) -> ModelTokenizer:
    return ModelTokenizer.load(model_folder(tokenizer_config={"chat_template": TEMPLATE}))


def test_tools_and_variables_reach_the_template(tokenizer: ModelTokenizer) -> None:
    options = ChatOptions(tools=TOOLS, template_kwargs={"enable_thinking": False})
    text = tokenizer.render_chat([USER], options=options)
    assert json.loads(text[1 : text.index("]<user>")]) == TOOLS[0]
    assert text.endswith("]<user>Hi dog</><assistant><think></think>")
    assert tokenizer.render_chat([USER]) == "<user>Hi dog</><assistant>"


def test_a_last_message_goes_on_as_it_was_written(tokenizer: ModelTokenizer) -> None:
    options = ChatOptions(continue_final_message=True)
    assert tokenizer.render_chat([USER, BEGUN], options=options) == "<user>Hi dog</><assistant>The quick "


def test_each_input_has_its_own(tokenizer: ModelTokenizer) -> None:
    bad = ChatOptions(template_kwargs={"temper": "bad"})
    plain, refused, text = tokenizer.encode_inputs(
        [[USER], [USER], "dog"], options=[ChatOptions(), bad, ChatOptions(continue_final_message=True)]
    )
    assert not isinstance(plain, RequestError)
    assert plain.tolist() == tokenizer.encode_chat([USER]).tolist()
    assert str(refused) == "the model's chat template refuses the messages: no bad temper"
    assert str(text).startswith("continue_final_message: only messages are rendered")


@pytest.mark.parametrize("messages", [[USER], [BEGUN, USER]])
def test_only_an_answer_can_go_on(tokenizer: ModelTokenizer, messages: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestError, match="must be an assistant's, and is of user") as caught:
        tokenizer.render_chat(messages, options=ChatOptions(continue_final_message=True))
    assert caught.value.error_type == "invalid_request"


def test_a_row_says_more_than_its_job() -> None:
    job = SamplingParams(tools=TOOLS, chat_template_kwargs={"a": 1, "b": 2}, continue_final_message=True)
    assert ChatOptions.of(SamplingParams(), job) == ChatOptions(TOOLS, {"a": 1, "b": 2}, True)
    row = SamplingParams(tools=(), chat_template_kwargs={"a": 3}, continue_final_message=False)
    assert ChatOptions.of(row, job) == ChatOptions((), {"a": 3}, False)
