"""Log-probabilities of tokens, and of the most probable ones in their place.

They are the model's own: before penalties, temperature and filters. Computed in slices of tokens, so that a long prompt
takes no more memory than a short one. Called by the engine at the end of a step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from minisgl_batch.models.base import CausalLM

_SLICE_VALUES = 1 << 25  # float32 logits at a time: 128 MiB, and as much again for what is made of them


def score_logits(model: CausalLM, logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> torch.Tensor:
    """Scores of tokens by the logits that stand for their places; called by all ranks together.

    Args:
        logits: (num_tokens, shard): what `model.logits` gave.
        targets: (num_tokens,) int32 token ids; -1 where the logits gave none.
        num_top: how many of the most probable tokens to name; at most the vocabulary's size.

    Returns:
        (num_tokens, 2 + 2 * num_top) int32: bits of the target's float32 log-probability, its rank from 1, the ids of
        the most probable tokens in descending order, and the bits of their log-probabilities.
    """
    return _in_slices(model, lambda part: logits[part], targets, num_top)


def score_hidden(model: CausalLM, hidden: torch.Tensor, targets: torch.Tensor, num_top: int) -> torch.Tensor:
    """The same from hidden states, (num_tokens, hidden_size)."""
    return _in_slices(model, lambda part: model.logits(hidden[part]), targets, num_top)


def _in_slices(
    model: CausalLM, logits_of: Callable[[slice], torch.Tensor], targets: torch.Tensor, num_top: int
) -> torch.Tensor:
    size = max(1, _SLICE_VALUES // model.config.vocab_size)
    slices = [slice(start, start + size) for start in range(0, len(targets), size)]
    scores = [_score(model.gather_logits(logits_of(part)), targets[part], num_top) for part in slices]
    return torch.cat(scores) if scores else targets.new_empty((0, 2 + 2 * num_top))


def _score(logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> torch.Tensor:
    index = targets.long().clamp_min_(0).unsqueeze(1)
    rank = (logits > logits.gather(1, index)).sum(dim=-1, keepdim=True, dtype=torch.int32) + 1
    ids = logits.topk(num_top, dim=-1).indices
    # Not by logsumexp, whose bits depend on how many rows there are.
    logprobs = logits.float().log_softmax(dim=-1)
    target, best = (logprobs.gather(1, tokens).view(torch.int32) for tokens in (index, ids))
    return torch.cat([target, rank, ids.int(), best], dim=1)
