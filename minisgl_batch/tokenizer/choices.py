"""Choices: given continuations of a prompt, each scored by the model instead of generating one.

A choice is a request whose prompt ends with it; the tokens of the choice alone are scored, and what the engine
generates behind it is thrown away. Here are the requests of one prompt put together again. Knows nothing of rows.
Called by the output processor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minisgl_batch.choices import ChoiceScore
from minisgl_batch.tokenizer.logprobs import Logprobs

MAX_CHOICE_TOKENS = 1 << 22
"""Most tokens of a prompt's choices, each with the prompt before it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A continuation of a prompt: its text, and (num_tokens,) int32 ids, at least one."""

    text: str
    token_ids: npt.NDArray[np.int32]


class ChoiceRequests:
    """The requests of one prompt's choices, the first of which stands for all of them to those outside.

    Attributes:
        uids: in the order of the choices.
        left: those that the engine hasn't ended.
    """

    __slots__ = ("_scores", "_texts", "left", "uids")

    def __init__(self, uids: range, choices: Iterable[Choice]) -> None:
        self.uids = uids
        self.left = set(uids)
        self._texts = [choice.text for choice in choices]
        self._scores: dict[int, ChoiceScore] = {}

    def keep(self, uid: int, found: Logprobs) -> None:
        """Take a request that has ended, with the scores of its choice's tokens."""
        self.left.remove(uid)
        self._scores[uid] = ChoiceScore(
            text=self._texts[self.uids.index(uid)],
            logprob=float(found.logprobs.sum(dtype=np.float64)),
            num_tokens=len(found.token_ids),
            is_greedy=bool((found.ranks == 1).all()),
        )

    def scores(self) -> list[ChoiceScore]:
        """Of all choices in their order, once none is left."""
        return [self._scores[uid] for uid in self.uids]
