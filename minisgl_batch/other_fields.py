"""What others call the fields of rows and of sampling parameters, and their fields that can't be served here.

So that a field is refused by saying what was probably meant, or what to use instead. Called where fields are read.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from minisgl_batch.errors import InvalidParameterError, UsageError

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
    "role": "messages",  # where a message is given for a row
    **dict.fromkeys(("value", "prompt"), "content"),
    **dict.fromkeys(("tensor_parallel_size", "tp_size"), "tp"),
    **dict.fromkeys(("gpu_memory_utilization", "mem_fraction_static"), "memory_ratio"),
    **dict.fromkeys(("max_model_len", "context_length"), "max_seq_len"),
    **dict.fromkeys(("max_num_seqs", "max_running_requests"), "max_running"),
    "max_num_batched_tokens": "max_prefill_tokens",
    "block_size": "page_size",
    "use_tqdm": "progress",
}

# What has no counterpart of the same values here, and what to do instead.
_INSTEAD = {
    "enforce_eager": "for True give cuda_graph_max_bs=0, for False leave it out",
    "enable_prefix_caching": 'for False give cache="naive", for True leave it out',
    "trust_remote_code": "leave it out, as code of models is never run",
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
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),  # says nothing without tools
    "prediction": (),
    "priority": (0,),
    "reasoning_effort": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream": (False,),
    "stream_options": ({},),
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
_IDS = "remove it: outputs of LLM have the ids, special ones included, and a job's results with `token_ids`"
_UNSUPPORTED_HINTS = {
    **dict.fromkeys(("length_penalty", "num_beams", "use_beam_search"), _NO_BEAMS),
    "chat_template": "put it into the model's folder",
    "functions": "use tools",
    **{
        f"guided_{kind}": f'use structured_outputs: {{"{kind}": ...}}'
        for kind in ("choice", "grammar", "json", "regex")
    },
    "guided_decoding": "use structured_outputs",
    "json_schema": 'use structured_outputs: {"json": ...}',
    "reasoning_effort": "use chat_template_kwargs, if the model's template knows it",
    "tool_choice": "remove it: the model itself decides whether it calls a tool",
    "allowed_token_ids": "use logit_bias, or bad_words for what mustn't come",
    "best_of": "use n with logprobs, and choose among the samples",
    "detokenize": _IDS,
    "do_sample": 'use temperature: 0 is what "do_sample": false means',
    "echo": "remove it: prompt_logprobs gives the prompt's tokens",
    "logits_processors": "use logit_bias, bad_words or the penalties",
    "no_repeat_ngram_size": "use repetition_penalty or frequency_penalty",
    "skip_special_tokens": _IDS,
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
    """The known field (or other name) that `field` was probably meant to be, if any."""
    folded, names = _folded(field), {_folded(name): name for name in sorted(known)}
    if folded in names:
        return names[folded]
    alias = ALIASES.get(folded)
    for name in (alias, ALIASES.get(alias or "")):  # the text of a message is "prompt" nowhere
        if name in known:
            return name
    match = difflib.get_close_matches(folded, names, n=1, cutoff=cutoff)
    return names[match[0]] if match else None


def _folded(field: str) -> str:
    return field.lower().replace("-", "_")


def no_such(field: str, what: str, known: frozenset[str]) -> InvalidParameterError:
    """That a parameter isn't one of those that are known, with the one that was probably meant."""
    near = nearest(field, known)
    hint = _INSTEAD.get(field) or (f"did you mean {near}?" if near else "")
    return InvalidParameterError(field, f"is no {what}" + (f"; {hint}" if hint else ""))


def refuse_others(others: Mapping[str, Any], method: Callable[..., Any], advice: Mapping[str, str]) -> None:
    """Raise InvalidParameterError for the first of `others`, arguments that a method hasn't.

    Args:
        advice: what to do instead, by name.
    """
    for name in sorted(others):
        what = f"argument of {method.__name__}"
        if name in advice:
            raise InvalidParameterError(name, f"is no {what}: {advice[name]}")
        raise no_such(name, what, frozenset(inspect.signature(method).parameters))


class NamedFields(msgspec.StructMeta):
    """Of records that users make: says which names there are where a value is given without one, or by another."""

    def __call__(self, *args: Any, **given: Any) -> Any:
        if args:
            names = " or ".join(f"{field}=..." for field in self.__struct_fields__[:2])
            raise UsageError(f"{self.__name__} takes arguments by name, such as {names}: name {args[0]!r}")
        for field in given:
            if field not in self.__struct_fields__:
                raise no_such(field, f"field of {self.__name__}", frozenset(self.__struct_fields__))
        return super().__call__(**given)


class KnownFields(NamedFields):
    """Of sampling parameters: refuses one that there isn't, with what to use instead, unless it changes nothing."""

    def __call__(self, *args: Any, **given: Any) -> Any:
        known = frozenset(self.__struct_fields__)
        for field, value in given.items():
            if field in known or is_tolerated(field, value):
                continue
            if field in UNSUPPORTED:
                raise InvalidParameterError(field, f"isn't supported: {unsupported_hint(field)}")
            raise no_such(field, "sampling parameter", known)
        return super().__call__(*args, **{field: value for field, value in given.items() if field in known})
