"""What the model says of a given continuation of a prompt.

Knows nothing of how it was found. Used on the engine's side and on that of jobs.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class ChoiceScore(msgspec.Struct, frozen=True):
    """A scored choice.

    Attributes:
        text: the choice.
        logprob: natural logarithm of its probability behind the prompt: the sum over its tokens.
        num_tokens: by which to divide for the mean.
        is_greedy: each of its tokens is the most probable one in its place.
    """

    text: str
    logprob: float
    num_tokens: int
    is_greedy: bool


def best_choice(scores: Iterable[ChoiceScore]) -> ChoiceScore:
    """The most probable one; of those that tie, the first."""
    return max(scores, key=lambda score: score.logprob)
