"""From a prompt and layers of sampling parameters to what the engine is asked for.

A request is resolved once, before the engine sees it: nothing downstream knows of defaults. Knows nothing of rows, jobs
or Redis. Called by the worker group's frontend, by dry runs and by the in-process `LLM`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

from minisgl_batch.engine_sampling import EngineSampling
from minisgl_batch.errors import InvalidParameterError, RequestError
from minisgl_batch.grammar_check import GrammarCheck
from minisgl_batch.messages import Constraint, NewPrompt, NewRequest
from minisgl_batch.reasoning import THINK, Marks, ReasoningSplitter
from minisgl_batch.sampling_params import (
    MAX_LOGIT_RULES,
    MAX_SEED,
    NEUTRAL,
    SamplingParams,
    Truncate,
)
from minisgl_batch.tokenizer.chat import ChatOptions
from minisgl_batch.tokenizer.choices import MAX_CHOICE_TOKENS, Choice
from minisgl_batch.tokenizer.detokenizer import Detokenizer
from minisgl_batch.tokenizer.grammar import check_constraint, make_grammar
from minisgl_batch.tokenizer.room import Room
from minisgl_batch.tokenizer.tokenizer import IntArray, ModelTokenizer, PromptInput, is_chat

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
        marks: what stands around it.
    """

    opened: bool
    stops: bool
    marks: Marks = THINK

    def splitter(self) -> ReasoningSplitter:
        """One for a new text."""
        return ReasoningSplitter(opened=self.opened, marks=self.marks)


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """One prompt, ready for the engine.

    Attributes:
        prompt_ids: (num_tokens,) int32, cut where `truncate` says so.
        sampling: of the first of its samples; the others differ in `sample_index`.
        num_samples: results that it will have.
        stops: what ends each of them.
        reasoning: how their texts are split, if they are.
        choices: what is scored behind it instead; there is one result then.
        constraint: what each of their texts must be, if anything.
        detokenizer: makes their texts; None: the usual one does.
    """

    prompt_ids: IntArray
    sampling: EngineSampling
    num_samples: int = 1
    stops: StopRules = StopRules()
    reasoning: ReasoningRules | None = None
    choices: tuple[Choice, ...] = ()
    constraint: Constraint | None = None
    detokenizer: Detokenizer | None = None

    def message(self, first_uid: int, samples: Sequence[int] | None = None) -> NewPrompt:
        """What the engine is asked for, in requests with uids from `first_uid` on: one for each sample or choice.

        Args:
            samples: which samples are to be made; by default all.
        """
        if self.choices:
            requests = [NewRequest(first_uid + i, 0, _bytes(c.token_ids)) for i, c in enumerate(self.choices)]
        else:
            wanted = range(self.num_samples) if samples is None else samples
            requests = [NewRequest(uid, sample) for uid, sample in enumerate(wanted, first_uid)]
        return NewPrompt(_bytes(self.prompt_ids), self.sampling, requests, self.constraint)


def resolve_requests(
    tokenizer: ModelTokenizer,
    inputs: Sequence[PromptInput],
    params: Sequence[SamplingParams],
    row_indices: Sequence[int],
    *,
    defaults: SamplingParams,
    max_len: int,
    job_seed: int,
    system: str | None = None,
    check: GrammarCheck | None = None,
) -> Iterator[ResolvedRequest | RequestError]:
    """The requests of prompts of any kind, in their order; one that can't be served gives its error instead.

    The prompts are encoded now, in one batch, and each request is resolved when it is asked for.

    Args:
        inputs: texts, token ids and chats, as they come.
        params, row_indices: of each of them; its layers are these and `defaults`.
        max_len, job_seed: as in `resolve_request`.
        system: put in front of chats that have no system message.
        check: looks at the syntax of grammars, too; without it, the engine finds out.
    """
    options = [ChatOptions.of(given, defaults) for given in params]
    encoded = tokenizer.encode_inputs(inputs, system=system, options=options)

    def resolved() -> Iterator[ResolvedRequest | RequestError]:
        for prompt, ids, given, row_index in zip(inputs, encoded, params, row_indices, strict=True):
            if isinstance(ids, RequestError):
                yield ids
                continue
            try:
                request = resolve_request(
                    tokenizer,
                    ids,
                    given,
                    defaults,
                    max_len=max_len,
                    job_seed=job_seed,
                    row_index=row_index,
                    prompt=prompt,
                )
                if check is not None:
                    check_constraint(request.constraint, check)
            except RequestError as error:
                yield error
            else:
                yield request

    return resolved()


def resolve_request(
    tokenizer: ModelTokenizer,
    prompt_ids: IntArray,
    *layers: SamplingParams,
    max_len: int,
    job_seed: int,
    row_index: int,
    prompt: PromptInput = (),
) -> ResolvedRequest:
    """Merge the layers of sampling parameters and check that the prompt can be served.

    Without `max_tokens` generation may fill the context. A `max_tokens` that the context can't hold is cut to what it
    leaves: such a request ends with finish reason "length", as in vLLM's offline `LLM`.

    Where `truncate` cuts prompts it makes room for all of `max_tokens`, or for the longest choice.

    Args:
        prompt_ids: (num_tokens,) int32.
        layers: the most specific first (row, job); the model's own defaults and then `NEUTRAL` come after them.
        max_len: longest prompt + output of the engine, in tokens.
        job_seed, row_index: give the seed of a request without one of its own.
        prompt: what the ids were made of; choices are encoded together with a text, and other texts than answers to
            chats begin where it ends.

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
    seed = params.seed if params.seed is not None else derive_seed(job_seed, row_index)
    room = Room(max_len, tokenizer.max_len)
    if params.choices is not None:
        return _resolve_choices(tokenizer, prompt, prompt_ids, params.choices, params.truncate, room, seed)
    prompt_ids = room.fit(prompt_ids, params)
    num_left = max_len - len(prompt_ids)
    eos_ids = frozenset(() if params.ignore_eos else tokenizer.eos_ids)
    stop_token_ids = frozenset(params.stop_token_ids or ())
    sampling = EngineSampling(
        max_tokens=min(params.max_tokens or num_left, num_left),
        temperature=_set(params.temperature),
        top_k=max(_set(params.top_k), 0),
        top_p=_set(params.top_p),
        min_p=_set(params.min_p),
        seed=seed,
        stop_ids=tuple(sorted(eos_ids | stop_token_ids)),
        presence_penalty=_set(params.presence_penalty),
        frequency_penalty=_set(params.frequency_penalty),
        repetition_penalty=_set(params.repetition_penalty),
        logit_bias=tuple(_set(params.logit_bias).items()),
        min_tokens=_set(params.min_tokens),
        bad_words=tokenizer.encode_words(params.bad_word_strings),
        num_logprobs=_num_logprobs(params.logprobs, tokenizer.vocab_size),
        num_prompt_logprobs=_num_logprobs(params.prompt_logprobs, tokenizer.vocab_size),
    )
    _check_rules(sampling, tokenizer.vocab_size)
    _check_that_something_is_left(sampling, tokenizer.vocab_size)
    stops = StopRules(
        strings=params.stop_strings,
        token_ids=stop_token_ids - eos_ids,
        include_in_output=_set(params.include_stop_str_in_output),
        min_tokens=_set(params.min_tokens),
        timeout_s=params.row_timeout,
        repetition_guard=params.repetition_guard or 0,
    )
    grammar = "" if params.structured_outputs is None else make_grammar(params.structured_outputs)
    reasoning = None
    if params.split_reasoning:
        opened = tokenizer.last_text(prompt_ids).rstrip().endswith(tokenizer.marks.opening)
        stops_in_it = _set(params.stop_in_reasoning)
        marks = tokenizer.marks._replace(has_calls=False) if grammar else tokenizer.marks  # a call isn't what is asked
        reasoning = ReasoningRules(opened, stops_in_it, marks)
    # Special tokens are parts of what models write around tool calls, and some around their reasoning.
    is_whole = bool(params.tools) or (reasoning is not None and bool(reasoning.marks.tokens))
    detokenizer = tokenizer.whole_detokenizer if is_whole else tokenizer.detokenizer
    constraint = None
    if grammar:
        if not any(token < tokenizer.vocab_size for token in eos_ids):
            raise RequestError(
                "invalid_request",
                "structured_outputs: a text ends by an end-of-sequence token, and this model has none",
            )
        constraint = _constrain(tokenizer, grammar, prompt_ids, reasoning)
    # An answer begins without the space of its first token, as in transformers; to a grammar the space is part of it.
    if constraint is not None or params.continue_final_message or not is_chat(prompt):
        detokenizer = detokenizer.after(prompt_ids.tolist())
    return ResolvedRequest(
        prompt_ids, sampling, _set(params.n), stops, reasoning, constraint=constraint, detokenizer=detokenizer
    )


def _constrain(
    tokenizer: ModelTokenizer, grammar: str, prompt_ids: IntArray, reasoning: ReasoningRules | None
) -> Constraint:
    """By a grammar; what is split off as reasoning is free, where the marks are tokens of their own."""
    # A template may have put reasoning into the prompt, empty to switch it off: then none follows.
    is_over = tokenizer.last_text(prompt_ids).rstrip().endswith(tokenizer.marks.closing)
    if reasoning is None or is_over or (marks := tokenizer.encode_marks()) is None:
        return Constraint(grammar)
    return Constraint(grammar, *marks, in_reasoning=reasoning.opened)


def _resolve_choices(
    tokenizer: ModelTokenizer,
    prompt: PromptInput,
    prompt_ids: IntArray,
    texts: tuple[str, ...],
    truncate: Truncate | None,
    room: Room,
    seed: int,
) -> ResolvedRequest:
    """A prompt whose continuations are scored. The token that the engine makes behind each is thrown away."""
    _check_size(len(prompt_ids), len(texts))
    prompt_ids, endings = tokenizer.encode_choices(prompt, prompt_ids, texts)
    longest = max(map(len, endings))
    _check_size(len(prompt_ids) + longest, len(texts))
    if truncate in (None, "error") and len(prompt_ids) + longest >= room.max_len:
        raise RequestError(
            "prompt_too_long",
            f"the prompt and its longest choice have {len(prompt_ids)} + {longest} tokens and {room}: shorten "
            f"them to at most {room.max_len - 1} tokens, let truncate cut the prompt, or {room.advice}",
        )
    prompt_ids = room.cut(prompt_ids, longest + 1, "the longest choice", truncate)
    sampling = EngineSampling(max_tokens=1, seed=seed, num_prompt_logprobs=0)
    choices = tuple(Choice(text, ids) for text, ids in zip(texts, endings, strict=True))
    return ResolvedRequest(prompt_ids, sampling, choices=choices)


def _check_size(num_tokens: int, num_choices: int) -> None:
    if num_tokens * num_choices > MAX_CHOICE_TOKENS:
        raise RequestError(
            "prompt_too_long",
            f"{num_choices} choices behind a prompt of {num_tokens} tokens come to more than {MAX_CHOICE_TOKENS} "
            "tokens: give fewer choices, or make several rows of them",
        )


def _bytes(token_ids: IntArray) -> bytes:
    return token_ids.astype("<i4", copy=False).tobytes()


def _num_logprobs(asked: int | bool | None, vocab_size: int) -> int:
    return -1 if asked is None or asked is False else min(asked, vocab_size)


def _check_rules(sampling: EngineSampling, vocab_size: int) -> None:
    if problem := bias_problem((token for token, _ in sampling.logit_bias), vocab_size):
        raise RequestError("invalid_request", f"logit_bias: {problem}")
    if sampling.num_rules > MAX_LOGIT_RULES:
        raise RequestError(
            "invalid_request",
            f"logit_bias, bad_words and the stop tokens of min_tokens come to {sampling.num_rules} tokens, which is "
            f"more than {MAX_LOGIT_RULES}: give fewer or shorter ones",
        )


def bias_problem(token_ids: Iterable[int], vocab_size: int) -> str:
    """Which of the tokens of `logit_bias` the model doesn't have, "" if it has all."""
    outside = next((token for token in token_ids if token >= vocab_size), None)
    return "" if outside is None else f"ids of this model are in [0, {vocab_size}), {outside} isn't"


def _check_that_something_is_left(sampling: EngineSampling, vocab_size: int) -> None:
    """Raise RequestError if rules leave no token that might come first."""
    banned = {word[0] for word in sampling.bad_words if len(word) == 1}
    if sampling.min_tokens:
        banned.update(sampling.stop_ids)
    if len(banned) >= vocab_size and banned.issuperset(range(vocab_size)):
        raise RequestError(
            "invalid_request",
            f"bad_words and the stop tokens that min_tokens holds back are all of the model's {vocab_size} tokens: "
            "nothing is left to generate",
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
