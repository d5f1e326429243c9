"""Times kernels on a GPU by replaying CUDA graphs. Used by the micro-benchmarks beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

COPY_BYTES_PER_US = 4.3e6  # bytes read plus bytes written, measured on an H200
READ_BYTES_PER_US = 4.47e6
L2_BYTES = 60 << 20
CALLS_PER_GRAPH = 64


def median_us(calls: Sequence[Callable[[], object]], repeats: int = 15) -> float:
    """GPU time of one call, from replays of a graph that holds all of them in turn."""
    calls = [calls[i % len(calls)] for i in range(max(CALLS_PER_GRAPH, len(calls)))]
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[3:])[repeats // 2] * 1e3 / len(calls)


def num_copies(num_bytes: int) -> int:
    """How many inputs to rotate, so that each has left the L2 cache when its turn comes again."""
    return max(2, min(64, 1 + 3 * L2_BYTES // num_bytes))


def line(kernel: str, num_bytes: int, us: float, **more: Any) -> dict[str, Any]:
    """One result, beside the time that the least memory traffic takes."""
    floor_us = num_bytes / COPY_BYTES_PER_US
    return {
        "kernel": kernel,
        **more,
        "us": round(us, 2),
        "floor_us": round(floor_us, 2),
        "of_floor": round(us / floor_us, 2),
        "gpu": torch.cuda.get_device_name(),
    }
