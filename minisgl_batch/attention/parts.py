"""The two halves that a hybrid backend is made of: attention of extend rows, and attention of decode rows.

Interfaces only; `fa`, `fi` and `two_level` implement them, `hybrid` puts them together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from minisgl_batch.attention.base import AttnSpec
from minisgl_batch.batch import ForwardBatch, IntArray, SharingCosts


class ExtendPart(ABC):
    """Attention of a step's extend rows."""

    @abstractmethod
    def prepare(self, batch: ForwardBatch) -> Any:
        """What all layers share, for the rows behind the decode rows."""

    @abstractmethod
    def forward(self, q: torch.Tensor, layer: int, spec: AttnSpec, prepared: Any) -> torch.Tensor:
        """(num_extend_tokens, num_heads, head_dim) -> the same shape."""


class DecodePart(ABC):
    """Attention of decode rows that stand in the decode buffers, inside and outside of graphs."""

    @abstractmethod
    def make_ready(self, num_rows: int) -> None:
        """Before the first step of so many rows, and before the buffers are filled for it: whatever takes long."""

    @abstractmethod
    def prepare(self, num_rows: int, indptr: IntArray, kv_lens: IntArray) -> Any:
        """Plan for rows that stand in the buffers, as the host knows them.

        For one number of rows the answer always means the same memory: a graph that was captured with it does what the
        last call for that number said.

        Args:
            num_rows: rows, padding included.
            indptr: (at least num_rows + 1,) where the rows' own page lists begin.
            kv_lens: (at least num_rows,) tokens of each row.
        """

    @abstractmethod
    def forward(self, q: torch.Tensor, layer: int, spec: AttnSpec, prepared: Any) -> torch.Tensor:
        """(num_rows, num_heads, head_dim) -> the same shape."""


@dataclass(frozen=True)
class PrefixCosts:
    """Microseconds a layer, fitted to an H200 at 64 and 256 rows and prefixes of 256 to 2,048 tokens.

    Attributes:
        per_saved_mib: of keys and values, where rows that share them would read them one by one and find some of them
            in the L2 cache: less than at the memory's speed.
        per_row, per_row_and_head: of attending to prefixes and joining.
    """

    per_saved_mib: float
    per_row: float
    per_row_and_head: float


class OwnPagesPart(DecodePart):
    """A half for decode rows that can join its result with attention over a prefix that their own page lists leave out.

    Attributes:
        prefix_costs: when that is worth it.
    """

    prefix_costs: PrefixCosts

    @abstractmethod
    def forward_behind(
        self, prefix: tuple[torch.Tensor, torch.Tensor], q: torch.Tensor, layer: int, spec: AttnSpec, prepared: Any
    ) -> torch.Tensor:
        """(num_rows, num_heads, head_dim) -> the same shape.

        Args:
            prefix: attention over the prefixes: the output, and (num_heads, num_rows) float32 the natural logarithms of
                the sums of weights.
        """


class TwoLevelPart(DecodePart):
    """A half for decode rows that reads shared prefixes once.

    Attributes:
        costs: when that is worth it.
    """

    costs: SharingCosts
