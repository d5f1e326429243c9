"""What a prompt and its output may have together: refuses what is longer, or cuts it as `truncate` says.

Knows nothing of texts. Called where requests are resolved.
"""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_batch.errors import RequestError
from minisgl_batch.sampling_params import SamplingParams, Truncate
from minisgl_batch.tokenizer.tokenizer import IntArray


@dataclass(frozen=True, slots=True)
class Room:
    """The longest sequence, in tokens, of an engine or a model.

    Attributes:
        max_len: most tokens of prompt and output.
        context_len: those of the model's context; an engine with a small KV cache has room for fewer.
    """

    max_len: int
    context_len: int

    def __str__(self) -> str:
        """What it is, to end a sentence about a prompt's length."""
        if self.max_len < self.context_len:
            return f"the engine has room for {self.max_len} of the context's {self.context_len}"
        return f"the context {self.max_len}"

    @property
    def advice(self) -> str:
        """How there is more."""
        if self.max_len < self.context_len:
            return "give the engine a larger KV cache (num_pages, memory_ratio or tp) or max_seq_len"
        return "serve a model with a longer context"

    def fit(self, prompt_ids: IntArray, params: SamplingParams) -> IntArray:
        """The prompt, or what `truncate` leaves of it.

        Raises:
            RequestError: it leaves no room for output and isn't to be cut, or can't be.
        """
        num_tokens = len(prompt_ids)
        lengths = f"the prompt has {num_tokens} tokens and {self}"
        if params.truncate == "error":
            if num_tokens < self.max_len:
                return prompt_ids
            raise RequestError(
                "prompt_too_long",
                f"{lengths}, which leaves no room for output: shorten the prompt to at most {self.max_len - 1} tokens, "
                f"let truncate cut it, or {self.advice}",
            )
        if num_tokens + (params.max_tokens or 1) <= self.max_len:
            return prompt_ids
        if params.max_tokens is None:
            raise RequestError(
                "prompt_too_long", f"{lengths}: truncate needs max_tokens, to know how much room to make"
            )
        return self.cut(prompt_ids, params.max_tokens, "max_tokens", params.truncate)

    def cut(self, prompt_ids: IntArray, wanted: int, what: str, truncate: Truncate | None) -> IntArray:
        """What is left of a prompt when `what` gets the tokens that it wants.

        Raises:
            RequestError: that is nothing.
        """
        kept = self.max_len - wanted
        if kept < 1:
            raise RequestError(
                "prompt_too_long",
                f"the prompt has {len(prompt_ids)} tokens and {self}, of which {what} takes {wanted}: nothing is left "
                "for the prompt",
            )
        return prompt_ids[-kept:] if truncate == "left" else prompt_ids[:kept]
