"""What an attention backend is: it attends over the paged pool, where a step's keys and values are already.

A backend is one file behind `registry.py`. It knows pages and lengths, not requests, models or schedules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from minisgl_batch.attention.decode_buffers import DecodeBuffers
from minisgl_batch.batch import ForwardBatch, ScheduledBatch, SharingCosts
from minisgl_batch.kvcache.mha_pool import MHAKVCache


@dataclass(frozen=True)
class AttnSpec:
    """How one layer attends.

    Attributes:
        scale: factor on q·k, usually head_dim ** -0.5.
        window: a token sees this many tokens back (itself included); None sees all.
        sinks: (num_heads,) float32, each head's score of one more key, which all tokens see and whose value is zero;
            None: there is none.
    """

    scale: float
    window: int | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class AttnHeads:
    """The heads of a model on one rank, and their factor on q·k."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float


@dataclass(frozen=True)
class BackendSetup:
    """What backends are made of.

    Attributes:
        pool: the KV pool.
        heads: the model's heads on this rank.
        dtype: compute type.
        make_buffers: makes the buffers for decode rows, for backends that keep them.
        fixed_order: each token must get the same bits whatever else is in its step, in a decode row or an extend row.
    """

    pool: MHAKVCache
    heads: AttnHeads
    dtype: torch.dtype
    make_buffers: Callable[[], DecodeBuffers]
    fixed_order: bool = False


class AttentionBackend(ABC):
    """Causal attention of a step's rows over the paged KV pool."""

    @abstractmethod
    def prepare_metadata(self, batch: ForwardBatch) -> None:
        """Compute what all layers of this step share and leave it in `batch.attention`."""

    @abstractmethod
    def forward(self, q: torch.Tensor, layer: int, spec: AttnSpec, batch: ForwardBatch) -> torch.Tensor:
        """Attend; the keys and values of this step's tokens are in the pool.

        Args:
            q: (num_tokens, num_heads, head_dim) after norm and RoPE, each token contiguous; all contiguous on a GPU.
            layer: which layer's part of the pool.
            spec: scale, window and sinks of that layer.
            batch: the step, after `prepare_metadata`.

        Returns:
            (num_tokens, num_heads, head_dim), contiguous, in q's dtype.
        """


class GraphBackend(AttentionBackend):
    """A backend whose decode steps can be captured in CUDA graphs.

    A graph is captured for a number of rows and replayed with other rows: whatever changes between replays is written
    to where the captured kernels read it.
    """

    @property
    @abstractmethod
    def sharing_costs(self) -> SharingCosts | None:
        """When to read a common prefix once for all rows of a group (ScheduledBatch.shared); None: it can't."""

    @abstractmethod
    def prepare_capture(self, num_rows: int, *, shared: bool) -> Any:
        """Metadata to capture a decode step of `num_rows` rows with, as `ForwardBatch.attention`."""

    @abstractmethod
    def prepare_replay(self, batch: ScheduledBatch, num_rows: int) -> None:
        """Before a replay: let the graph of `num_rows` rows do this step, whose decode rows are padded to that."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What a forward pass needs besides tensors. Made by the engine for each step.

    Attributes:
        batch: the step, after the backend's `prepare_metadata`.
        attention: the backend.
        pool: where each layer stores its keys and values before the backend reads them.
    """

    batch: ForwardBatch
    attention: AttentionBackend
    pool: MHAKVCache
