"""Chats as text: messages rendered by a model's chat template, up to where the model goes on.

Knows nothing of token ids. Called by the tokenizer.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from jinja2 import TemplateError

from minisgl_batch.errors import ModelError, RequestError
from minisgl_batch.sampling_params import CHAT_OPTIONS, SamplingParams

Message: TypeAlias = Mapping[str, Any]

# What a chat template's own code raises over messages that it wasn't written for.
TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
PROBE_S = 20.0  # far more than a template takes for two messages, on a busy machine too


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a chat template gets beside the messages; see `SamplingParams`.

    Attributes:
        tools: functions that the model may call.
        template_kwargs: the template's own variables.
        continue_final_message: the answer begins with the last message, which is an assistant's.
    """

    tools: tuple[dict[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] | None = None
    continue_final_message: bool = False

    @classmethod
    def of(cls, *layers: SamplingParams) -> ChatOptions:
        """Those of layers of parameters, the most specific first."""
        given = {
            field: next((value for layer in layers if (value := getattr(layer, field)) is not None), None)
            for field in CHAT_OPTIONS
        }
        return cls(given["tools"] or (), given["chat_template_kwargs"] or None, bool(given["continue_final_message"]))

    def refuse_without_messages(self) -> None:
        """Raise RequestError if there are any: they say nothing about a prompt that no template renders."""
        given = {
            "tools": self.tools,
            "chat_template_kwargs": self.template_kwargs,
            "continue_final_message": self.continue_final_message,
        }
        for field, value in given.items():
            if value:
                raise RequestError(
                    "invalid_request",
                    f"{field}: only messages are rendered by the chat template: give messages, to LLM.chat",
                )


NO_OPTIONS = ChatOptions()


def render_chat(
    hf_tokenizer: Any, messages: Sequence[Message], system: str | None = None, options: ChatOptions = NO_OPTIONS
) -> str:
    """The text of a chat up to where the model's answer begins, or goes on.

    Args:
        hf_tokenizer: has a chat template.
        system: put in front of messages that have no system message.

    Raises:
        RequestError: the template can't render these messages; says why.
    """
    chat = [_plain_message(message, index) for index, message in enumerate(messages)]
    if not chat:
        raise RequestError("invalid_request", "messages is empty")
    if options.continue_final_message and chat[-1]["role"] != "assistant":
        raise RequestError(
            "invalid_request",
            f"continue_final_message: the last message must be an assistant's, and is of {chat[-1]['role']}",
        )
    if system is not None and not any(message["role"] == "system" for message in chat):
        chat.insert(0, {"role": "system", "content": system})
    try:
        text: str = hf_tokenizer.apply_chat_template(
            chat,
            tools=list(options.tools) or None,
            tokenize=False,
            add_generation_prompt=not options.continue_final_message,
            continue_final_message=options.continue_final_message,
            **(options.template_kwargs or {}),
        )
    except TEMPLATE_ERRORS as error:
        raise RequestError(
            "invalid_request", f"the model's chat template refuses the messages: {first_line(error)}"
        ) from error
    return text


def render_probe(hf_tokenizer: Any, content: str) -> str | None:
    """The text of a chat of two messages with this content, a user's and an assistant's; None if it is refused.

    Raises:
        ModelError: the template doesn't come to an end, which would hold up all rows.
    """
    chat = [{"role": role, "content": content} for role in ("user", "assistant")]
    texts: SimpleQueue[str | None] = SimpleQueue()

    def render() -> None:
        try:
            texts.put(hf_tokenizer.apply_chat_template(chat, tokenize=False))
        except Exception:  # noqa: BLE001 - whatever it is, the rows that it concerns will say it
            texts.put(None)

    threading.Thread(target=render, name="chat template", daemon=True).start()  # nothing else can end it
    try:
        return texts.get(timeout=PROBE_S)
    except Empty:
        raise ModelError(
            f"{hf_tokenizer.name_or_path}: the chat template has taken {PROBE_S:g} s for two short messages: it may "
            "never come to an end"
        ) from None


def _plain_message(message: Message, index: int) -> dict[str, Any]:
    """The message with its content as one string, which is what templates of text models take."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError("invalid_request", f"messages[{index}] must be an object with a role")
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "\n".join(_text_of_part(part, f"messages[{index}].content[{i}]") for i, part in enumerate(content))
    elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise RequestError("invalid_request", f"messages[{index}].content must be text, got {type(content).__name__}")
    return {**message, "content": content}


def _text_of_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError("invalid_request", f"{where} is of type {kind!r}: only text parts can be used")


def first_line(error: Exception) -> str:
    """The first line of what an error says, with the next one if it announces that, else its name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
