"""The frontend's side of running requests: tokens in; text, deltas and finished samples out.

The engine ends requests at EOS, stop tokens and length. Stop strings are found here, and the caller tells the engine to
abort the requests that ended by them. A request's text is made at its end, or while it grows when it has stop strings
or a reader. Knows nothing of rows, Redis or sockets. Called by the worker group's frontend and the in-process `LLM`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from minisgl_batch.choices import ChoiceScore, best_choice
from minisgl_batch.errors import RequestError
from minisgl_batch.messages import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_STOP,
    NOT_FINISHED,
    NewPrompt,
    RequestsRefused,
    Scores,
    StepOutput,
)
from minisgl_batch.reasoning import Reasoning
from minisgl_batch.tokenizer.choices import ChoiceRequests
from minisgl_batch.tokenizer.detokenizer import Detokenizer
from minisgl_batch.tokenizer.growing import GrowingText
from minisgl_batch.tokenizer.input import ReasoningRules, ResolvedRequest, StopRules
from minisgl_batch.tokenizer.logprobs import LogprobCollector, Logprobs, prompt_scores, sampled_scores

FinishReason = Literal["stop", "length", "timeout", "repetition", "abort", "error"]

_FINISH_REASONS: dict[int, FinishReason] = {FINISH_STOP: "stop", FINISH_LENGTH: "length", FINISH_ABORT: "abort"}


MIN_REPEATS = 4  # of a piece, for the repetition guard
_LOOKS = 8  # of the guard, while as many tokens come as it looks at


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that a watched request gained.

    Attributes:
        uid: the request.
        offset: characters before it; deltas continue each other, and the snapshot of `watch`, without a gap.
        text: never empty.
        num_tokens: the request's output tokens so far.
        reasoning: where the parts of the text so far are, if it is to be split.
    """

    uid: int
    offset: int
    text: str
    num_tokens: int
    reasoning: Reasoning | None = None


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """A request that ended.

    Attributes:
        uid: the request.
        text: without the EOS or stop token, and without the stop string unless it was to be included.
        token_ids: every output token up to and with the one that ended it.
        finish_reason: "stop" (EOS, stop token or stop string), "length", "timeout", "repetition", "abort" or
            "error".
        stop_reason: the stop string or the stop token's id; None for EOS and for the other finish reasons.
        prompt_tokens, cached_tokens: of the prompt, and how many of them came from the prefix cache.
        first_token_s: when the first token arrived, on the caller's clock; None when none did.
        error: why the engine refused it, with finish_reason "error".
        logprobs: of `token_ids`, and
        reasoning_text, raw_text: if the text was split, what stands between the marks, "" where there are none, and all
            of the text, marks included; `text` is then the answer.
        prompt_logprobs: of the prompt's tokens but the first, if they were asked for and the request wasn't aborted.
        choices: what the model says of each, if some were given and the request wasn't aborted; `text` is the best.
    """

    uid: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float | None
    error: RequestError | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    reasoning_text: str | None = None
    raw_text: str | None = None
    choices: list[ChoiceScore] | None = None


@dataclass(frozen=True, slots=True)
class OutputEvents:
    """What an engine step, an abort or a refusal came to.

    Attributes:
        deltas: new text of watched requests, the last text of those that ended included.
        finished: requests that ended.
        aborts: uids among them that the engine still runs and must be told to abort.
    """

    deltas: list[TextDelta] = field(default_factory=list)
    finished: list[SampleOutput] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)


class OutputProcessor:
    """All running requests of one engine, by uid. Not thread-safe."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._live: dict[int, _RequestState] = {}

    def __len__(self) -> int:
        return len(self._live)

    def add(
        self,
        uid: int,
        *,
        prompt_tokens: int,
        stops: StopRules,
        reasoning: ReasoningRules | None = None,
        logprobs: LogprobCollector | None = None,
        detokenizer: Detokenizer | None = None,
    ) -> None:
        """Expect output of a request; call before the engine gets it.

        `detokenizer` makes its text, by default the usual one.
        """
        state = _RequestState(uid, prompt_tokens, stops, detokenizer or self._detokenizer, reasoning, logprobs=logprobs)
        if stops.strings:
            state.start_text()
        self._live[uid] = state

    def add_prompt(self, prompt: NewPrompt, resolved: ResolvedRequest) -> list[int]:
        """`add` for all requests of a resolved prompt; answers the uids under which its results come, in order."""
        uids = [request.uid for request in prompt.requests]
        for request in prompt.requests:
            self.add(
                request.uid,
                prompt_tokens=len(resolved.prompt_ids),
                stops=resolved.stops,
                reasoning=resolved.reasoning,
                logprobs=LogprobCollector.of(prompt, request),
                detokenizer=resolved.detokenizer,
            )
        if not resolved.choices:
            return uids
        choices = ChoiceRequests(range(uids[0], uids[-1] + 1), resolved.choices)
        for uid in uids:
            self._live[uid].choices = choices
        return uids[:1]

    def process(self, step: StepOutput, now_s: float) -> OutputEvents:
        """Take one step's tokens; those of requests that have ended come late and are ignored.

        `now_s` is the caller's clock; it marks when requests got their first token.
        """
        events = OutputEvents()
        live = self._live
        for uid, num_cached in zip(step.first_uids, step.first_cached, strict=True):
            if (state := live.get(uid)) is not None and state.first_token_s is None:
                state.first_token_s = now_s
                state.cached_tokens = num_cached
        if step.scores is not None:
            self._take_scores(step.scores)
        uids = np.frombuffer(step.uids, dtype="<i8").tolist()
        tokens = np.frombuffer(step.tokens, dtype="<i4").tolist()
        # This loop runs once per row and step; most rows leave it after the append.
        for uid, token, finish in zip(uids, tokens, step.finish, strict=True):
            state = live.get(uid)
            if state is None:
                continue
            if token >= 0:
                state.token_ids.append(token)
            if finish or state.text is not None or state.is_limited:
                self._advance(state, token, finish, now_s, events)
        return events

    def _take_scores(self, scores: Scores) -> None:
        for uid, words in sampled_scores(scores):
            if (state := self._live.get(uid)) is not None and state.logprobs is not None:
                state.logprobs.add_output(words, scores.num_top)
        for uid, position, parts in prompt_scores(scores):
            if (state := self._live.get(uid)) is not None and state.logprobs is not None:
                state.logprobs.add_prompt(position, parts, scores.num_top)

    def watch(self, uid: int) -> str | None:
        """Report the request's text as deltas from now on.

        Returns the text so far, which the deltas continue, or None if the request isn't running.
        """
        state = self._live.get(uid)
        if state is None:
            return None
        state.watched = True
        if state.choices is not None:
            return ""
        text = state.text or state.start_text()
        return text.so_far()

    def reasoning(self, uid: int) -> Reasoning | None:
        """Where the parts of a watched request's text so far are, if it is to be split."""
        state = self._live.get(uid)
        return None if state is None or state.text is None else state.text.reasoning

    def unwatch(self, uid: int) -> None:
        """Report no more deltas of the request; an unknown uid is ignored."""
        if (state := self._live.get(uid)) is not None:
            state.watched = False

    def abort(self, uids: Iterable[int]) -> OutputEvents:
        """End requests at once with what they have; unknown uids are ignored."""
        events = OutputEvents()
        for uid in uids:
            if (state := self._live.get(uid)) is not None:
                events.aborts.extend([uid] if state.choices is None else state.choices.left)
                self._settle(state, len(state.token_ids), "abort", None, events)
        return events

    def refuse(self, message: RequestsRefused) -> OutputEvents:
        """End the requests that the engine refused; unknown uids are ignored."""
        events = OutputEvents()
        for uid, why in message.refused:
            if (state := self._live.get(uid)) is not None:
                if state.choices is not None:
                    events.aborts.extend(state.choices.left - {uid})
                self._settle(state, len(state.token_ids), "error", None, events, RequestError(message.error_type, why))
        return events

    def _advance(self, state: _RequestState, token: int, finish: int, now_s: float, events: OutputEvents) -> None:
        """Take the step's token, which is the last of `state.token_ids`, and how the engine ended the request."""
        if state.choices is not None:
            self._end_choice(state, state.choices, events)
            return
        num_text_tokens = len(state.token_ids)
        stop_reason = None
        if finish == FINISH_STOP:
            if token in state.stops.token_ids:
                stop_reason = token
            if stop_reason is None or not state.stops.include_in_output:
                num_text_tokens -= 1
        reason = state.limit(now_s) if finish == NOT_FINISHED else _FINISH_REASONS[finish]
        ended = self._settle(state, num_text_tokens, reason, stop_reason, events)
        if ended and finish == NOT_FINISHED:
            events.aborts.append(state.uid)

    def _settle(
        self,
        state: _RequestState,
        num_text_tokens: int,
        reason: FinishReason | None,
        stop_reason: int | None,
        events: OutputEvents,
        error: RequestError | None = None,
    ) -> bool:
        """Let the text be that of the first `num_text_tokens` tokens, and end the request if there is a reason.

        A stop string in the new text is a reason of its own. Returns whether the request ended.
        """
        if state.choices is not None:
            assert reason is not None
            self._end_choices(state.choices, reason, events, error)
            return True
        stop_string = None
        if state.text is not None:
            offset = state.text.num_chars
            released, stop_string = state.text.grow(state.token_ids, num_text_tokens, is_last=reason is not None)
            if released and state.watched:
                events.deltas.append(TextDelta(state.uid, offset, released, len(state.token_ids), state.text.reasoning))
        if stop_string is not None:
            reason = "stop"
        if reason is None:
            return False
        del self._live[state.uid]
        token_ids = state.token_ids.tolist()
        text, reasoning = self._whole_text(state, token_ids[:num_text_tokens])
        reasoning_text, answer = (None, text) if reasoning is None else reasoning.split(text)
        logprobs = state.logprobs if reason not in ("abort", "error") else None
        events.finished.append(
            SampleOutput(
                uid=state.uid,
                text=answer,
                token_ids=token_ids,
                finish_reason=reason,
                stop_reason=stop_reason if stop_string is None else stop_string,
                prompt_tokens=state.prompt_tokens,
                cached_tokens=state.cached_tokens,
                first_token_s=state.first_token_s,
                error=error,
                logprobs=None if logprobs is None else logprobs.output(token_ids),
                prompt_logprobs=None if logprobs is None else logprobs.prompt(),
                reasoning_text=reasoning_text,
                raw_text=None if reasoning is None else text,
            )
        )
        return True

    def _end_choice(self, state: _RequestState, choices: ChoiceRequests, events: OutputEvents) -> None:
        """Keep the scores of a choice; the last one ends them all."""
        found = None if state.logprobs is None else state.logprobs.prompt()
        assert found is not None
        choices.keep(state.uid, found)
        if not choices.left:
            self._end_choices(choices, "stop", events)

    def _end_choices(
        self, choices: ChoiceRequests, reason: FinishReason, events: OutputEvents, error: RequestError | None = None
    ) -> None:
        first, *_ = [self._live.pop(uid) for uid in choices.uids]
        scores = None if choices.left else choices.scores()
        text = "" if scores is None else best_choice(scores).text
        if text and first.watched:
            events.deltas.append(TextDelta(first.uid, 0, text, 0))
        events.finished.append(
            SampleOutput(
                uid=first.uid,
                text=text,
                token_ids=[],
                finish_reason=reason,
                stop_reason=None,
                prompt_tokens=first.prompt_tokens,
                cached_tokens=first.cached_tokens,
                first_token_s=None,
                error=error,
                choices=scores,
            )
        )

    def _whole_text(self, state: _RequestState, text_tokens: list[int]) -> tuple[str, Reasoning | None]:
        """The text of a request that has ended, and where its parts are."""
        if state.text is not None:
            return state.text.so_far(), state.text.reasoning
        text = state.detokenizer.decode_full(text_tokens)
        if state.reasoning is None:
            return text, None
        splitter = state.reasoning.splitter()
        splitter.push(text)
        splitter.flush()
        return text, splitter.found


@dataclass(slots=True)
class _RequestState:
    """One running request. Without a `text` that grows, its text is made at its end."""

    uid: int
    prompt_tokens: int
    stops: StopRules
    detokenizer: Detokenizer
    reasoning: ReasoningRules | None = None
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    text: GrowingText | None = None
    watched: bool = False
    cached_tokens: int = 0
    first_token_s: float | None = None
    logprobs: LogprobCollector | None = None
    is_limited: bool = False  # whether `limit` may end it
    choices: ChoiceRequests | None = None  # of which it is one

    def __post_init__(self) -> None:
        self.is_limited = self.stops.timeout_s is not None or self.stops.repetition_guard > 0

    def limit(self, now_s: float) -> FinishReason | None:
        """Why it ends here though the engine would go on, if it does."""
        timeout_s, first_s = self.stops.timeout_s, self.first_token_s
        if timeout_s is not None and first_s is not None and now_s - first_s >= timeout_s:
            return "timeout"
        guard = self.stops.repetition_guard
        if guard and len(self.token_ids) >= guard and len(self.token_ids) % (guard // _LOOKS) == 0:
            return "repetition" if _repeats(self.token_ids[-guard:].tobytes(), guard // MIN_REPEATS) else None
        return None

    def start_text(self) -> GrowingText:
        """Make the text while it grows from now on, beginning with the tokens that are here."""
        self.text = GrowingText(self.detokenizer.stream(), self.stops, self.reasoning)
        self.text.grow(self.token_ids, len(self.token_ids), is_last=False)
        return self.text


def _repeats(tokens: bytes, longest: int) -> bool:
    """Whether int32 tokens are one piece of at most `longest` tokens over and over; the last may be cut."""
    return any(tokens[4 * size :] == tokens[: -4 * size] for size in range(1, longest + 1))
