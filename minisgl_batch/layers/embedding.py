"""Token embedding and LM head, split over the ranks by vocabulary.

Every rank's shard has the same number of rows, the vocabulary's size divided by the group's and rounded up; what the
last shards have too much is padding that no token names. Used by the models.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from minisgl_batch.distributed.group import TPGroup
from minisgl_batch.layers.base import Layer, Part, new_parameter
from minisgl_batch.layers.packing import linear, pack
from minisgl_kernels.embedding import embedding
from minisgl_kernels.matmul import Operand


class VocabParallelEmbedding(Layer):
    """Token ids -> vectors.

    Args:
        scale: factor on them, rounded to `dtype` first.

    Attributes:
        vocab_range: the token ids whose rows this rank holds; its weight's first `len(vocab_range)` rows.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tp: TPGroup,
        dtype: torch.dtype,
        device: torch.device | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self._tp = tp
        self._scale = float(torch.tensor(scale, dtype=dtype, device="cpu"))
        self._vocab_size = vocab_size
        self.vocab_range, num_rows = _vocab_shard(vocab_size, tp)
        self.weight = _vocab_weight(self.vocab_range, num_rows, hidden_size, dtype, device)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(num_tokens,) int32 or int64 -> (num_tokens, hidden_size)."""
        if self._tp.size == 1:
            rows = F.embedding(input_ids, self.weight)
        else:
            rows = self._tp.all_reduce(embedding(input_ids, self.weight, self.vocab_range))
        return rows if self._scale == 1.0 else rows.mul_(self._scale)

    def parts(self) -> Iterator[Part]:
        yield _vocab_part(self.weight, self.vocab_range, self._vocab_size)


class LMHead(Layer):
    """Hidden states -> logits of this rank's part of the vocabulary.

    Attributes:
        vocab_range: the token ids that the columns stand for; later columns are padding and hold -inf.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tp: TPGroup,
        dtype: torch.dtype,
        device: torch.device | None = None,
        tied: VocabParallelEmbedding | None = None,
    ) -> None:
        """`tied`: the embedding whose weight is this layer's too."""
        super().__init__()
        self._tp = tp
        self._vocab_size = vocab_size
        self._is_tied = tied is not None
        self.vocab_range, self.shard_size = _vocab_shard(vocab_size, tp)
        if tied is None:
            self.weight = _vocab_weight(self.vocab_range, self.shard_size, hidden_size, dtype, device)
        else:
            self.weight = tied.weight

    def forward(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """(num_rows, hidden_size) -> (num_rows, shard of the vocabulary), in `out` if it is given."""
        logits = linear(hidden, self.weight, None, out)
        if len(self.vocab_range) < logits.shape[1]:
            logits[:, len(self.vocab_range) :] = float("-inf")
        return logits

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """All ranks' logits of the same rows: (num_rows, vocab_size). A collective call."""
        if self._tp.size == 1:
            return logits
        shards = self._tp.all_gather(logits)  # (tp, num_rows, shard)
        return shards.transpose(0, 1).flatten(1)[:, : self._vocab_size]

    def parts(self) -> Iterator[Part]:
        if not self._is_tied:
            yield _vocab_part(self.weight, self.vocab_range, self._vocab_size)

    def factors(self) -> Iterator[Operand]:
        yield self.weight

    def finish(self) -> None:
        # A tied head may get a copy of its own here: the embedding needs the plain layout.
        self.weight = pack(self.weight)


def _vocab_shard(vocab_size: int, tp: TPGroup) -> tuple[range, int]:
    """The token ids of a rank, and the rows of its shard (padding included)."""
    num_rows = -(-vocab_size // tp.size)
    start = min(tp.rank * num_rows, vocab_size)
    return range(start, min(start + num_rows, vocab_size)), num_rows


def _vocab_weight(
    vocab_range: range, num_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device | None
) -> nn.Parameter:
    weight = new_parameter((num_rows, hidden_size), dtype, device)
    weight[len(vocab_range) :].zero_()  # no checkpoint fills the padding
    return weight


def _vocab_part(weight: torch.Tensor, vocab_range: range, vocab_size: int) -> Part:
    return Part("weight", weight[: len(vocab_range)], (vocab_size, weight.shape[1]), start=vocab_range.start)
