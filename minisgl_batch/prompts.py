"""What the in-process `LLM` takes for prompts: checked, and brought to the three kinds that a tokenizer takes.

Messages are held to the same rules as those of rows. Knows nothing of models. Called by `llm`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

from minisgl_batch.errors import RequestError, UsageError
from minisgl_batch.tokenizer import PromptInput
from minisgl_jobs.faults import FieldError, kind
from minisgl_jobs.prompts import check_messages

Prompt: TypeAlias = PromptInput | Mapping[str, Any]
"""A text, token ids, chat messages, or vLLM's {"prompt": text} and {"prompt_token_ids": ids}."""

Prompts: TypeAlias = Prompt | Sequence[Prompt]

_KEYS = ("prompt", "prompt_token_ids")


def as_prompts(given: Prompts | None) -> list[PromptInput]:
    """One prompt or many as a list of texts, token ids and messages.

    Raises:
        UsageError: it isn't a list. RequestError: one is none of these; says which.
    """
    if given is None or not _has_items(given):
        raise UsageError(f"prompts: must be a prompt or a list of prompts, not {kind(given)}")
    return [_prompt(index, prompt) for index, prompt in enumerate(_as_many(given))]


def as_chats(given: Any) -> list[PromptInput]:
    """One chat or many as a list of messages.

    Raises:
        UsageError: it is something else. RequestError: one of them is; says which.
    """
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise UsageError(
            'chat: messages must be a list such as [{"role": "user", "content": "..."}], or a list of such lists, not '
            f"{kind(given)}; generate completes a text as it is"
        )
    chats = _as_many(given)
    for index, chat in enumerate(chats):
        if (
            isinstance(chat, str)
            or not isinstance(chat, Sequence)
            or not all(isinstance(item, Mapping) for item in chat)
        ):
            raise _invalid(index, f"must be a list of chat messages, not {kind(chat)}")
    return as_prompts(chats)


def _as_many(given: Prompts) -> Sequence[Prompt]:
    """A text, token ids, or messages are one prompt; other sequences are many."""
    if isinstance(given, str | Mapping):
        return [given]
    if len(given) and (isinstance(given[0], int) or (isinstance(given[0], Mapping) and not _is_wrapped(given[0]))):
        return [cast(Prompt, given)]
    return cast(Sequence[Prompt], given)


def _prompt(index: int, given: Prompt) -> PromptInput:
    if isinstance(given, Mapping):
        if len(given) != 1 or not _is_wrapped(given):
            raise _invalid(index, f"must hold {' or '.join(_KEYS)} and nothing else, got {', '.join(map(str, given))}")
        ((name, value),) = given.items()
        if isinstance(value, str) != (name == "prompt"):
            raise _invalid(index, f"{name} must be {'a text' if name == 'prompt' else 'token ids'}, not {kind(value)}")
        return cast(PromptInput, value)
    if not _has_items(given):
        raise _invalid(index, f"must be a text, token ids or chat messages, not {kind(given)}")
    if not isinstance(given, str) and len(given) and isinstance(given[0], Mapping):
        try:
            check_messages(list(given), "messages")
        except FieldError as error:
            raise _invalid(index, f"{error.field} {error.problem} ({error.hint})") from None
    return given


def _has_items(given: object) -> bool:
    """Whether it is a text, a list, an array or the like."""
    return hasattr(given, "__len__") and hasattr(given, "__getitem__")


def _is_wrapped(given: Mapping[str, Any]) -> bool:
    return any(name in given for name in _KEYS)


def _invalid(index: int, problem: str) -> RequestError:
    return RequestError("invalid_request", f"prompt {index}: {problem}")
