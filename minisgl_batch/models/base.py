"""What a model is to the engine: tokens to hidden states, and chosen hidden states to logits.

Implemented by the modules that `registry.py` names. A model knows neither requests nor pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from minisgl_batch.attention.base import ForwardContext
from minisgl_batch.models.config import ModelConfig


class CausalLM(nn.Module, ABC):
    """A decoder-only language model, or one tensor-parallel rank's share of it.

    Made with uninitialised weights: `weights.load_weights` or `weights.init_dummy_weights` fills them.

    Attributes:
        config: what it was built from.
    """

    config: ModelConfig

    @abstractmethod
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Run a step through all layers.

        Args:
            input_ids: (num_tokens,) int32.
            positions: (num_tokens,) int32, each below `config.context_len`.
            ctx: the step and the attention backend.

        Returns:
            (num_samples, hidden_size): the normalised hidden states of the step's `sample_tokens`, or of all tokens if
            these are None; equal on all ranks.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of chosen rows of `forward`'s result, for this rank's part of the vocabulary.

        Args:
            hidden: (num_rows, hidden_size).
            out: where to put them.

        Returns:
            (num_rows, shard): column i stands for token `vocab_range[i]`. The shard has the same width on all ranks;
            columns beyond `vocab_range` hold -inf.
        """

    @abstractmethod
    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """All ranks' `logits` of the same rows: (num_rows, vocab_size). Called by all ranks together."""

    @property
    @abstractmethod
    def vocab_shard(self) -> int:
        """The width of `logits`, padding included."""

    @property
    @abstractmethod
    def vocab_range(self) -> range:
        """The token ids of this rank's logits."""
