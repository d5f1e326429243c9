"""From logits to tokens: greedy rows are an exact argmax, others a Gumbel-max over what their filters leave.

Gumbel-max (argmax of logits plus noise) samples from the softmax without computing it. The noise of a token depends on
(seed, sample index, output position, token id) alone, so a row's sample doesn't depend on its neighbours or its slot.
"""

from __future__ import annotations

import torch

from minisgl_batch.engine.tables import SamplingRows
from minisgl_kernels.reference import filter_logits, gumbel_noise, noise_keys


def sample(logits: torch.Tensor, rows: SamplingRows | None, *, any_filter: bool) -> torch.Tensor:
    """Pick one token per row.

    Args:
        logits: (num_samples, vocab), any float dtype.
        rows: the rows' sampling values; None when every row is greedy.
        any_filter: whether some row uses top-k, top-p or min-p.

    Returns:
        (num_samples,) int32.
    """
    greedy = logits.argmax(dim=-1)
    if rows is None:
        return greedy.int()
    is_greedy = rows.temperature == 0.0
    scaled = logits.float() / torch.where(is_greedy, 1.0, rows.temperature).unsqueeze(1)
    keys = noise_keys(rows.seeds, rows.sample_indices, rows.positions)
    if any_filter:
        values, ids = filter_logits(scaled, rows.top_k, rows.top_p, rows.min_p)
        best = (values + gumbel_noise(keys, ids.int())).argmax(dim=-1, keepdim=True)
        drawn = ids.gather(1, best).squeeze(1)
    else:
        ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
        drawn = (scaled + gumbel_noise(keys, ids)).argmax(dim=-1)
    return torch.where(is_greedy, greedy, drawn).int()
