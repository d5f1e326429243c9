"""Runs a model without an engine: each row's keys and values stand in one stretch of the pool, in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from minisgl_batch.attention.base import AttentionBackend, AttnSpec, ForwardContext
from minisgl_batch.batch import NO_EDITS, ForwardBatch, ScheduledBatch
from minisgl_batch.kvcache.mha_pool import MHAKVCache
from minisgl_batch.models.base import CausalLM


def flat_pool(model: CausalLM, num_tokens: int) -> MHAKVCache:
    """A pool in pages of one token, of the type and on the device of the model's weights."""
    weight, layers = next(model.parameters()), list(model.modules())
    heads: Any = next(layer.heads for layer in layers if hasattr(layer, "heads"))
    return MHAKVCache(
        num_layers=model.config.num_layers,
        num_pages=num_tokens,
        page_size=1,
        num_kv_heads=heads.num_kv_heads,
        head_dim=model.config.head_dim,
        dtype=weight.dtype,
        device=weight.device,
    )


class ContiguousAttention(AttentionBackend):
    """Attention as in the textbook; the row in slot s has the pool's tokens from s * row_len on."""

    def __init__(self, pool: MHAKVCache, row_len: int) -> None:
        self._pool = pool
        self._row_len = row_len

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        pass

    def forward(self, q: torch.Tensor, layer: int, spec: AttnSpec, batch: ForwardBatch) -> torch.Tensor:
        out, host = [], batch.host
        keys, values = self._pool.k(layer).flatten(0, 1), self._pool.v(layer).flatten(0, 1)
        for slot, kv_len, row_q in zip(host.slots, host.kv_lens, q.split(host.q_lens.tolist()), strict=True):
            tokens = slice(slot * self._row_len, slot * self._row_len + kv_len)
            out.append(_attend(row_q, keys[tokens], values[tokens], spec))
        return torch.cat(out)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttnSpec) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, dim=1)) * spec.scale
    distance = torch.arange(len(k) - len(q), len(k)).unsqueeze(1) - torch.arange(len(k))
    hidden = distance < 0 if spec.window is None else (distance < 0) | (distance >= spec.window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if spec.sinks is not None:
        scores = torch.cat([scores, spec.sinks.to(q.dtype).view(-1, 1, 1).expand(-1, len(q), -1)], dim=2)
    weights = scores.softmax(dim=-1)[:, :, : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, dim=1))


def sequence_logits(model: CausalLM, sequences: list[list[int]], cuts: list[int]) -> list[torch.Tensor]:
    """Logits after every token: one (len, vocab_size) tensor per sequence.

    Args:
        sequences: token ids.
        cuts: step 1 computes each sequence's first `cut` tokens, step 2 the rest (rows with nothing left drop out).
    """
    row_len = max(len(s) for s in sequences)
    pool = flat_pool(model, len(sequences) * row_len)
    attention = ContiguousAttention(pool, row_len)
    rows: list[list[torch.Tensor]] = [[] for _ in sequences]
    for starts, ends in (([0] * len(cuts), cuts), (cuts, [len(s) for s in sequences])):
        slots = [i for i, (start, end) in enumerate(zip(starts, ends, strict=True)) if end > start]
        ids = [t for i in slots for t in sequences[i][starts[i] : ends[i]]]
        positions = [p for i in slots for p in range(starts[i], ends[i])]
        q_lens, kv_lens = [ends[i] - starts[i] for i in slots], [ends[i] for i in slots]
        out_loc = [i * row_len + p for i in slots for p in range(starts[i], ends[i])]
        batch = _batch(slots, q_lens, kv_lens, ids, positions, out_loc)
        hidden = model(batch.input_ids, batch.positions, ForwardContext(batch, attention, pool))
        logits = model.gather_logits(model.logits(hidden))
        for i, piece in zip(slots, logits.split(q_lens), strict=True):
            rows[i].append(piece)
    return [torch.cat(pieces) for pieces in rows]


def _batch(
    slots: list[int], q_lens: list[int], kv_lens: list[int], ids: list[int], positions: list[int], out_loc: list[int]
) -> ForwardBatch:
    none = np.zeros(0, np.int32)
    host = ScheduledBatch(
        slots=np.array(slots, np.int32),
        q_lens=np.array(q_lens, np.int32),
        kv_lens=np.array(kv_lens, np.int32),
        num_decode=0,
        new_pages=none,
        samples=np.ones(len(slots), bool),
        any_filter=False,
        edits=NO_EDITS,
    )
    return ForwardBatch(
        host=host,
        input_ids=torch.tensor(ids, dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int32),
        out_loc=torch.tensor(out_loc, dtype=torch.int32),
        slots=torch.from_numpy(host.slots),
        kv_lens=torch.from_numpy(host.kv_lens),
        q_starts=torch.from_numpy(none),
        page_table=torch.zeros(0, 0, dtype=torch.int32),
        token_pool=torch.zeros(0, 0, dtype=torch.int32),
        sample_tokens=None,
        targets=None,
    )
