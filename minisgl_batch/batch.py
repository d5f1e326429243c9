"""One engine step: what the scheduler decided (host arrays) and what the model reads (device tensors).

Rows of a step are ordered `[decode rows | extend rows]`. A decode row computes one token; an extend row computes a
piece of its prompt. Lengths of row i, as half-open ranges of its token positions:

    [0, kv_lens[i] - q_lens[i])             KV already in the pool
    [kv_lens[i] - q_lens[i], kv_lens[i])    computed in this step
    [kv_lens[i], kv_lens[i] + 1)            sampled in this step, where samples[i]

The scheduler makes a ScheduledBatch; the engine turns it into a ForwardBatch; models and attention backends read that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from minisgl_batch.engine_sampling import EngineSampling

if TYPE_CHECKING:
    import torch

IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
FillMasks: TypeAlias = Callable[[IntArray], None]
"""Writes the masks of a step's constrained rows to (num_constrained, num_words) int32, contiguous; bit t % 32 of word
t / 32 allows token t."""


@dataclass(frozen=True, slots=True)
class TableEdits:
    """Changes of the page table and the token pool since the last step; the engine makes them before it runs a step.

    Attributes:
        page_index, pages: flat positions in the page table, row by row, and what to write there. A position that
            stands there twice has the same value twice.
        token_index, tokens: the same for the token pool.
        new_rows: (slot, sampling, num_prompt) of each row that got its slot.
    """

    page_index: IntArray
    pages: IntArray
    token_index: IntArray
    tokens: IntArray
    new_rows: list[tuple[int, EngineSampling, int]]


_NOTHING: IntArray = np.empty(0, dtype=np.int32)
NO_EDITS = TableEdits(_NOTHING, _NOTHING, _NOTHING, _NOTHING, [])


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Groups of decode rows whose sequences begin with the same pages, to be read once for all of them.

    The rows of group g are the next `num_rows[g]` rows of the step, from row 0 on; rows behind them are in no group.

    Attributes:
        num_rows, num_pages: of each group.
        pages: the groups' pages, one group after the other.
        version: another number whenever the groups are other ones.
    """

    num_rows: IntArray
    num_pages: IntArray
    pages: IntArray
    version: int


@dataclass(frozen=True)
class SharingCosts:
    """What attention in two levels costs and saves, per layer and in microseconds; measured for a backend's kernels.

    Attributes:
        per_saved_token: saved for each KV token that isn't read once more.
        base: of the extra kernels.
        per_row: of the extra kernels, for each decode row.
        per_prefix_token: of the longest shared prefix, whose tokens one kernel reads one after the other.
        min_rows: fewer decode rows never share.
        max_groups: what the backend has room for.
    """

    per_saved_token: float
    base: float
    per_row: float
    per_prefix_token: float
    min_rows: int = 32
    max_groups: int = 8

    def is_worth(self, num_rows: int, saved_tokens: int, longest_prefix: int) -> bool:
        """Whether a step is faster in two levels; `saved_tokens` is what all groups save together."""
        cost = self.base + self.per_row * num_rows + self.per_prefix_token * longest_prefix
        return saved_tokens > 0 and self.per_saved_token * saved_tokens > cost


@dataclass(frozen=True, slots=True)
class Scoring:
    """Tokens of a step whose log-probabilities are wanted, and those of the most probable tokens in their place.

    Attributes:
        num_top: how many of the most probable ones.
        sampled: positions among the rows that sample; their new tokens are scored.
        rows: rows of the step whose pieces score tokens of the prompt: each token the one behind it.
        firsts, counts: which tokens of each such piece: so many from this one on.
    """

    num_top: int
    sampled: IntArray
    rows: IntArray
    firsts: IntArray
    counts: IntArray

    @property
    def num_words(self) -> int:
        """int32 values of a token's score, see `engine.scores`."""
        return 2 + 2 * self.num_top


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """The scheduler's decision for one step. Arrays have one entry per row unless noted.

    Attributes:
        slots: each row's line in the page table and token pool.
        q_lens: tokens computed in this step.
        kv_lens: tokens whose KV is in the pool after this step.
        num_decode: how many leading rows are decode rows.
        new_pages: (num_decode,) page that a decode row's token begins, for its line of the page table; -1 for none.
        samples: rows that get a new token; an extend row whose piece isn't the last gets none.
        any_filter: some sampled row uses top-k, top-p or min-p.
        edits: what to change in the tables first.
        shared: groups of decode rows to attend in two levels; None to attend row by row.
        any_adjust: some sampled row's logits change before it samples: penalties, biases, tokens that mustn't come.
        scoring: whose log-probabilities to give; None: nobody's.
        constrained: positions among the rows that sample; the step waits for their masks before it samples. None: none.
    """

    slots: IntArray
    q_lens: IntArray
    kv_lens: IntArray
    num_decode: int
    new_pages: IntArray
    samples: BoolArray
    any_filter: bool
    edits: TableEdits
    shared: SharedPrefixes | None = None
    any_adjust: bool = False
    scoring: Scoring | None = None
    constrained: IntArray | None = None

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return int(self.q_lens.sum())

    @property
    def is_decode(self) -> bool:
        return self.num_decode == self.num_rows


@dataclass(slots=True)
class ForwardBatch:
    """One step on the device.

    Attributes:
        host: the decision that this is made of.
        input_ids: (num_tokens,) int32.
        positions: (num_tokens,) int32; position of each token in its sequence.
        out_loc: (num_tokens,) int32; where each token's KV goes: page * page_size + offset.
        slots: (num_rows,) int32.
        kv_lens: (num_rows,) int32.
        q_starts: (num_rows + 1,) int32; row i has the step's tokens [q_starts[i], q_starts[i + 1]).
        page_table: (max_running + 1, max_pages_per_row) int32; the whole table, lines are picked by `slots`.
        token_pool: (max_running + 1, max_seq_len + 1) int32.
        sample_tokens: (num_samples + num_scored,) int32; which of the step's tokens give hidden states: those of rows
            that sample, then those that score the prompt's; None: all of them sample.
        targets: (num_scored,) int32; the tokens that the latter score.
        attention: what the attention backend's `prepare_metadata` made for its own use.
    """

    host: ScheduledBatch
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_loc: torch.Tensor
    slots: torch.Tensor
    kv_lens: torch.Tensor
    q_starts: torch.Tensor
    page_table: torch.Tensor
    token_pool: torch.Tensor
    sample_tokens: torch.Tensor | None
    targets: torch.Tensor
    attention: Any = None
