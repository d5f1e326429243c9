"""What the in-process `LLM` gives back; the names are those of vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_batch.choices import ChoiceScore
from minisgl_batch.tokenizer import FinishReason, Logprob, PromptInput


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a prompt.

    Attributes:
        index: which of the prompt's `n` samples.
        text: what was generated, without the token or string that stopped it.
        token_ids: every generated token, the one that stopped it included.
        finish_reason: "stop", "length", "timeout", "repetition", or "error" where a grammar came to a dead end.
        stop_reason: the stop string or stop token id; None for an end-of-sequence token and the other finish reasons.
        logprobs: with `SamplingParams.logprobs`, for each of `token_ids`: it and the most probable ones there, by id.
        cumulative_logprob: the sum over `token_ids`.
        reasoning_text, raw_text: with `SamplingParams.split_reasoning`, what was written before the answer, and all
            that was written, marks included.
        choices: with `SamplingParams.choices`, what the model says of each; `text` is the most probable one.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    reasoning_text: str | None = None
    raw_text: str | None = None
    choices: list[ChoiceScore] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All samples of a prompt.

    Attributes:
        prompt: the text, token ids or messages.
        prompt_token_ids: what the model read.
        outputs: one for each of the prompt's `n` samples.
        num_cached_tokens: prompt tokens that the prefix cache had (of the first sample).
        prompt_logprobs: with `SamplingParams.prompt_logprobs`, None for the first token and then as `logprobs`.
    """

    prompt: PromptInput
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """New text of one sample.

    Attributes:
        prompt_index, sample_index: whose.
        text: continues the sample's earlier events; "" when it only ends.
        finished: set in the sample's last event.
        reasoning_text: with `SamplingParams.split_reasoning`, continues the sample's reasoning.
    """

    prompt_index: int
    sample_index: int
    text: str
    finished: CompletionOutput | None = None
    reasoning_text: str = ""
