"""Checks the shape of what a row asks: a prompt, chat messages or token ids.

Knows nothing of lines, sampling or models. Called by the row reader.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from minisgl_batch.other_fields import nearest
from minisgl_batch.sampling_params import MAX_TOKEN_ID
from minisgl_jobs.faults import FieldError, as_text, kind, show
from minisgl_jobs.fields import MESSAGE_FIELDS, ROLES
from minisgl_jobs.jsonl import nested_too_deeply

_PLAIN_MESSAGE = {"role", "content"}
_ROLES = frozenset(ROLES)
_TokenIds = list[Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]]


def check_prompt(value: Any, field: str) -> str:
    """A prompt's text, as it is."""
    if not isinstance(value, str):
        hint = "write one row for each prompt" if isinstance(value, list) else as_text(value)
        if isinstance(value, list) and value and all(type(item) is int for item in value):
            hint = "give token ids as prompt_token_ids"
        raise FieldError(field, f"must be a string, not {kind(value)}", hint)
    if not value:
        raise FieldError(field, "is empty", "give at least one character, or remove the row")
    return value


def check_token_ids(value: Any, field: str) -> list[int]:
    """Token ids, each a whole number from 0."""
    if not isinstance(value, list):
        raise FieldError(field, f"must be a list of token ids, not {kind(value)}", "write it as [1, 2, 3]")
    if not value:
        raise FieldError(field, "is empty", "give at least one token id, or remove the row")
    try:
        return msgspec.convert(value, _TokenIds)
    except msgspec.ValidationError:
        place, item = next((i, v) for i, v in enumerate(value) if type(v) is not int or not 0 <= v <= MAX_TOKEN_ID)
        raise FieldError(
            f"{field}[{place}]", f"must be a whole number from 0, not {show(item)}", "correct the token id"
        ) from None


def check_messages(value: Any, field: str) -> list[dict[str, Any]]:
    """Chat messages as the chat template gets them: content is text (text parts are joined by line breaks)."""
    if not isinstance(value, list):
        raise FieldError(
            field, f"must be a list, not {kind(value)}", 'write it as [{"role": "user", "content": "..."}]'
        )
    if not value:
        raise FieldError(field, "is empty", "give at least one message, or remove the row")
    return [_check_message(message, f"{field}[{i}]") for i, message in enumerate(value)]


def _check_message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise FieldError(path, f"must be an object, not {kind(message)}", 'write {"role": "user", "content": "..."}')
    if not message.keys() <= MESSAGE_FIELDS:
        unknown = next(field for field in message if field not in MESSAGE_FIELDS)
        near = nearest(unknown, MESSAGE_FIELDS)
        hint = f"did you mean {near}?" if near else "remove it"
        raise FieldError(f"{path}.{unknown}", "isn't a field of messages", hint)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        problem = f"must be one of {', '.join(ROLES)}, not {show(role)}" if role is not None else "is missing"
        raise FieldError(f"{path}.role", problem, "say whose message it is")
    content = message.get("content")
    if isinstance(content, str) and message.keys() == _PLAIN_MESSAGE and (content or role != "user"):
        return message
    return _check_rare_message(message, role, content, path)


def _check_rare_message(message: dict[str, Any], role: str, content: Any, path: str) -> dict[str, Any]:
    """A message with text parts, tools or other rare fields; nulls are left out of what comes back."""
    checked = {field: value for field, value in message.items() if value is not None}
    if "tool_calls" in checked:
        _check_tool_calls(checked["tool_calls"], role, f"{path}.tool_calls")
    for field in ("name", "tool_call_id", "reasoning_content", "refusal"):
        if not isinstance(checked.get(field, ""), str):
            value = checked[field]
            raise FieldError(f"{path}.{field}", f"must be a string, not {kind(value)}", as_text(value))
    if content is None and checked.get("tool_calls"):
        return checked
    if content is None:
        raise FieldError(f"{path}.content", "is null" if "content" in message else "is missing", "give the text")
    checked["content"] = content if isinstance(content, str) else _join_parts(content, f"{path}.content")
    if role == "user" and not checked["content"]:
        raise FieldError(f"{path}.content", "is empty", "give at least one character, or remove the message")
    return checked


def _join_parts(parts: Any, path: str) -> str:
    if not isinstance(parts, list):
        raise FieldError(path, f"must be a string or a list of text parts, not {kind(parts)}", as_text(parts))
    texts: list[str] = []
    for i, part in enumerate(parts):
        if not isinstance(part, dict) or not isinstance(part_type := part.get("type"), str):
            raise FieldError(f"{path}[{i}]", "must be a text part", 'write {"type": "text", "text": "..."}')
        if part_type != "text":
            raise FieldError(f"{path}[{i}].type", f"is {show(part_type)}; only text is supported", "remove the part")
        if not isinstance(text := part.get("text"), str):
            raise FieldError(f"{path}[{i}].text", f"must be a string, not {kind(text)}", as_text(text))
        texts.append(text)
    return "\n".join(texts)


def _check_tool_calls(calls: Any, role: str, path: str) -> None:
    """Tool calls of a conversation so far; the chat template renders them, so only the outer shape is checked."""
    if role != "assistant":
        raise FieldError(path, f"stands in a message of {role}", "only messages of assistant call tools")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise FieldError(path, "must be a list of objects", "write the calls as the API answered them")
    try:
        msgspec.msgpack.encode(calls)
    except OverflowError:
        raise FieldError(path, "holds a whole number of more than 64 bits", "write it as a string") from None
    except RecursionError:
        raise nested_too_deeply(path) from None
