"""The `fa` backend: flash-attn over the paged pool. A half of hybrid backends, or all of a step without graphs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from minisgl_batch.attention import flash_attn
from minisgl_batch.attention.base import AttentionBackend, AttnSpec, BackendSetup
from minisgl_batch.attention.parts import ExtendPart
from minisgl_batch.attention.widened import WidenedLayer
from minisgl_batch.batch import ForwardBatch
from minisgl_batch.kvcache.mha_pool import MHAKVCache


class FlashAttnBackend(AttentionBackend):
    """Decode rows are sequences with one query, like any other."""

    def __init__(self, pool: MHAKVCache) -> None:
        self._rows = FlashAttnExtend(pool)

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        batch.attention = self._rows.prepare_from(batch, 0)

    def forward(self, q: torch.Tensor, layer: int, spec: AttnSpec, batch: ForwardBatch) -> torch.Tensor:
        return self._rows.forward(q, layer, spec, batch.attention)


class FlashAttnRows(NamedTuple):
    """Rows of a step.

    Attributes:
        wanted: (num_entries,) int32, what `WidenedLayer.read` is told of their pages; None: nothing is widened.
    """

    sequences: flash_attn.PagedSequences
    wanted: torch.Tensor | None


class FlashAttnExtend(ExtendPart):
    """The half for extend rows.

    Args:
        widened: where to read an e4m3 pool; None: the pool has the compute type.
    """

    def __init__(self, pool: MHAKVCache, widened: WidenedLayer | None = None) -> None:
        self._pool = pool
        self._widened = widened
        self._attend = flash_attn.load(pool.page_size)

    def prepare(self, batch: ForwardBatch) -> FlashAttnRows:
        return self.prepare_from(batch, batch.host.num_decode)

    def prepare_from(self, batch: ForwardBatch, first: int) -> FlashAttnRows:
        """For the rows from `first` on, whose tokens are counted from the first of them."""
        host = batch.host
        max_kv_len = int(host.kv_lens[first:].max())
        num_pages = -(-max_kv_len // self._pool.page_size)
        sequences = flash_attn.PagedSequences(
            q_starts=batch.q_starts[first:] - first,
            kv_lens=batch.kv_lens[first:],
            pages=batch.page_table[batch.slots[first:].long(), :num_pages],
            max_q_len=int(host.q_lens[first:].max()),
            max_kv_len=max_kv_len,
        )
        return FlashAttnRows(sequences, None if self._widened is None else self._wanted(sequences))

    def _wanted(self, sequences: flash_attn.PagedSequences) -> torch.Tensor:
        """The pages in order, so that those of several rows are neighbours; behind the rows' ends the dummy page."""
        pages = sequences.pages
        starts = torch.arange(pages.shape[1], device=pages.device) * self._pool.page_size
        inside = starts < sequences.kv_lens.unsqueeze(1)
        return pages.where(inside, self._pool.dummy_page).view(-1).sort().values

    def forward(self, q: torch.Tensor, layer: int, spec: AttnSpec, prepared: FlashAttnRows) -> torch.Tensor:
        k, v = self._pool.k(layer), self._pool.v(layer)
        if self._widened is not None and prepared.wanted is not None:
            k, v = self._widened.read(layer, prepared.wanted)
        out, lse = self._attend(q, k, v, prepared.sequences, spec, True)
        if spec.sinks is not None:  # they take their share of each token's weights
            out.mul_(torch.sigmoid(lse.t() - spec.sinks).unsqueeze(2))
        return out


def make(setup: BackendSetup) -> FlashAttnBackend:
    return FlashAttnBackend(setup.pool)
