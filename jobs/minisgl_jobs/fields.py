"""What the fields of an input row are called that are read. Knows nothing of lines or files. Used by the row reader."""

from __future__ import annotations

from minisgl_batch.sampling_params import SamplingParams

PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids")
SAMPLING_FIELDS = frozenset(SamplingParams.__struct_fields__)
ROW_FIELDS = frozenset(
    {
        *PROMPT_FIELDS,
        *SAMPLING_FIELDS,
        "max_completion_tokens",
        "response_format",
        "top_logprobs",
        "sampling_params",
        "custom_id",
        "metadata",
        "model",
    }
)
PARAM_FIELDS = SAMPLING_FIELDS | {"max_completion_tokens", "response_format", "top_logprobs", "sampling_params"}
ENVELOPE_FIELDS = frozenset({"custom_id", "method", "url", "body", "metadata"})  # a line of the OpenAI batch format
MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "refusal"})
ROLES = ("system", "developer", "user", "assistant", "tool")

PROMPT_COLUMNS = {"prompt": "`prompt_column`", "messages": "`messages_column`"}
"""The options that name a field that is called otherwise."""
