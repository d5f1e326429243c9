"""From a prompt and layers of sampling parameters to what the engine is asked for.

A request is resolved once, before the engine sees it: nothing downstream knows of defaults. Knows nothing of rows, jobs
or Redis. Called by the worker group's frontend and by the in-process `LLM`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

from minisgl_batch.errors import InvalidParameterError, RequestError
from minisgl_batch.messages import NewRequest
from minisgl_batch.reasoning import OPENING
from minisgl_batch.sampling_params import MAX_LOGIT_RULES, MAX_SEED, NEUTRAL, EngineSampling, SamplingParams
from minisgl_batch.tokenizer.tokenizer import IntArray, ModelTokenizer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends a request besides EOS and length. The engine knows of the tokens only, as EOS ids among others.

    Attributes:
        strings: the text ends before the first of these.
        token_ids: the stop tokens that aren't EOS; generation ends at any of them, and they are not part of the text.
        include_in_output: keep the stop string, or the stop token's text.
        min_tokens: no string counts that is complete before so many tokens.
        timeout_s: from the first token, after which the next one is the last; None: never.
        repetition_guard: so many tokens that are one piece over and over end the text; 0: none do.
    """

    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    include_in_output: bool = False
    min_tokens: int = 0
    timeout_s: float | None = None
    repetition_guard: int = 0


@dataclass(frozen=True, slots=True)
class ReasoningRules:
    """How a text is told from its reasoning.

    Attributes:
        opened: the prompt ends with the mark that opens it.
        stops: stop strings count in it, too.
    """

    opened: bool
    stops: bool


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """One prompt, ready for the engine.

    Attributes:
        prompt_ids: (num_tokens,) int32, cut where `truncate` says so.
        samples: sampling of each of the prompt's `n` samples; they differ in `sample_index`, and the first one alone
            scores the prompt.
        stops: what ends each of them.
        reasoning: how their texts are split, if they are.
    """

    prompt_ids: IntArray
    samples: tuple[EngineSampling, ...]
    stops: StopRules
    reasoning: ReasoningRules | None = None

    def messages(self, first_uid: int) -> list[NewRequest]:
        """The engine's requests: sample i gets the uid `first_uid + i`."""
        prompt_ids = self.prompt_ids.astype("<i4", copy=False).tobytes()
        return [NewRequest(first_uid + i, prompt_ids, sampling) for i, sampling in enumerate(self.samples)]


def resolve_request(
    tokenizer: ModelTokenizer,
    prompt_ids: IntArray,
    *layers: SamplingParams,
    max_len: int,
    job_seed: int,
    row_index: int,
) -> ResolvedRequest:
    """Merge the layers of sampling parameters and check that the prompt can be served.

    Without `max_tokens` generation may fill the context. A `max_tokens` that the context can't hold is cut to what it
    leaves: such a request ends with finish reason "length", as in vLLM's offline `LLM`.

    Where `truncate` cuts prompts it makes room for all of `max_tokens`.

    Args:
        prompt_ids: (num_tokens,) int32.
        layers: the most specific first (row, job); the model's own defaults and then `NEUTRAL` come after them.
        max_len: longest prompt + output of the engine, in tokens.
        job_seed, row_index: give the seed of a request without one of its own.

    Raises:
        RequestError: "invalid_request" for a prompt without tokens or with ids that the model doesn't have, and for
            parameters that don't suit each other or the model, "prompt_too_long" for a prompt that leaves no room for
            a token of output and isn't to be cut.
    """
    if len(prompt_ids) == 0:
        raise RequestError("invalid_request", "the prompt is empty: it has no tokens")
    tokenizer.check_ids(prompt_ids)
    try:
        params = SamplingParams().over(*layers, tokenizer.default_sampling, NEUTRAL)
    except InvalidParameterError as error:
        raise RequestError("invalid_request", str(error)) from None
    prompt_ids = _fit(prompt_ids, max_len, params)
    room = max_len - len(prompt_ids)
    seed = params.seed if params.seed is not None else derive_seed(job_seed, row_index)
    eos_ids = frozenset(() if params.ignore_eos else tokenizer.eos_ids)
    stop_token_ids = frozenset(params.stop_token_ids or ())
    samples = tuple(
        EngineSampling(
            max_tokens=min(params.max_tokens or room, room),
            temperature=_set(params.temperature),
            top_k=max(_set(params.top_k), 0),
            top_p=_set(params.top_p),
            min_p=_set(params.min_p),
            seed=seed,
            sample_index=sample_index,
            stop_ids=tuple(sorted(eos_ids | stop_token_ids)),
            presence_penalty=_set(params.presence_penalty),
            frequency_penalty=_set(params.frequency_penalty),
            repetition_penalty=_set(params.repetition_penalty),
            logit_bias=tuple(_set(params.logit_bias).items()),
            min_tokens=_set(params.min_tokens),
            bad_words=tokenizer.encode_words(params.bad_word_strings),
            num_logprobs=_num_logprobs(params.logprobs, tokenizer.vocab_size),
            # The prompt is the same for all samples.
            num_prompt_logprobs=_num_logprobs(params.prompt_logprobs, tokenizer.vocab_size)
            if sample_index == 0
            else -1,
        )
        for sample_index in range(_set(params.n))
    )
    _check_rules(samples[0], tokenizer.vocab_size)
    stops = StopRules(
        strings=params.stop_strings,
        token_ids=stop_token_ids - eos_ids,
        include_in_output=_set(params.include_stop_str_in_output),
        min_tokens=_set(params.min_tokens),
        timeout_s=params.row_timeout,
        repetition_guard=params.repetition_guard or 0,
    )
    reasoning = None
    if params.split_reasoning:
        opened = tokenizer.last_text(prompt_ids).rstrip().endswith(OPENING)
        reasoning = ReasoningRules(opened, _set(params.stop_in_reasoning))
    return ResolvedRequest(prompt_ids, samples, stops, reasoning)


def _fit(prompt_ids: IntArray, max_len: int, params: SamplingParams) -> IntArray:
    """The prompt, or what `truncate` leaves of it."""
    num_tokens = len(prompt_ids)
    lengths = f"the prompt has {num_tokens} tokens and the context {max_len}"
    if params.truncate == "error":
        if num_tokens < max_len:
            return prompt_ids
        raise RequestError(
            "prompt_too_long",
            f"{lengths}, which leaves no room for output: shorten the prompt to at most {max_len - 1} tokens, let "
            "truncate cut it, or serve a model with a longer context",
        )
    if num_tokens + (params.max_tokens or 1) <= max_len:
        return prompt_ids
    if params.max_tokens is None:
        raise RequestError("prompt_too_long", f"{lengths}: truncate needs max_tokens, to know how much room to make")
    kept = max_len - params.max_tokens
    if kept < 1:
        raise RequestError(
            "prompt_too_long",
            f"{lengths}, of which max_tokens takes {params.max_tokens}: nothing is left for the prompt",
        )
    return prompt_ids[-kept:] if params.truncate == "left" else prompt_ids[:kept]


def _num_logprobs(asked: int | None, vocab_size: int) -> int:
    return -1 if asked is None else min(asked, vocab_size)


def _check_rules(sampling: EngineSampling, vocab_size: int) -> None:
    for token, _ in sampling.logit_bias:
        if token >= vocab_size:
            raise RequestError(
                "invalid_request", f"logit_bias: ids of this model are in [0, {vocab_size}), {token} isn't"
            )
    if sampling.num_rules > MAX_LOGIT_RULES:
        raise RequestError(
            "invalid_request",
            f"logit_bias, bad_words and the stop tokens of min_tokens come to {sampling.num_rules} tokens, which is "
            f"more than {MAX_LOGIT_RULES}: give fewer or shorter ones",
        )


def derive_seed(job_seed: int, row_index: int) -> int:
    """The seed of a row that has none of its own: 63 bits, the same in every process and release.

    Args:
        job_seed, row_index: in [0, 2**63).
    """
    digest = blake2b(struct.pack("<qq", job_seed, row_index), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED


def _set(value: T | None) -> T:
    if value is None:
        raise TypeError("NEUTRAL must set every parameter that the engine needs")
    return value
