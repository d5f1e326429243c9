"""Reads what stands in a row beside its prompt: sampling parameters, custom_id, metadata; refuses what isn't known.

Ranges are checked by `SamplingParams` alone. Knows nothing of prompts or files. Called by the row reader.
"""

from __future__ import annotations

import json
from typing import Any

from minisgl_batch.errors import InvalidParameterError
from minisgl_batch.other_fields import UNSUPPORTED, is_tolerated, nearest, unsupported_hint
from minisgl_batch.sampling_params import CHAT_OPTIONS, MAX_ITEMS, WITH_CHOICES, SamplingParams
from minisgl_batch.structured_outputs import StructuredOutputsParams, read_response_format
from minisgl_batch.words import UNSAFE, one_line
from minisgl_jobs.faults import FieldError, as_text, kind, show
from minisgl_jobs.fields import PARAM_FIELDS, PROMPT_COLUMNS, PROMPT_FIELDS, ROW_FIELDS, SAMPLING_FIELDS
from minisgl_jobs.jsonl import raw_text

_OTHER_NAMES = {"max_completion_tokens": "max_tokens", "response_format": "structured_outputs"}
_PARAM_HINTS = {
    "choices": 'write ["yes", "no"]; a column that is data is passed over with `settings=False`',
    "chat_template_kwargs": 'write {"enable_thinking": false}',
    "logit_bias": 'write {"50256": -100}, with token ids as names',
    "max_tokens": "leave it out for as many tokens as the model's context allows",
    "structured_outputs": 'write {"json": {"type": "object", ...}}, {"regex": "..."} or {"choice": ["yes", "no"]}',
    "tools": 'write [{"type": "function", "function": {"name": ..., "parameters": ...}}]',
}
_NO_PARAMS = SamplingParams()


def read_custom_id(fields: dict[str, Any]) -> str:
    """The row's name, "" when it has none."""
    custom_id = fields.get("custom_id")
    if custom_id is None:
        return ""
    if not isinstance(custom_id, str):
        raise FieldError("custom_id", f"must be a string, not {kind(custom_id)}", as_text(custom_id))
    unsafe = UNSAFE.search(custom_id)
    if not custom_id or unsafe:
        problem = f"holds {one_line(unsafe[0])}, which can't be printed" if unsafe else "is empty"
        raise FieldError("custom_id", problem, "give a name that can be printed, or leave it out")
    return custom_id


def read_metadata(fields: dict[str, Any], line: bytes | None, *path: str) -> str:
    """The row's metadata as the JSON text that stands in the line, "" when it has none; of a table's row, as JSON."""
    metadata = fields.get("metadata")
    if metadata is None:
        return ""
    field = ".".join([*path, "metadata"])
    if not isinstance(metadata, dict):
        raise FieldError(field, f"must be an object, not {kind(metadata)}", 'write {"metadata": {"name": ...}}')
    return json.dumps(metadata, ensure_ascii=False) if line is None else raw_text(line, *path, "metadata")


def read_params(fields: dict[str, Any], prefix: str, defaults: SamplingParams | None = None) -> SamplingParams:
    """What the row says about sampling, at its own level and inside `sampling_params`; null is "not given".

    Args:
        defaults: the job's, which it must suit.

    Raises:
        InvalidParameterError: the job's `truncate` has no `max_tokens`, neither its own nor the row's.
    """
    if PARAM_FIELDS.isdisjoint(fields):
        _check_with_job(_NO_PARAMS, defaults, {}, prefix)
        return _NO_PARAMS
    nested = fields.get("sampling_params")
    if nested is not None and not isinstance(nested, dict):
        hint = 'write {"max_tokens": 16}'
        raise FieldError(f"{prefix}sampling_params", f"must be an object, not {kind(nested)}", hint)
    given: dict[str, Any] = {}
    origin: dict[str, str] = {}  # parameter -> where it stands in the row

    def take(field: str, value: Any, path: str) -> None:
        name = _OTHER_NAMES.get(field, field)
        if field == "response_format":
            value = _response_format(value, path)
        if name in given and given[name] != value:
            raise FieldError(path, f"contradicts {origin[name]}", "keep one of them")
        given[name], origin[name] = value, path

    for field, value in fields.items():
        if value is not None and field in PARAM_FIELDS and field not in ("sampling_params", "logprobs", "top_logprobs"):
            take(field, value, prefix + field)
    for field, value in _logprobs(fields, prefix).items():
        take("logprobs", value, prefix + field)
    if nested:
        path = f"{prefix}sampling_params."
        refuse_unknown(nested, path, SAMPLING_FIELDS)
        for field, value in nested.items():
            if value is not None and field in SAMPLING_FIELDS:
                take(field, value, path + field)
    try:
        params = SamplingParams(**given)
    except InvalidParameterError as error:
        is_scored = "choices" in given and error.field not in WITH_CHOICES
        hint = "leave it out" if is_scored else _params_hint(error.field, given[error.field])
        raise FieldError(origin[error.field], error.reason, hint) from None
    _check_with_job(params, defaults, origin, prefix)
    return params


def _check_with_job(row: SamplingParams, job: SamplingParams | None, origin: dict[str, str], prefix: str) -> None:
    """Make sure that a row's parameters suit the job's, and that it is known how much room `truncate` is to make."""
    if job is None:
        return
    try:
        merged = job if row is _NO_PARAMS else row.over(job)
    except InvalidParameterError as error:
        path = origin.get(error.field, prefix + error.field)
        raise FieldError(path, f"{error.reason} (with the job's options)", "change the row or the job") from None
    if merged.truncate in (None, "error") or merged.max_tokens is not None or merged.choices is not None:
        return
    problem = "needs max_tokens, to know how much room to make"
    if row.truncate is None:
        raise InvalidParameterError("truncate", f"{problem} where rows have none of their own: give `max_tokens`")
    raise FieldError(origin["truncate"], problem, "give max_tokens, or leave it out")


def check_chat_options(
    row: SamplingParams, job: SamplingParams, messages: list[dict[str, Any]] | None, prefix: str
) -> None:
    """Make sure that a row has the messages that its chat options, or the job's, are about."""
    for field in CHAT_OPTIONS:
        own = getattr(row, field)
        if not (getattr(job, field) if own is None else own):
            continue
        leave_out = f"leave out `{field}`" if own is None else "leave it out"
        if messages is None:
            # A chat that is made of a prompt has no assistant's message.
            make_chats = "" if field == "continue_final_message" else "make prompts chats with `chat`, "
            hint = f"give messages, {make_chats}or {leave_out}"
            raise FieldError(prefix + field, "is for messages, and the row has none", hint)
        if field == "continue_final_message" and (role := messages[-1]["role"]) != "assistant":
            problem = f"needs a last message of assistant, not of {role}"
            raise FieldError(prefix + field, problem, f"add how the answer begins, or {leave_out}")


def _response_format(value: Any, path: str) -> StructuredOutputsParams:
    try:
        return read_response_format(value)
    except InvalidParameterError as error:
        hint = 'write {"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}'
        raise FieldError(path, error.reason, hint) from None


def _logprobs(fields: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The field that says how many log-probabilities to give, and how many, if any.

    Completions and vLLM have the number in `logprobs`; chats have a flag there, and the number in `top_logprobs`.
    """
    asked, top = fields.get("logprobs"), fields.get("top_logprobs")
    if asked is True:
        return {"logprobs": 0} if top is None else {"top_logprobs": top}
    if asked is None or asked is False:
        if top is not None and (top != 0 or isinstance(top, bool)):
            raise FieldError(
                f"{prefix}top_logprobs", "says nothing without logprobs", 'write "logprobs": true beside it'
            )
        return {} if asked is None else {"logprobs": False}
    if top is not None and top != asked:
        raise FieldError(f"{prefix}top_logprobs", f"contradicts {prefix}logprobs", 'write "logprobs": true beside it')
    return {"logprobs": asked}


def _params_hint(field: str, value: Any) -> str:
    if isinstance(value, str) and _is_good(field, value):
        return "write it without quotes"
    if isinstance(value, list | dict) and len(value) > MAX_ITEMS.get(field, len(value)):
        return "give fewer"
    if field in _PARAM_HINTS:
        return _PARAM_HINTS[field]
    return "correct it, or leave it out for the job's default"


def _is_good(field: str, text: str) -> bool:
    """Whether what a text says would do."""
    try:
        SamplingParams(**{field: json.loads(text)})
    except (ValueError, RecursionError):
        return False
    return True


def refuse_unknown(fields: dict[str, Any], prefix: str, known: frozenset[str] = ROW_FIELDS) -> None:
    """Raise FieldError for the first field that is neither read nor known to make no difference."""
    if fields.keys() <= known:
        return
    for field, value in fields.items():
        if field in known or _makes_no_difference(prefix, field, value, fields):
            continue
        near = nearest(field, known)
        away = (
            "move it under metadata" if prefix else "move it under metadata, or copy it to the output: `keep_columns`"
        )
        hint = f"did you mean {near}? Otherwise {away}" if near else f"{away}, or remove it"
        if near in PROMPT_COLUMNS and not prefix:
            hint = f"did you mean {near}? Rename it, or say {PROMPT_COLUMNS[near]} {field} (or `template`)"
        raise FieldError(prefix + field, "isn't a known field", hint)


def settings_beside_template(columns: dict[str, Any]) -> dict[str, Any]:
    """The sampling settings among the columns that a template doesn't use; other columns are data and passed over.

    Raises:
        FieldError: a column is a mistyped or an unsupported setting, or a prompt of its own.
    """
    for field, value in columns.items():
        if field in PROMPT_FIELDS and value is not None:
            raise FieldError(field, "stands beside a template", f"remove it, or use {{{field}}} in the template")
        if field in ROW_FIELDS or _makes_no_difference("", field, value, columns):
            continue
        if near := nearest(field, PARAM_FIELDS, cutoff=0.9):
            raise FieldError(field, "isn't a known field", f"did you mean {near}? Otherwise remove it")
    return {field: value for field, value in columns.items() if field in PARAM_FIELDS}


def _makes_no_difference(prefix: str, field: str, value: Any, beside: dict[str, Any]) -> bool:
    """Whether an API field has a value that changes nothing; one that would raises FieldError."""
    if field == "add_generation_prompt" and beside.get("continue_final_message") is True and value is not None:
        if value is not False:
            raise FieldError(prefix + field, f"contradicts {prefix}continue_final_message", "remove one of them")
        return True
    if beside.get("tools") and (field, value) in (("tool_choice", "none"), ("parallel_tool_calls", False)):
        raise FieldError(prefix + field, f"isn't supported (it is {show(value)})", f"remove it, or {prefix}tools")
    if field in UNSUPPORTED and not is_tolerated(field, value):
        raise FieldError(prefix + field, f"isn't supported (it is {show(value)})", unsupported_hint(field))
    return is_tolerated(field, value)
