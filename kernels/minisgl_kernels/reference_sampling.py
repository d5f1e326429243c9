"""The plain twins of the kernels between logits and tokens: see `reference.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from minisgl_kernels.adjust_logits import AdjustedRows
    from minisgl_kernels.gumbel import SamplingRows


def noise_keys(seeds: torch.Tensor, sample_indices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One 64-bit key per row for the noise of its next token.

    Args:
        seeds, sample_indices, positions: (num_rows,) int64; `positions` counts the row's output tokens.

    Returns:
        (num_rows,) int64, equal wherever (seed, sample index, position) is.

    The mixing step is the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
    """
    x = seeds + sample_indices * _GOLDEN_64
    x = _mix64(x) + positions * _GOLDEN_64
    return _mix64(x)


def gumbel_noise(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise that depends on (key, token id) alone, never on the row's place in a batch.

    Args:
        keys: (num_rows,) int64 from `noise_keys`.
        ids: (vocab,) int32 shared by all rows, or (num_rows, n) int32.

    Returns:
        float32, (num_rows, vocab) or (num_rows, n); finite, from -2.8 to 16.7.

    A key is an odd multiplier and an increment; what they make of an id is mixed by the first two steps of lowbias32
    (C. Wellons' hash prospector). Its upper 23 bits give a uniform number u in (0, 1) such that float32 holds both u
    and 1 - u exactly; with 24 bits the largest would round to 1 and its noise to infinity.
    """
    increment = keys.to(torch.int32).unsqueeze(1)
    multiplier = (keys >> 32).to(torch.int32).unsqueeze(1) | 1
    x = ids * multiplier + increment
    # The shifts are logical, so the sign bits that `>>` drags in are masked away.
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x21F0AAAD
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -749064809  # 0xD35A2D97
    u = (((x >> 9) & 0x7FFFFF).float() + 0.5) * 2.0**-23
    return u.neg_().add_(1.0).log_().neg_().log_().neg_()


def filter_logits(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort each row's logits and drop the tokens that top-k, top-p or min-p exclude.

    Args:
        logits: (num_rows, vocab) float32, already divided by the temperature.
        top_k: (num_rows,) int; 0 keeps all.
        top_p, min_p: (num_rows,) float32; 1 and 0 keep all.

    Returns:
        (values, ids): (num_rows, vocab) float32 and int64, descending; excluded values are -inf. The best token always
        stays. As in the field: top-k first, then top-p over what it left, min-p relative to the best token.
    """
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(values.shape[-1], device=values.device)
    limit = torch.where(top_k > 0, top_k, values.shape[-1]).unsqueeze(1)
    values = values.masked_fill(rank >= limit, -torch.inf)
    probs = values.softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    # A top_p of 1 must keep everything, also where rounding lifts the sum above 1.
    beyond_p = (mass_before >= top_p.unsqueeze(1)) & (top_p < 1.0).unsqueeze(1)
    below_min = probs < min_p.unsqueeze(1) * probs[:, :1]
    excluded = (beyond_p | below_min) & (rank > 0)
    return values.masked_fill(excluded, -torch.inf), ids


def adjust_logits(logits: torch.Tensor, rows: AdjustedRows, vocab_start: int = 0) -> torch.Tensor:
    """The twin of `minisgl_kernels.adjust_logits`, row by row. Reads lengths back, so no CUDA graph can hold it."""
    out = logits.to(torch.float32, copy=True)
    slots = rows.slots.tolist()
    num_rules, num_prompt = rows.num_rules.tolist(), rows.num_prompt.tolist()
    penalties = torch.stack([rows.presence, rows.frequency, rows.repetition], dim=1).tolist()
    for i, (slot, kv_len) in enumerate(zip(slots, rows.kv_lens.tolist(), strict=True)):
        text = rows.token_pool[slot, :kv_len]
        if num_rules[slot]:
            _apply_rules(out[i], rows.rules[slot, : num_rules[slot]], text[num_prompt[slot] :], vocab_start)
        if penalties[slot] != [0.0, 0.0, 1.0]:
            _apply_penalties(out[i], penalties[slot], text, num_prompt[slot], vocab_start)
    return out


def _apply_rules(logits: torch.Tensor, rules: torch.Tensor, output: torch.Tensor, vocab_start: int) -> None:
    tokens, values, ends, lengths = rules.unbind(1)
    columns = tokens.long() - vocab_start
    applies = (lengths > 0) & (lengths <= len(output) + 1) & (len(output) < ends)
    applies &= (columns >= 0) & (columns < len(logits))
    for word in (applies & (lengths > 1)).nonzero().squeeze(1).tolist():
        num_before = int(lengths[word]) - 1
        applies[word] = torch.equal(tokens[word - num_before : word], output[len(output) - num_before :])
    logits.index_add_(0, columns[applies], values.contiguous().view(torch.float32)[applies])


def _apply_penalties(
    logits: torch.Tensor, penalties: list[float], text: torch.Tensor, num_prompt: int, vocab_start: int
) -> None:
    presence, frequency, repetition = penalties

    def columns(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, counts = tokens.long().sub_(vocab_start).unique(return_counts=True)
        inside = (ids >= 0) & (ids < len(logits))
        return ids[inside], counts[inside]

    if repetition != 1.0:
        seen, _ = columns(text)
        values = logits[seen]
        logits[seen] = torch.where(values > 0.0, values / repetition, values * repetition)
    said, counts = columns(text[num_prompt:])
    logits[said] -= counts * frequency + presence


def lowest_allowed(dtype: torch.dtype) -> float:
    """The least logit of an allowed token: above minus infinity, also once it was divided by a small temperature."""
    return max(torch.finfo(dtype).min, -1e30)


def mask_logits(logits: torch.Tensor, masks: torch.Tensor, lines: torch.Tensor, vocab_start: int = 0) -> torch.Tensor:
    """The twin of `minisgl_kernels.mask_logits`."""
    out = logits.clone(memory_format=torch.contiguous_format)
    masked = (lines >= 0).nonzero().squeeze(1)
    if not len(masked):
        return out
    tokens = torch.arange(vocab_start, vocab_start + logits.shape[1], device=logits.device)
    known = tokens < 32 * masks.shape[1]
    words = masks[lines[masked].long()][:, torch.where(known, tokens // 32, 0)]
    allowed = ((words >> (tokens % 32).int()) & 1).bool() & known
    out[masked] = logits[masked].clamp_min(lowest_allowed(logits.dtype)).masked_fill(~allowed, -torch.inf)
    return out


def sample_gumbel(logits: torch.Tensor, rows: SamplingRows, vocab_start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `minisgl_kernels.sample_gumbel`."""
    best, columns = logits.max(dim=-1)  # NaN where there is one
    best = best.float()
    drawn, temperature, keys = _drawn_rows(rows)
    if len(drawn):
        ids = torch.arange(vocab_start, vocab_start + logits.shape[1], dtype=torch.int32, device=logits.device)
        scores = logits[drawn].float().div_(temperature).add_(gumbel_noise(keys, ids))
        best[drawn], columns[drawn] = scores.max(dim=-1)
    return best, (columns.int() + vocab_start).masked_fill_(~best.isfinite(), -1)


def sample_filtered(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The twin of `minisgl_kernels.sample_filtered`."""
    best, tokens = logits.max(dim=-1)  # NaN where there is one
    drawn, temperature, keys = _drawn_rows(rows)
    if len(drawn):
        slots = rows.slots[drawn].long()
        scaled = logits[drawn].float().div_(temperature)
        values, ids = filter_logits(scaled, rows.top_k[slots], rows.top_p[slots], rows.min_p[slots])
        place = values.add_(gumbel_noise(keys, ids.int())).argmax(dim=-1, keepdim=True)
        tokens[drawn] = ids.gather(1, place).squeeze(1)
    return tokens.int().masked_fill_(~best.isfinite(), -1)


def _drawn_rows(rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows that aren't greedy: (num_drawn,) int64; their temperatures, (num_drawn, 1), and noise keys."""
    drawn = rows.temperature[rows.slots.long()].nonzero().squeeze(1)
    slots = rows.slots[drawn].long()
    positions = rows.kv_lens[drawn].long() - rows.num_prompt[slots]
    keys = noise_keys(rows.seeds[slots], rows.sample_indices[slots], positions)
    return drawn, rows.temperature[slots].unsqueeze(1), keys


_GOLDEN_64 = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64


def _mix64(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
