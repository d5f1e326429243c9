"""What the fields of an input row are called: those that are read, those that others use, and those we can't serve.

Knows nothing of lines or files. Called by the row reader, to refuse a field by saying what was probably meant.
"""

from __future__ import annotations

import difflib
from typing import Any

from minisgl_batch.sampling_params import SamplingParams

PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids")
SAMPLING_FIELDS = frozenset(SamplingParams.__struct_fields__)
ROW_FIELDS = frozenset(
    {
        *PROMPT_FIELDS,
        *SAMPLING_FIELDS,
        "max_completion_tokens",
        "top_logprobs",
        "sampling_params",
        "custom_id",
        "metadata",
        "model",
    }
)
ENVELOPE_FIELDS = frozenset({"custom_id", "method", "url", "body", "metadata"})  # a line of the OpenAI batch format
MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "refusal"})
ROLES = ("system", "developer", "user", "assistant", "tool")

PROMPT_COLUMNS = {"prompt": "--prompt-column", "messages": "--messages-column"}
"""The options that name a field that is called otherwise."""

# What other tools and datasets call our fields.
ALIASES = {
    **dict.fromkeys(("text", "input", "question", "instruction", "query", "content"), "prompt"),
    **dict.fromkeys(("conversation", "conversations", "chat", "dialog", "dialogue"), "messages"),
    **dict.fromkeys(("input_ids", "token_ids", "prompt_ids", "prompt_tokens"), "prompt_token_ids"),
    **dict.fromkeys(("max_new_tokens", "max_output_tokens", "max_length", "max_gen_len"), "max_tokens"),
    **dict.fromkeys(("id", "uid", "request_id", "key"), "custom_id"),
    **dict.fromkeys(("min_new_tokens", "min_length"), "min_tokens"),
    **dict.fromkeys(("stop_sequences", "stop_words", "stop_strings"), "stop"),
    **dict.fromkeys(("num_samples", "num_return_sequences"), "n"),
    "temp": "temperature",
    "random_seed": "seed",
    "from": "role",
    "value": "content",
}

# Fields of the OpenAI API, of vLLM and of transformers that would change the output, with the values that wouldn't
# (null never does).
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "detokenize": (True,),
    "do_sample": (),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),  # says nothing without tools
    "prediction": (),
    "priority": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream": (False,),
    "stream_options": ({},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

# Fields of the OpenAI API that say nothing about the output.
IGNORED = frozenset(
    {"user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)

_NO_BEAMS = "remove it, as there is no beam search: use n with logprobs, and choose among the samples"
_UNSUPPORTED_HINTS = {
    **dict.fromkeys(("length_penalty", "num_beams", "use_beam_search"), _NO_BEAMS),
    "chat_template": "put it into the model's folder",
    "functions": "use tools",
    "reasoning_effort": "use chat_template_kwargs, if the model's template knows it",
    "tool_choice": "remove it: the model itself decides whether it calls a tool",
    "allowed_token_ids": "use logit_bias, or bad_words for what mustn't come",
    "best_of": "use n with logprobs, and choose among the samples",
    "detokenize": "remove it: --token-ids adds the ids to the results",
    "do_sample": 'use temperature: 0 is what "do_sample": false means',
    "echo": "remove it: prompt_logprobs gives the prompt's tokens",
    "logits_processors": "use logit_bias, bad_words or the penalties",
    "no_repeat_ngram_size": "use repetition_penalty or frequency_penalty",
    "skip_special_tokens": "remove it: --token-ids adds the ids to the results, special ones included",
    "stream": "remove it: `minisgl-batch tail` shows tokens as they come",
    "suffix": "put what stands around the gap into the prompt, as the model wants it",
    "truncate_prompt_tokens": 'use "truncate": "left" and max_tokens: prompts keep what the context has room for',
    "typical_p": "use top_p or min_p",
}


def is_tolerated(field: str, value: Any) -> bool:
    """Whether an API field that isn't read can be passed over, as it wouldn't change the output."""
    if field in IGNORED:
        return True
    if field not in UNSUPPORTED:
        return False
    # A number where a flag belongs is a mistake, though Python calls 0 and false equal.
    is_flag = isinstance(value, bool)
    return value is None or any(value == n and is_flag == isinstance(n, bool) for n in UNSUPPORTED[field])


def unsupported_hint(field: str) -> str:
    """What to do about a field of UNSUPPORTED that has a value of effect."""
    return _UNSUPPORTED_HINTS.get(field, "remove it: it isn't supported yet, and the output would differ without it")


def nearest(field: str, known: frozenset[str], cutoff: float = 0.8) -> str | None:
    """The known field that `field` was probably meant to be, if any."""
    folded = field.lower().replace("-", "_")
    if folded in known:
        return folded
    if (alias := ALIASES.get(folded)) in known:
        return alias
    match = difflib.get_close_matches(folded, known, n=1, cutoff=cutoff)
    return match[0] if match else None
