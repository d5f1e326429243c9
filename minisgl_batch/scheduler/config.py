"""What one scheduler is held to. `factory` makes it from an engine's options and the memory that it found."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_batch.batch import SharingCosts


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one scheduler, all resolved.

    Attributes:
        num_pages, page_size: the KV pool.
        max_running: slots.
        max_seq_len: longest prompt + output in tokens; fits into the pool.
        max_prefill_tokens: token budget of a step's pieces.
        overlap: which loop.
        mixed: a step may have both decode rows and pieces of prompts; otherwise pieces go first, in steps of their own.
        sharing: when decode rows attend to a prefix in common in two levels; None: never.
        dtype: what the model computes in, as users name it.
    """

    num_pages: int
    page_size: int
    max_running: int
    max_seq_len: int
    max_prefill_tokens: int
    overlap: bool
    mixed: bool = True
    sharing: SharingCosts | None = None
    dtype: str = "float32"
