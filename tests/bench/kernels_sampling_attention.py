"""Micro-benchmarks of the sampling and the attention kernels on a GPU: one JSON line each, with the kernel's floor.

    python -m tests.bench.kernels_sampling_attention

Times are medians of CUDA graph replays over inputs that rotate through more memory than the L2 cache holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch

from minisgl_kernels import sample_filtered, sample_gumbel
from tests.kernels.paged import Case, random_case
from tests.kernels.sampling import random_rows

READ_BYTES_PER_US = 4.47e6  # measured on an H200, like the next one
FLOP_PER_US = 790e6
L2_BYTES = 60 << 20
VOCAB = 151_936

Line = dict[str, Any]


def median_us(function: Callable[[torch.Tensor], object], inputs: list[torch.Tensor], repeats: int = 30) -> float:
    """Time of one call on the GPU; the calls on all inputs are replayed one after the other from one graph."""
    for x in inputs:
        function(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x in inputs:
            function(x)
    times = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[3:])[repeats // 2] * 1e3 / len(inputs)


def num_copies(num_bytes: int) -> int:
    """How many inputs of a size to rotate, so that each has left the cache when its turn comes."""
    return max(4, min(64, 1 + 3 * L2_BYTES // num_bytes))


def line(kernel: str, us: float, floor_us: float, **shape: Any) -> Line:
    return {"kernel": kernel, **shape, "us": round(us, 2), "floor_us": round(floor_us, 2), "of_floor": us / floor_us}


def sampling_lines() -> Iterator[Line]:
    """Flat logits are what random weights give, and the hardest case; `peaked` ones are like a trained model's."""
    device = torch.device("cuda")
    for num_rows in (1, 8, 64, 256):
        num_bytes = num_rows * VOCAB * 2
        floor_us = num_bytes / READ_BYTES_PER_US
        for name, std, temperature in (("greedy", 0.64, 0.0), ("flat", 0.64, 0.6), ("peaked", 4.0, 0.6)):
            per_slot = {"temperature": torch.full((num_rows + 3,), temperature)}
            inputs = [
                (torch.randn(num_rows, VOCAB, device=device) * std).bfloat16() for _ in range(num_copies(num_bytes))
            ]
            shape = {"rows": num_rows, "logits": name}
            sample = partial(sample_gumbel.sample_gumbel, rows=random_rows(num_rows, device, **per_slot))
            yield line("sample_gumbel", median_us(sample, inputs), floor_us, **shape)
            if name == "greedy":
                yield line("torch.argmax", median_us(partial(torch.argmax, dim=1), inputs), floor_us, **shape)
                continue
            for top_k, top_p in ((0, 0.9), (20, 0.95), (64, 1.0)):
                per_slot["top_k"] = torch.full((num_rows + 3,), top_k, dtype=torch.int32)
                per_slot["top_p"] = torch.full((num_rows + 3,), top_p)
                sample = partial(sample_filtered.sample_filtered, rows=random_rows(num_rows, device, **per_slot))
                us = median_us(sample, inputs)
                yield line("sample_filtered", us, floor_us, **shape, top_k=top_k, top_p=top_p)


def attention_lines() -> Iterator[Line]:
    for num_heads, page_size in ((16, 1), (16, 16), (16, 128), (40, 16)):
        for num_rows, kv_len in ((256, 600), (256, 2000), (8, 2000), (1, 8000)):
            case = make_case(num_heads, page_size, [kv_len] * num_rows, None)
            floor_us = num_rows * kv_len * case.k_pool[0, 0].numel() * 2 * 2 / READ_BYTES_PER_US
            shape = {"rows": num_rows, "tokens": kv_len, "heads": f"{num_heads}/8", "page_size": page_size}
            yield line("paged_attention decode", median_us(case.attend, [case.q] * 4), floor_us, **shape)
        case = make_case(num_heads, page_size, [1024] * 16, [1024] * 16)
        floor_us = 4 * num_heads * 128 * 16 * 1024 * 1024 / 2 / FLOP_PER_US
        shape = {"rows": 16, "tokens": 1024, "heads": f"{num_heads}/8", "page_size": page_size}
        yield line("paged_attention extend", median_us(case.attend, [case.q] * 4), floor_us, **shape)


def make_case(num_heads: int, page_size: int, kv_lens: list[int], q_lens: list[int] | None) -> Case:
    shape = {"group": num_heads // 8, "num_kv_heads": 8, "head_dim": 128, "page_size": page_size}
    return random_case(torch.device("cuda"), kv_lens, q_lens, **shape, spare_pages=0)


def main() -> None:
    for result in chain(sampling_lines(), attention_lines()):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
