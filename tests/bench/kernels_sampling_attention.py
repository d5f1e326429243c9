"""Micro-benchmarks of the sampling and the attention kernels on a GPU: one JSON line each, with the kernel's floor.

    python -m tests.bench.kernels_sampling_attention

Times are medians of CUDA graph replays over inputs that rotate through more memory than the L2 cache holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch

from minisgl_kernels.adjust_logits import AdjustedRows, adjust_logits
from minisgl_kernels.sample_filtered import sample_filtered
from minisgl_kernels.sample_gumbel import sample_gumbel
from tests.bench.timing import line, median_us, num_copies
from tests.kernels.paged import Case, random_case
from tests.kernels.sampling import random_rows

Line = dict[str, Any]
FLOP_PER_US = 790e6  # measured on an H200
VOCAB = 151_936
DEVICE = torch.device("cuda")


def sampling_lines() -> Iterator[Line]:
    """Flat logits are what random weights give, and the hardest case; `peaked` ones are like a trained model's."""
    for num_rows in (1, 8, 64, 256):
        num_bytes = num_rows * VOCAB * 2
        for name, std, temperature in (("greedy", 0.64, 0.0), ("flat", 0.64, 0.6), ("peaked", 4.0, 0.6)):
            per_slot = {"temperature": torch.full((num_rows + 3,), temperature)}
            inputs = [
                (torch.randn(num_rows, VOCAB, device=DEVICE) * std).bfloat16() for _ in range(num_copies(num_bytes))
            ]
            shape = {"rows": num_rows, "logits": name}
            rows = random_rows(num_rows, DEVICE, **per_slot)
            us = median_us([partial(sample_gumbel, x, rows) for x in inputs])
            yield line("sample_gumbel", num_bytes, us, **shape)
            if name == "greedy":
                yield line("torch.argmax", num_bytes, median_us([partial(torch.argmax, x, 1) for x in inputs]), **shape)
                continue
            for top_k, top_p in ((0, 0.9), (20, 0.95), (64, 1.0)):
                per_slot["top_k"] = torch.full((num_rows + 3,), top_k, dtype=torch.int32)
                per_slot["top_p"] = torch.full((num_rows + 3,), top_p)
                rows = random_rows(num_rows, DEVICE, **per_slot)
                us = median_us([partial(sample_filtered, x, rows) for x in inputs])
                yield line("sample_filtered", num_bytes, us, **shape, top_k=top_k, top_p=top_p)


def adjustment_lines() -> Iterator[Line]:
    """All rows have all penalties and ten rules; the floor is that of reading logits and writing float32."""
    for num_rows, kv_len in ((1, 600), (64, 600), (256, 600), (256, 8000)):
        rows = random_rows(num_rows, DEVICE)
        slots = num_rows + 3
        adjusted = AdjustedRows(
            rows.slots,
            torch.full_like(rows.kv_lens, kv_len),
            torch.full_like(rows.num_prompt, kv_len // 2),
            torch.randint(0, VOCAB, (slots, kv_len + 1), dtype=torch.int32, device=DEVICE),
            *torch.full((3, slots), 1.1, device=DEVICE),
            torch.full((slots,), 10, dtype=torch.int32, device=DEVICE),
            torch.tensor([5, 0, 1 << 30, 1], dtype=torch.int32, device=DEVICE).repeat(slots, 2048, 1),
        )
        num_bytes = num_rows * VOCAB * (2 + 4)
        inputs = [torch.randn(num_rows, VOCAB, device=DEVICE).bfloat16() for _ in range(num_copies(num_bytes))]
        us = median_us([partial(adjust_logits, x, adjusted) for x in inputs])
        yield line("adjust_logits", num_bytes, us, rows=num_rows, tokens=kv_len)


def attention_lines() -> Iterator[Line]:
    for num_heads, page_size in ((16, 1), (16, 16), (16, 128), (40, 16)):
        for num_rows, kv_len in ((256, 600), (256, 2000), (8, 2000), (1, 8000)):
            case = make_case(num_heads, page_size, [kv_len] * num_rows, None)
            num_bytes = num_rows * kv_len * case.k_pool[0, 0].numel() * 2 * 2
            shape = {"rows": num_rows, "tokens": kv_len, "heads": f"{num_heads}/8", "page_size": page_size}
            yield line("paged_attention decode", num_bytes, median_us([partial(case.attend, case.q)]), **shape)
        case = make_case(num_heads, page_size, [1024] * 16, [1024] * 16)
        us = median_us([partial(case.attend, case.q)])
        num_flops = 4 * num_heads * 128 * 16 * 1024 * 1024 / 2
        shape = {"rows": 16, "tokens": 1024, "heads": f"{num_heads}/8", "page_size": page_size}
        floor_us = num_flops / FLOP_PER_US
        yield {
            "kernel": "paged_attention extend",
            **shape,
            "us": round(us, 2),
            "floor_us": round(floor_us, 2),
            "of_floor": round(us / floor_us, 2),
        }


def make_case(num_heads: int, page_size: int, kv_lens: list[int], q_lens: list[int] | None) -> Case:
    return random_case(
        DEVICE,
        kv_lens,
        q_lens,
        group=num_heads // 8,
        num_kv_heads=8,
        head_dim=128,
        page_size=page_size,
        spare_pages=0,
    )


def main() -> None:
    for result in chain(sampling_lines(), adjustment_lines(), attention_lines()):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
