"""Log-probabilities on their way from the engine to those who asked: collected token by token, then as vLLM has them.

Knows nothing of rows or Redis. Called by `OutputProcessor` and the in-process `LLM`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minisgl_batch.messages import NewPrompt, NewRequest, Scores

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one token in one place, as in vLLM.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 for the most probable token there.
        decoded_token: its text by itself.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of n tokens that follow each other, with the k most probable ones in the place of each.

    Attributes:
        token_ids: (n,) int32.
        logprobs: (n,) float32.
        ranks: (n,) int32, from 1.
        top_ids, top_logprobs: (n, k) int32 and float32, the most probable first.
    """

    token_ids: IntArray
    logprobs: FloatArray
    ranks: IntArray
    top_ids: IntArray
    top_logprobs: FloatArray

    @property
    def num_top(self) -> int:
        return int(self.top_ids.shape[1])

    def as_dicts(self, text_of: Callable[[int], str]) -> list[dict[int, Logprob]]:
        """For each of the n tokens: it and the most probable ones, by id."""
        places = zip(
            self.token_ids.tolist(),
            self.logprobs.tolist(),
            self.ranks.tolist(),
            self.top_ids.tolist(),
            self.top_logprobs.tolist(),
            strict=True,
        )
        return [
            {token: Logprob(logprob, rank, text_of(token))}
            | {top: Logprob(p, i, text_of(top)) for i, (top, p) in enumerate(zip(ids, values, strict=True), 1)}
            for token, logprob, rank, ids, values in places
        ]


class LogprobCollector:
    """The scores of one request's tokens as they come."""

    __slots__ = ("_first", "_num_prompt_top", "_num_top", "_output", "_prompt", "_prompt_ids")

    def __init__(self, prompt: NewPrompt, request: NewRequest) -> None:
        sampling = prompt.sampling_of(request)
        self._num_top = sampling.num_logprobs
        self._num_prompt_top = sampling.num_prompt_logprobs
        self._output: list[IntArray] = []
        prompt_ids, ending = (np.frombuffer(ids, dtype="<i4") for ids in (prompt.prompt_ids, request.ending))
        self._first, self._prompt_ids = (len(prompt_ids), ending) if len(ending) else (1, prompt_ids[1:])
        num_scored = len(self._prompt_ids) if self._num_prompt_top >= 0 else 0
        self._prompt = np.zeros((num_scored, 2 + 2 * max(self._num_prompt_top, 0)), np.int32)

    @staticmethod
    def of(prompt: NewPrompt, request: NewRequest) -> LogprobCollector | None:
        """None for a request that asks for no log-probabilities."""
        wants_none = prompt.sampling.num_logprobs < 0 and prompt.sampling.num_prompt_logprobs < 0
        return None if wants_none else LogprobCollector(prompt, request)

    def add_output(self, words: IntArray, num_top: int) -> None:
        """(2 + 2 * num_top,): the score of the next output token."""
        self._output.append(_cut(words, num_top, self._num_top))

    def add_prompt(self, position: int, words: IntArray, num_top: int) -> None:
        """(n, 2 + 2 * num_top): the scores of the prompt's tokens from `position` on."""
        start = position - self._first
        self._prompt[start : start + len(words)] = _cut(words, num_top, self._num_prompt_top)

    def output(self, token_ids: Sequence[int]) -> Logprobs | None:
        """Of the output's tokens, of which there may be more by now; None if nobody asked."""
        if self._num_top < 0:
            return None
        rows = self._output[: len(token_ids)] or [np.zeros((0, 2 + 2 * self._num_top), np.int32)]
        return _unpack(np.array(token_ids, np.int32), np.vstack(rows), self._num_top)

    def prompt(self) -> Logprobs | None:
        """Of the prompt's tokens but the first, or of its ending's alone; None if nobody asked."""
        if self._num_prompt_top < 0:
            return None
        return _unpack(self._prompt_ids, self._prompt, self._num_prompt_top)


def sampled_scores(scores: Scores) -> Iterator[tuple[int, IntArray]]:
    """(uid, words) of each request's new token."""
    words = np.frombuffer(scores.sampled, dtype="<i4").reshape(-1, 2 + 2 * scores.num_top)
    yield from zip(np.frombuffer(scores.uids, dtype="<i8").tolist(), words, strict=True)


def prompt_scores(scores: Scores) -> Iterator[tuple[int, int, IntArray]]:
    """(uid, position of the first token, words) of each part of a prompt."""
    for uid, position, words in scores.prompts:
        yield uid, position, np.frombuffer(words, dtype="<i4").reshape(-1, 2 + 2 * scores.num_top)


def _cut(words: IntArray, num_top: int, num_wanted: int) -> IntArray:
    """(..., 2 + 2 * num_top) -> (..., 2 + 2 * num_wanted)."""
    second = 2 + num_top
    return np.concatenate([words[..., : 2 + num_wanted], words[..., second : second + num_wanted]], axis=-1)


def _unpack(token_ids: IntArray, words: IntArray, num_top: int) -> Logprobs:
    return Logprobs(
        token_ids=token_ids,
        logprobs=words[:, 0].copy().view(np.float32),
        ranks=words[:, 1].copy(),
        top_ids=words[:, 2 : 2 + num_top].copy(),
        top_logprobs=words[:, 2 + num_top :].copy().view(np.float32),
    )
