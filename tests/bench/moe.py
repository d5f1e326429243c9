"""A mixture of experts on a GPU, in the shape of Qwen3-30B-A3B: a JSON line per number of tokens.

    python -m tests.bench.moe [--tokens 256 4096] [--sweep]

`us` is the time of routing and experts, from the router's logits on, evenly routed at random; `floor_us` the larger of
what it takes to read the touched experts' weights and to multiply; `of_floor` the floor's share of the time, 1 at best.
`parts_us` is where the time goes, launch by launch; `products` says in what the matrix products are written, and for
Triton how they are cut. `--sweep` tries tiles of Triton besides, a line each.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from minisgl_kernels import reference_moe
from minisgl_kernels.fused_moe import fused_moe, runs_clusters
from minisgl_kernels.moe_tiles import Cut, Tile, tile_for
from tests.bench.timing import median_us

NUM_TOKENS = (1, 8, 64, 256, 1024, 4096)
HIDDEN_SIZE, NUM_EXPERTS, TOP_K, WIDTH = 2048, 128, 8, 768
READ_BYTES_PER_US = 4.2e6
FLOPS_PER_US = 670e6
NUM_INPUTS = 16  # in turn, so that few tokens find other experts each time
DTYPE = torch.bfloat16

SMALL = [
    Tile(rows, 1, cut, cut)
    for rows in (16, 32)
    for cut in (Cut(32, 256, 1, 4, 3), Cut(64, 128, 1, 4, 3), Cut(64, 128, 1, 4, 5), Cut(128, 64, 1, 4, 5))
]
LARGE = [
    Tile(64, units, cut, cut)
    for units, cut in (
        (3, Cut(256, 64, 4, 8, 4)),
        (3, Cut(256, 64, 16, 8, 4)),
        (3, Cut(256, 64, 8, 8, 3)),
        (2, Cut(256, 64, 8, 8, 4)),
        (3, Cut(128, 64, 8, 4, 2)),
        (3, Cut(128, 128, 8, 8, 2)),
        (1, Cut(256, 64, 8, 4, 4)),
    )
]


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = torch.empty(NUM_EXPERTS, 2 * WIDTH, HIDDEN_SIZE, device="cuda", dtype=DTYPE).normal_(0, 0.02)
    down = torch.empty(NUM_EXPERTS, HIDDEN_SIZE, WIDTH, device="cuda", dtype=DTYPE).normal_(0, 0.02)
    return gate_up, down


def products(num_tokens: int, x: torch.Tensor, tile: Tile | None) -> dict[str, Any]:
    if tile is None and runs_clusters(x, num_tokens * TOP_K, NUM_EXPERTS, WIDTH):
        return {"language": "CUDA C++"}
    tile = tile or tile_for(num_tokens * TOP_K, NUM_EXPERTS, DTYPE)
    cuts = {"first": tile.first._asdict(), "second": tile.second._asdict()}
    return {"language": "Triton", "unit": tile.unit, "units": tile.units, **cuts}


def floor_us(inputs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    touched = sum(len(reference_moe.route(logits, TOP_K, renormalize=True)[0].unique()) for _, logits in inputs)
    expert = 3 * WIDTH * HIDDEN_SIZE  # weights, and multiplications per token
    read = touched / len(inputs) * expert * DTYPE.itemsize / READ_BYTES_PER_US
    return max(read, 2 * len(inputs[0][0]) * TOP_K * expert / FLOPS_PER_US)


def parts_us(call: partial[torch.Tensor], repeats: int = 10) -> dict[str, float]:
    """Mean time of each launch of a call, by kernel and number."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    times = defaultdict(list)
    for event in sorted(profiler.events(), key=lambda e: e.time_range.start):
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name].append(event.device_time)
    parts = {}
    for name, spent in times.items():
        short, launches = name.split("(")[0][:60], max(1, len(spent) // repeats)
        for i in range(launches):
            mine = spent[i::launches]
            parts[f"{short} {i}" if launches > 1 else short] = round(sum(mine) / len(mine), 1)
    return parts


def lines(all_num_tokens: list[int], *, sweep: bool) -> Iterator[dict[str, Any]]:
    gate_up, down = weights()
    for n in all_num_tokens:
        inputs = [
            (torch.randn(n, HIDDEN_SIZE, device="cuda").to(DTYPE), torch.randn(n, NUM_EXPERTS, device="cuda").to(DTYPE))
            for _ in range(NUM_INPUTS)
        ]
        floor = floor_us(inputs)
        others = (SMALL if n <= 256 else []) + (LARGE if n >= 256 else [])
        for tile in [None, *(others if sweep else [])]:
            run = partial(fused_moe, gate_up=gate_up, down=down, top_k=TOP_K, renormalize=True, tile=tile)
            calls = [partial(run, x, logits) for x, logits in inputs]
            us = median_us(calls)
            yield {
                "kernel": "fused_moe",
                "tokens": n,
                "usual": tile is None,
                "products": products(n, inputs[0][0], tile),
                "us": round(us, 1),
                "floor_us": round(floor, 1),
                "of_floor": round(floor / us, 3),
                "parts_us": parts_us(calls[0]),
                "gpu": torch.cuda.get_device_name(),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=NUM_TOKENS)
    parser.add_argument("--sweep", action="store_true")
    given = parser.parse_args()
    for line in lines(given.tokens, sweep=given.sweep):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
