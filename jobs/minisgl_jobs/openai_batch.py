"""The envelope of the OpenAI batch format: {"custom_id", "method", "url", "body"}. Called by the row reader."""

from __future__ import annotations

from typing import Any

from minisgl_batch.other_fields import nearest
from minisgl_jobs.faults import FieldError, kind, show
from minisgl_jobs.fields import ROW_FIELDS
from minisgl_jobs.prompts import check_token_ids
from minisgl_jobs.settings import refuse_unknown

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
BODY_FIELDS = ROW_FIELDS - {"custom_id"}

_MARKS = frozenset({"method", "url", "body"})
_FIELDS = _MARKS | {"custom_id", "metadata"}


def is_envelope(fields: dict[str, Any]) -> bool:
    """Whether a row is a line of the OpenAI batch format."""
    return not _MARKS.isdisjoint(fields)


def open_envelope(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a line's body, named as in other rows.

    Raises:
        FieldError: it isn't a POST of an object to an endpoint that is served here, or has fields beside these.
    """
    for field in fields:
        if field not in _FIELDS:
            near = nearest(field, _FIELDS)
            hint = f"did you mean {near}?" if near else "move it into body, or under metadata"
            raise FieldError(field, "isn't a field of OpenAI batch lines", hint)
    url, method, body = fields.get("url"), fields.get("method", "POST"), fields.get("body")
    if url not in (CHAT_URL, COMPLETIONS_URL):
        problem = "is missing" if url is None else f"is {show(url)}"
        raise FieldError("url", problem, f"only {CHAT_URL} and {COMPLETIONS_URL} are served")
    if method != "POST":
        raise FieldError("method", f'must be "POST", not {show(method)}', "correct it")
    if not isinstance(body, dict):
        problem = "is missing" if body is None else f"must be an object, not {kind(body)}"
        raise FieldError("body", problem, 'write {"model": "...", "messages": [...]}')
    wanted, other = ("messages", "prompt") if url == CHAT_URL else ("prompt", "messages")
    if body.get(other) is not None:
        raise FieldError(
            f"body.{other}", f"doesn't belong to {url}, which takes {wanted}", "correct the url or the body"
        )
    if body.get("metadata") is not None and fields.get("metadata") is not None:
        raise FieldError("metadata", "stands beside body.metadata", "keep one of them")
    refuse_unknown(body, "body.", BODY_FIELDS)
    return _with_token_ids(body)


def _with_token_ids(body: dict[str, Any]) -> dict[str, Any]:
    """The API lets `prompt` be a list of token ids."""
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or not prompt or not all(type(item) is int for item in prompt):
        return body
    return {**body, "prompt": None, "prompt_token_ids": check_token_ids(prompt, "body.prompt")}
