"""Runs a model without an engine: an attention backend that keeps each row's keys and values in plain tensors."""

from __future__ import annotations

import numpy as np
import torch

from minisgl_batch.attention.base import AttentionBackend, AttnSpec, ForwardContext
from minisgl_batch.batch import ForwardBatch, ScheduledBatch, TableEdits
from minisgl_batch.models.base import CausalLM


class ContiguousAttention(AttentionBackend):
    """Attention as in the textbook, one query token and one head at a time; keys and values by (layer, slot)."""

    def __init__(self) -> None:
        self._kv: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        pass

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, spec: AttnSpec, batch: ForwardBatch
    ) -> torch.Tensor:
        out, host = [], batch.host
        pieces = [x.split(host.q_lens.tolist()) for x in (q, k, v)]
        for slot, kv_len, row_q, row_k, row_v in zip(host.slots, host.kv_lens, *pieces, strict=True):
            old_k, old_v = self._kv.get((layer, slot), (row_k[:0], row_v[:0]))
            row_k, row_v = torch.cat((old_k, row_k)), torch.cat((old_v, row_v))
            assert len(row_k) == kv_len
            self._kv[layer, slot] = row_k, row_v
            out.append(_attend(row_q, row_k, row_v, spec))
        return torch.cat(out)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttnSpec) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, dim=1)) * spec.scale
    distance = torch.arange(len(k) - len(q), len(k)).unsqueeze(1) - torch.arange(len(k))
    hidden = distance < 0 if spec.window is None else (distance < 0) | (distance >= spec.window)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, dim=1))


def sequence_logits(model: CausalLM, sequences: list[list[int]], cuts: list[int]) -> list[torch.Tensor]:
    """Logits after every token: one (len, vocab_size) tensor per sequence.

    Args:
        sequences: token ids.
        cuts: step 1 computes each sequence's first `cut` tokens, step 2 the rest (rows with nothing left drop out).
    """
    attention = ContiguousAttention()
    rows: list[list[torch.Tensor]] = [[] for _ in sequences]
    for starts, ends in (([0] * len(cuts), cuts), (cuts, [len(s) for s in sequences])):
        slots = [i for i, (start, end) in enumerate(zip(starts, ends, strict=True)) if end > start]
        ids = [t for i in slots for t in sequences[i][starts[i] : ends[i]]]
        positions = [p for i in slots for p in range(starts[i], ends[i])]
        q_lens, kv_lens = [ends[i] - starts[i] for i in slots], [ends[i] for i in slots]
        batch = _batch(slots, q_lens, kv_lens, ids, positions)
        hidden = model(batch.input_ids, batch.positions, ForwardContext(batch, attention))
        logits = model.gather_logits(model.logits(hidden))
        for i, piece in zip(slots, logits.split(q_lens), strict=True):
            rows[i].append(piece)
    return [torch.cat(pieces) for pieces in rows]


def _batch(
    slots: list[int], q_lens: list[int], kv_lens: list[int], ids: list[int], positions: list[int]
) -> ForwardBatch:
    none = np.zeros(0, np.int32)
    host = ScheduledBatch(
        slots=np.array(slots, np.int32),
        q_lens=np.array(q_lens, np.int32),
        kv_lens=np.array(kv_lens, np.int32),
        num_decode=0,
        new_pages=none,
        samples=np.ones(len(slots), bool),
        all_greedy=True,
        any_filter=False,
        edits=TableEdits(none.astype(np.int64), none, none.astype(np.int64), none, []),
    )
    int_positions = torch.tensor(positions, dtype=torch.int32)
    return ForwardBatch(
        host=host,
        input_ids=torch.tensor(ids, dtype=torch.int32),
        positions=int_positions,
        out_loc=int_positions,  # the pool's business, which this backend hasn't
        slots=torch.from_numpy(host.slots),
        page_table=torch.zeros(0, 0, dtype=torch.int32),
        sample_tokens=torch.zeros(0, dtype=torch.int64),
    )
