"""Plain twins of every kernel, in torch and numpy: what the kernels are tested against, and what CPUs run.

Knows tensors only: no requests, no schedules. Over 400 lines since it is read as a list, a twin after the other.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from minisgl_kernels.adjust_logits import AdjustedRows
    from minisgl_kernels.decode_inputs import PageLists
    from minisgl_kernels.gumbel import SamplingRows
    from minisgl_kernels.paged_attention import PagedRows

# ------------------------------------------------------------------ layers


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension, (..., size) -> the same shape, contiguous.

    The weight is applied after rounding to its dtype: that is the order of the models' reference code.
    """
    return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(weight.dtype).mul_(weight).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `minisgl_kernels.add_rms_norm`."""
    stream = x if residual is None else residual.add_(x)
    return rms_norm(stream, weight, eps), stream


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The twin of `minisgl_kernels.silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The twin of `minisgl_kernels.silu_and_mul.gelu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def embedding(ids: torch.Tensor, weight: torch.Tensor, vocab_range: range) -> torch.Tensor:
    """The twin of `minisgl_kernels.embedding`."""
    local_ids = ids - vocab_range.start
    elsewhere = (local_ids < 0) | (local_ids >= len(vocab_range))
    rows = F.embedding(local_ids.masked_fill_(elsewhere, 0), weight)
    return rows.masked_fill_(elsewhere.unsqueeze(1), 0.0)


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotary embedding: dimension i turns together with dimension i + head_dim / 2.

    Args:
        x: (num_tokens, num_heads, head_dim).
        rope: (num_tokens, 2, head_dim), x's dtype: the cosines of the token's head_dim / 2 angles, twice, and their
            sines, first negated and then as they are.

    Returns:
        x's shape, contiguous.
    """
    cos, sin = rope.unsqueeze(2).unbind(1)  # (num_tokens, 1, head_dim)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def norm_rope_store(
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    rope: torch.Tensor,
    out_loc: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
) -> torch.Tensor:
    """The twin of `minisgl_kernels.norm_rope_store`, which rounds the rotation's products as well.

    Queries and keys are handled as one tensor, because few calls count most at few tokens; so the queries that it
    returns aren't contiguous from token to token.
    """
    num_kv_heads, head_dim = k_pool.shape[2:]
    heads = qkv.view(len(qkv), -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    qk, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    if norms is not None:
        qk = F.rms_norm(qk.float(), (head_dim,), None, eps).to(norms[0].dtype)
        qk[:, :num_heads].mul_(norms[0])
        qk[:, num_heads:].mul_(norms[1])
        qk = qk.to(qkv.dtype)
    rotated = rotate(qk, rope)
    store_kv(rotated[:, num_heads:], v, k_pool, v_pool, out_loc)
    return rotated[:, :num_heads]


# ----------------------------------------------------------------- KV pool


def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, out_loc: torch.Tensor
) -> None:
    """Write this step's keys and values into one layer of the pool.

    Args:
        k, v: (num_tokens, num_kv_heads, head_dim).
        k_pool, v_pool: (num_pages, page_size, num_kv_heads, head_dim).
        out_loc: (num_tokens,) int32, page * page_size + offset. Padding tokens share the dummy's location.
    """
    where = out_loc.long()
    k_pool.view(-1, *k_pool.shape[2:]).index_copy_(0, where, k)
    v_pool.view(-1, *v_pool.shape[2:]).index_copy_(0, where, v)


def common_prefix_len(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    """How many leading ids two sequences have in common."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


# ------------------------------------------------------------- step inputs


def decode_inputs(
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    new_pages: torch.Tensor,
    page_table: torch.Tensor,
    token_pool: torch.Tensor,
    page_size: int,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    out_loc: torch.Tensor,
    lists: PageLists | None,
) -> None:
    """The twin of `minisgl_kernels.decode_inputs`. Reads `lists.indptr` back, so no CUDA graph can hold it."""
    lines, position = slots.long(), kv_lens.long() - 1
    column, offset = position // page_size, position % page_size
    grows = new_pages >= 0
    page_table[lines[grows], column[grows]] = new_pages[grows]
    input_ids.copy_(token_pool[lines, position])
    positions.copy_(position)
    out_loc.copy_(page_table[lines, column] * page_size + offset)
    if lists is not None:
        lists.last_page_lens.copy_(offset + 1)
        indptr, first_pages = lists.indptr.tolist(), lists.first_pages.tolist()
        for i, (line, first) in enumerate(zip(lines.tolist(), first_pages, strict=True)):
            num_pages = indptr[i + 1] - indptr[i]
            lists.indices[indptr[i] : indptr[i + 1]] = page_table[line, first : first + num_pages]


# --------------------------------------------------------------- attention


def gather_kv(pool: torch.Tensor, pages: torch.Tensor, kv_len: int) -> torch.Tensor:
    """(kv_len, num_kv_heads, head_dim): one row's keys or values, from its pages (int32 or int64) of the pool."""
    num_pages, _, num_kv_heads, head_dim = pool.shape
    # Whole pages as flat rows: one memory copy each.
    held = pool.view(num_pages, -1).index_select(0, pages)
    return held.view(-1, num_kv_heads, head_dim)[:kv_len]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None = None) -> torch.Tensor:
    """Causal attention of a sequence's last tokens over the whole sequence.

    The query heads of a KV head are rows of one matrix, so that KV is not repeated.

    Args:
        q: (q_len, num_heads, head_dim), the last q_len tokens.
        k, v: (kv_len, num_kv_heads, head_dim).
        scale: factor on q·k.
        window: a query sees this many tokens back (itself included).

    Returns:
        (q_len, num_heads, head_dim).
    """
    q_len, num_heads, head_dim = q.shape
    kv_len, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    # (num_kv_heads, group * q_len, head_dim): head h attends with KV head h // group
    queries = q.view(q_len, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
    mask = _causal_mask(q_len, kv_len, window, q.device)
    out = torch.nn.functional.scaled_dot_product_attention(
        queries.unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        attn_mask=None if mask is None else mask.repeat(group, 1),
        scale=scale,
    )
    return out.view(num_kv_heads, group, q_len, head_dim).permute(2, 0, 1, 3).reshape(q_len, num_heads, head_dim)


def decode_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """The twin of `minisgl_kernels.decode_attention`, row by row."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    page_size = k_pool.shape[1]
    for i, (slot, kv_len) in enumerate(zip(slots.tolist(), kv_lens.tolist(), strict=True)):
        pages = page_table[slot, : -(-kv_len // page_size)]
        k, v = gather_kv(k_pool, pages, kv_len), gather_kv(v_pool, pages, kv_len)
        out[i : i + 1] = attend(q[i : i + 1], k, v, scale, window)
    return out


def paged_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    rows: PagedRows,
    scale: float,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `minisgl_kernels.paged_attention`, row by row. Reads lengths back, so no CUDA graph can hold it."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    q_starts = range(len(q) + 1) if rows.q_starts is None else rows.q_starts.tolist()
    for i, (slot, kv_len) in enumerate(zip(rows.slots.tolist(), rows.kv_lens.tolist(), strict=True)):
        mine = slice(q_starts[i], q_starts[i + 1])
        pages = rows.page_table[slot, : -(-kv_len // k_pool.shape[1])]
        k, v = gather_kv(k_pool, pages, kv_len), gather_kv(v_pool, pages, kv_len)
        out[mine] = attend(q[mine], k, v, scale, window)
        lse[mine] = _log_sum_exp(q[mine], k, scale, window)
    return out, lse


def paged_decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    lists: PageLists,
    scale: float,
    prefix: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The twin of `minisgl_kernels.paged_decode`."""
    page_size = k_pool.shape[1]
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    starts = lists.indptr.tolist()
    for i, last_page_len in enumerate(lists.last_page_lens.tolist()):
        pages = lists.indices[starts[i] : starts[i + 1]]
        kv_len = (len(pages) - 1) * page_size + last_page_len
        keys, values = gather_kv(k_pool, pages, kv_len), gather_kv(v_pool, pages, kv_len)
        out[i] = attend(q[i : i + 1], keys, values, scale)[0]
        lse[i] = _log_sum_exp(q[i : i + 1], keys, scale, None)[0]
    if prefix is None:
        return out
    return merge_states(prefix[0], prefix[1].t(), out, lse, lse_a_is_log2=False, lse_b_is_log2=False)


def _log_sum_exp(q: torch.Tensor, k: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """(q_len, num_heads) float32: of the scores that `attend` takes the softmax of."""
    queries = q.float().unflatten(1, (k.shape[1], -1))  # (q_len, num_kv_heads, group, head_dim)
    scores = torch.einsum("qkgd,tkd->qkgt", queries, k.float()) * scale
    mask = _causal_mask(len(q), len(k), window, q.device)
    if mask is not None:
        scores.masked_fill_(~mask[:, None, None], -torch.inf)
    return scores.logsumexp(dim=-1).flatten(1)


def merge_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    lse_a_is_log2: bool,
    lse_b_is_log2: bool,
) -> torch.Tensor:
    """The twin of `minisgl_kernels.merge_states`."""
    parts = ((out_a, lse_a, lse_a_is_log2), (out_b, lse_b, lse_b_is_log2))
    logs = torch.stack([lse * math.log(2.0) if is_log2 else lse for _, lse, is_log2 in parts])
    logs = logs.masked_fill(logs == torch.inf, -torch.inf)
    # Both parts empty: softmax gives NaN, and the result is zeros.
    weights = logs.softmax(dim=0).nan_to_num(0.0).unsqueeze(-1)
    outs = torch.stack([out_a.float(), out_b.float()])
    return outs.masked_fill(weights == 0.0, 0.0).mul_(weights).sum(dim=0).to(out_a.dtype)


def _causal_mask(q_len: int, kv_len: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """(q_len, kv_len) bool, True where a query sees a key; None when it sees all."""
    if q_len == 1 and (window is None or kv_len <= window):
        return None
    distance = torch.arange(kv_len - q_len, kv_len, device=device).unsqueeze(1) - torch.arange(kv_len, device=device)
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


# ---------------------------------------------------------------- sampling


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


def sample_gumbel(logits: torch.Tensor, rows: SamplingRows, vocab_start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `minisgl_kernels.sample_gumbel`."""
    best, columns = logits.max(dim=-1)
    best = best.float()
    drawn, temperature, keys = _drawn_rows(rows)
    if len(drawn):
        ids = torch.arange(vocab_start, vocab_start + logits.shape[1], dtype=torch.int32, device=logits.device)
        scores = logits[drawn].float().div_(temperature).add_(gumbel_noise(keys, ids))
        best[drawn], columns[drawn] = scores.max(dim=-1)
    return best, columns.int() + vocab_start


def sample_filtered(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The twin of `minisgl_kernels.sample_filtered`."""
    tokens = logits.argmax(dim=-1)
    drawn, temperature, keys = _drawn_rows(rows)
    if len(drawn):
        slots = rows.slots[drawn].long()
        scaled = logits[drawn].float().div_(temperature)
        values, ids = filter_logits(scaled, rows.top_k[slots], rows.top_p[slots], rows.min_p[slots])
        best = values.add_(gumbel_noise(keys, ids.int())).argmax(dim=-1, keepdim=True)
        tokens[drawn] = ids.gather(1, best).squeeze(1)
    return tokens.int()


def all_reduce(parts: list[torch.Tensor]) -> torch.Tensor:
    """`one_shot.OneShotAllReduce` of what each rank gives, by rank: summed in float32 in that order, then rounded."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


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
