"""How one row is sampled, as users say it: `None` means "not given".

Layers of `SamplingParams` are merged (row over job over the model's own generation config) and then resolved once, to
`EngineSampling`. Knows nothing of tokenizers, models or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from minisgl_batch.errors import InvalidParameterError
from minisgl_batch.other_fields import KnownFields
from minisgl_batch.param_checks import (
    check_bool,
    check_choice,
    check_float,
    check_int,
    check_json,
    check_strings,
    whole,
)
from minisgl_batch.structured_outputs import StructuredOutputsParams

Truncate: TypeAlias = Literal["error", "left", "right"]

MAX_TIMEOUT_S = 1e9
MIN_REPETITION_GUARD = 16
MAX_TOKENS_LIMIT = 1 << 24  # no model's context comes near; larger values are typing mistakes
MAX_SEED = (1 << 63) - 1
MAX_N = 1024
MAX_TOKEN_ID = (1 << 31) - 1
MAX_PENALTY = 2.0  # of presence and frequency, either way: the range of the OpenAI API
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0  # further off, ruled out tokens become NaN
MAX_LOGIT_BIAS = 100.0
MAX_LOGPROBS = 20
# What rendering sets itself, or transformers would take for its own.
_TEMPLATE_ARGUMENTS = frozenset(
    {
        "self",
        "conversation",
        "messages",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
CHAT_OPTIONS = ("tools", "chat_template_kwargs", "continue_final_message")
"""What chat templates get beside messages."""

# What means something beside choices: how the prompt is made.
WITH_CHOICES = frozenset({"choices", "truncate", *CHAT_OPTIONS})
MAX_LOGIT_RULES = 2048
"""Tokens of one row that may be named in `logit_bias`, `bad_words` and, with `min_tokens`, as stop tokens."""
MAX_ITEMS = {
    "stop": 64,
    "stop_token_ids": 256,  # all rows are compared with as many as any row has
    "logit_bias": MAX_LOGIT_RULES,
    "bad_words": MAX_LOGIT_RULES,
    "choices": 1024,
}


def _check_tools(tools: object) -> None:
    if tools is None:
        return
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidParameterError("tools", f"must be a list of objects, got {tools!r}")
    check_json("tools", list(tools))


def _check_template_kwargs(given: object) -> None:
    if given is None:
        return
    if not isinstance(given, dict):
        raise InvalidParameterError("chat_template_kwargs", f"must be an object, got {given!r}")
    if taken := sorted(_TEMPLATE_ARGUMENTS.intersection(given)):
        raise InvalidParameterError("chat_template_kwargs", f"can't set {taken[0]}, which is set otherwise")
    check_json("chat_template_kwargs", given)


def _check_choices(choices: object, given: Mapping[str, Any]) -> None:
    if not isinstance(choices, list | tuple) or not choices:
        raise InvalidParameterError("choices", f"must be a list of at least one text, got {choices!r}")
    check_strings("choices", choices, MAX_ITEMS["choices"])
    if len(set(choices)) < len(choices):
        twice = next(text for i, text in enumerate(choices) if text in choices[:i])
        raise InvalidParameterError("choices", f"holds {twice!r} twice")
    if beside := [field for field, value in given.items() if field not in WITH_CHOICES and value is not False]:
        raise InvalidParameterError(beside[0], "says nothing beside choices, which are scored: nothing is generated")


def _check_stop_token_ids(token_ids: object) -> None:
    if token_ids is None:
        return
    if not isinstance(token_ids, list | tuple):
        raise InvalidParameterError("stop_token_ids", f"must be a list of token ids, got {token_ids!r}")
    if len(token_ids) > (most := MAX_ITEMS["stop_token_ids"]):
        raise InvalidParameterError("stop_token_ids", f"at most {most} ids, got {len(token_ids)}")
    for token_id in token_ids:
        check_int("stop_token_ids", token_id, 0, MAX_TOKEN_ID)


def _read_logit_bias(given: object) -> dict[int, float]:
    """A bias for each token id, in their order. JSON writes ids as strings; null is "not given", as in other fields."""
    if not isinstance(given, dict):
        raise InvalidParameterError("logit_bias", f"must be an object of token ids and numbers, got {given!r}")
    biases: dict[int, float] = {}
    for key, bias in given.items():
        if bias is None:
            continue
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 else key
        check_int("logit_bias", token, 0, MAX_TOKEN_ID)
        check_float("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if token in biases:
            raise InvalidParameterError("logit_bias", f"names token {token} twice")
        biases[token] = float(bias)
    if len(biases) > (most := MAX_ITEMS["logit_bias"]):
        raise InvalidParameterError("logit_bias", f"at most {most} tokens, got {len(biases)}")
    return dict(sorted(biases.items()))


# Lowest and highest value; of real numbers also whether the lowest one is excluded.
WHOLE_FIELDS = {
    "n": (1, MAX_N),
    "max_tokens": (1, MAX_TOKENS_LIMIT),
    "min_tokens": (0, MAX_TOKENS_LIMIT),
    "seed": (0, MAX_SEED),
    "top_k": (-1, MAX_TOKEN_ID),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "repetition_guard": (MIN_REPETITION_GUARD, MAX_TOKENS_LIMIT),
}
REAL_FIELDS = {
    "temperature": (0.0, 100.0, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "presence_penalty": (-MAX_PENALTY, MAX_PENALTY, False),
    "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY, False),
    "repetition_penalty": (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY, False),
    "row_timeout": (0.0, MAX_TIMEOUT_S, True),
}


_LOGPROBS = ("logprobs", "prompt_logprobs")  # False is none, also where the job asks for some

_FLAG_FIELDS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "continue_final_message",
    "split_reasoning",
    "stop_in_reasoning",
)


class SamplingParams(
    msgspec.Struct,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    kw_only=True,
    metaclass=KnownFields,
):
    """What a user may set for a row; what vLLM and the OpenAI API have, too, has their names.

    Attributes:
        n: samples per prompt, each a row of its own in the result.
        temperature: 0 is greedy (exact argmax).
        top_k: keep the k most probable tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        min_p: drop tokens less probable than this share of the most probable one, in [0, 1].
        seed: makes the row's samples repeatable; without it one is derived from the job's seed and the row's index.
        max_tokens: most tokens to generate; without it, up to the model's context.
        stop: the text is cut before the first of these strings (a single string may be given).
        stop_token_ids: generation ends at any of these tokens.
        ignore_eos: go on after an end-of-sequence token, up to `max_tokens`.
        include_stop_str_in_output: keep the stop string that ended the text.
        presence_penalty: taken from the logit of each token that the output has, in [-2, 2].
        frequency_penalty: the same times how often the output has it, in [-2, 2].
        repetition_penalty: divides the logit of each token that the prompt or the output has where it is positive, and
            multiplies it elsewhere, in [0.01, 100]. Applied before the two others.
        logit_bias: added to these tokens' logits before penalties, each in [-100, 100].
        min_tokens: no end-of-sequence or stop token comes, and no stop string counts, before so many tokens.
        bad_words: the output has none of these words' tokens in a row, as they begin a text or follow a space.
        logprobs: give the log-probability of each output token, and so many of the most probable ones in its place, up
            to 20. They are the model's own, before all of the above. False: none, whatever the job says.
        prompt_logprobs: the same for the prompt's tokens but the first. Such a prompt is computed in full: what the
            prefix cache has of it isn't used.
        truncate: what becomes of a prompt that leaves no room: "error" refuses it; "left" and "right" cut tokens off
            its beginning or its end, until the context has room for it and `max_tokens`.
        row_timeout: seconds from a sample's first token after which it ends, with what it has.
        repetition_guard: a text ends when its last so many tokens, at least 16, are one piece of at most a quarter of
            them over and over. It is looked at now and then, so a few more tokens may come.
        tools: of chats, functions that the model may call, as JSON schemas; what it calls is part of the text, special
            tokens included.
        chat_template_kwargs: of chats, variables of the model's chat template, such as `{"enable_thinking": false}`.
        split_reasoning: `text` is the answer alone; what the model writes between `<think>` and `</think>` before it
            (gpt-oss: to other channels) goes to `reasoning_text`, and everything to `raw_text`. The mark that opens
            may end the prompt.
        stop_in_reasoning: stop strings count in the reasoning that is split off, too.
        continue_final_message: of chats, the text goes on with the last message, which is an assistant's.
        structured_outputs: what the text must be; a `StructuredOutputsParams` or an object with its fields. With
            `split_reasoning` it says nothing about the reasoning.
        choices: up to 1,024 continuations of the prompt. Nothing is generated: each gets the log-probability of its
            tokens behind the prompt, and the most probable one is the text. The option is given once for each. Beside
            them there may be `truncate` and what chat templates get.

    Raises:
        InvalidParameterError: a value is out of its range; names the field.
    """

    n: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    min_tokens: int | None = None
    bad_words: str | tuple[str, ...] | None = None
    logprobs: int | bool | None = None
    prompt_logprobs: int | bool | None = None
    truncate: Truncate | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    split_reasoning: bool | None = None
    stop_in_reasoning: bool | None = None
    row_timeout: float | None = None
    repetition_guard: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    choices: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for field, limits in WHOLE_FIELDS.items():
            value = getattr(self, field)
            if value is not None and not (value is False and field in _LOGPROBS):
                check_int(field, whole(value), *limits)
        for field, (low, high, low_open) in REAL_FIELDS.items():
            if (value := getattr(self, field)) is not None:
                check_float(field, value, low, high, low_open=low_open)
        if self.max_tokens is not None and self.min_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameterError(
                "min_tokens", f"must be at most max_tokens, which is {self.max_tokens}, got {self.min_tokens}"
            )
        for field in ("stop", "bad_words"):
            check_strings(field, getattr(self, field), MAX_ITEMS[field])
        _check_stop_token_ids(self.stop_token_ids)
        for field in _FLAG_FIELDS:
            check_bool(field, getattr(self, field))
        _check_tools(self.tools)
        _check_template_kwargs(self.chat_template_kwargs)
        check_choice("truncate", self.truncate, get_args(Truncate))
        if self.choices is not None:
            _check_choices(self.choices, self.given)
        self._normalise()

    def _normalise(self) -> None:
        """One form for equal values, so that equal params compare and serialise alike."""
        for field in WHOLE_FIELDS:
            if isinstance(value := getattr(self, field), float):
                msgspec.structs.force_setattr(self, field, whole(value))
        for field in REAL_FIELDS:
            if isinstance(value := getattr(self, field), int):
                msgspec.structs.force_setattr(self, field, float(value))
        for field in ("stop", "stop_token_ids", "bad_words", "tools", "choices"):
            if isinstance(value := getattr(self, field), list):
                msgspec.structs.force_setattr(self, field, tuple(value))
        if self.logit_bias is not None:
            msgspec.structs.force_setattr(self, "logit_bias", _read_logit_bias(self.logit_bias))
        if self.structured_outputs is not None:
            read = StructuredOutputsParams.read(self.structured_outputs)
            msgspec.structs.force_setattr(self, "structured_outputs", read)
            if self.ignore_eos and read.kinds:
                raise InvalidParameterError("ignore_eos", "contradicts structured_outputs, whose texts have an end")

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{field}={value!r}' for field, value in self.given.items())})"

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty when not given."""
        return _as_tuple(self.stop)

    @property
    def bad_word_strings(self) -> tuple[str, ...]:
        """`bad_words` as a tuple, empty when not given."""
        return _as_tuple(self.bad_words)

    @property
    def given(self) -> dict[str, Any]:
        """The fields that were given."""
        return {field: value for field in self.__struct_fields__ if (value := getattr(self, field)) is not None}

    def over(self, *defaults: SamplingParams) -> SamplingParams:
        """These values where given, else those of the first of `defaults` that has one.

        Where a layer has choices, layers behind it, which are for what generates, say nothing about sampling.

        Raises:
            InvalidParameterError: values of different layers contradict each other.
        """
        merged: dict[str, Any] = {}
        for layer in reversed((self, *defaults)):
            if layer.choices is not None:
                merged = {field: value for field, value in merged.items() if field in WITH_CHOICES}
            merged |= layer.given
        return SamplingParams(**merged)

    def to_dict(self) -> dict[str, Any]:
        """The fields that were given, JSON-ready."""
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built


def _as_tuple(strings: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if strings is None:
        return ()
    return (strings,) if isinstance(strings, str) else strings


NEUTRAL = SamplingParams(
    n=1,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    ignore_eos=False,
    include_stop_str_in_output=False,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
    logit_bias={},
    min_tokens=0,
    bad_words=(),
    truncate="error",
    split_reasoning=False,
    stop_in_reasoning=False,
)
"""What holds when neither row nor job nor the model's generation config says anything (the values of vLLM)."""
