"""One call of `LLM`: which prompt and sample each uid is, and what has come back, as the caller gets it.

Knows nothing of engines.
"""

from __future__ import annotations

import logging

from minisgl_batch.errors import RequestError
from minisgl_batch.messages import NewPrompt
from minisgl_batch.outputs import CompletionOutput, RequestOutput
from minisgl_batch.scheduler.constraints import FAILED
from minisgl_batch.scheduler.overflow import OVERFLOWED
from minisgl_batch.tokenizer import Logprob, ModelTokenizer, PromptInput, SampleOutput

logger = logging.getLogger(__name__)


class Call:
    """See the module's docstring."""

    def __init__(self, prompts: list[PromptInput], tokenizer: ModelTokenizer) -> None:
        self._prompts = prompts
        self._text_of = tokenizer.token_text
        self._prompt_ids: list[list[int]] = []
        self._owners: dict[int, tuple[int, int]] = {}
        self._samples: list[dict[int, SampleOutput]] = []
        self.messages: list[NewPrompt] = []
        self._has_warned = False

    def add(self, message: NewPrompt, uids: list[int], prompt_ids: list[int]) -> None:
        """Take a prompt; `uids` are those of its samples."""
        for sample_index, uid in enumerate(uids):
            self._owners[uid] = (len(self._prompt_ids), sample_index)
        self._prompt_ids.append(prompt_ids)
        self._samples.append({})
        self.messages.append(message)

    def uids(self) -> set[int]:
        """Of all samples."""
        return set(self._owners)

    def owner(self, uid: int) -> tuple[int, int]:
        """(prompt index, sample index)."""
        return self._owners[uid]

    def keep(self, sample: SampleOutput) -> int:
        """Take a finished sample, and say which of its prompt's it is."""
        prompt_index, sample_index = self.owner(sample.uid)
        if (error := sample.error) is not None:
            if error.error_type not in (FAILED, OVERFLOWED):
                raise RequestError(error.error_type, f"prompt {prompt_index}: {error}")
            if error.error_type == OVERFLOWED and not self._has_warned:
                logger.warning("prompt %d: %s; there may be more of them: see finish_reason", prompt_index, error)
                self._has_warned = True
        self._samples[prompt_index][sample_index] = sample
        return sample_index

    def collect(self, sample: SampleOutput) -> CompletionOutput:
        return self._completion(self.keep(sample), sample)

    def outputs(self) -> list[RequestOutput]:
        return [
            RequestOutput(
                prompt=prompt,
                prompt_token_ids=prompt_ids,
                outputs=[self._completion(i, samples[i]) for i in range(len(samples))],
                num_cached_tokens=samples[0].cached_tokens,
                prompt_logprobs=self._prompt_logprobs(samples[0]),
            )
            for prompt, prompt_ids, samples in zip(self._prompts, self._prompt_ids, self._samples, strict=True)
        ]

    def _completion(self, index: int, sample: SampleOutput) -> CompletionOutput:
        found = sample.logprobs
        return CompletionOutput(
            index,
            sample.text,
            sample.token_ids,
            sample.finish_reason,
            sample.stop_reason,
            logprobs=None if found is None else found.as_dicts(self._text_of),
            cumulative_logprob=None if found is None else sum(found.logprobs.tolist()),
            reasoning_text=sample.reasoning_text,
            raw_text=sample.raw_text,
            choices=sample.choices,
        )

    def _prompt_logprobs(self, first: SampleOutput) -> list[dict[int, Logprob] | None] | None:
        found = first.prompt_logprobs
        return None if found is None else [None, *found.as_dicts(self._text_of)]
