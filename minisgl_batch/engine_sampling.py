"""How the engine samples one request: what is left of `SamplingParams` once all layers of it are resolved.

Knows nothing of defaults, rows or torch. Made where requests are resolved; travels to the engine within messages.
"""

from __future__ import annotations

import msgspec

MIN_TEMPERATURE = 1e-5  # below, noise would drown in rounding: such rows are greedy


class EngineSampling(msgspec.Struct, frozen=True, array_like=True):
    """The concrete values that the engine samples one request with.

    Attributes:
        max_tokens: most tokens to generate; the engine cuts it to what the context leaves.
        temperature: 0 is greedy.
        top_k: 0 keeps all.
        top_p, min_p: 1 and 0 keep all.
        seed: 63-bit; the noise of a token depends on (seed, sample_index, output position) alone.
        sample_index: which of the row's `n` samples this is.
        stop_ids: tokens that end the request: the model's end-of-sequence ids (unless the row ignores them) and the
            row's `stop_token_ids`. They travel with the request because ranks load no tokenizer.
        presence_penalty, frequency_penalty, repetition_penalty: 0, 0 and 1 change nothing.
        logit_bias: (token, bias), each token once.
        min_tokens: none of `stop_ids` before so many output tokens.
        bad_words: token sequences that the output must not have.
        num_logprobs, num_prompt_logprobs: most probable tokens to name beside each token of output and prompt; -1: no
            log-probabilities.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0
    stop_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_logprobs: int = -1
    num_prompt_logprobs: int = -1

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1

    @property
    def has_penalty(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def num_rules(self) -> int:
        """Tokens named by biases, bad words and, until `min_tokens`, as stop tokens."""
        num_held_back = len(self.stop_ids) if self.min_tokens else 0
        return len(self.logit_bias) + num_held_back + sum(map(len, self.bad_words))

    @property
    def num_adjusted(self) -> int | None:
        """How many of the first output tokens are picked from changed logits; None: all."""
        if self.has_penalty or self.logit_bias or self.bad_words:
            return None
        return self.min_tokens if self.stop_ids else 0

    @property
    def reads_tokens(self) -> bool:
        """Whether the logits change by the tokens before, beyond how many there are."""
        return self.has_penalty or any(len(word) > 1 for word in self.bad_words)
