"""Whether the GPU ever waits for the host between decode steps: how early each step is launched, and how long it idles.

    python -m tests.bench.overlap --model qwen3-0.6b --rows 256

From a profiler's trace. Prints a line of JSON; a negative lead means that a step was launched after the one before had
ended, so that the GPU waited.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from minisgl_batch.bench import SHAPES, Bench
from minisgl_batch.config import EngineConfig
from tests.bench.decode_step import start

_KERNELS_OF_A_MODEL = 100  # at least; the graph that samples has fewer


@dataclass
class Launch:
    """One graph: when the host launched it, and when its kernels ran, in nanoseconds."""

    at: int
    kernels: list[tuple[int, int]]  # (start, end)

    @property
    def start(self) -> int:
        return min(start for start, _ in self.kernels)

    @property
    def end(self) -> int:
        return max(end for _, end in self.kernels)


def trace(bench: Bench, num_steps: int) -> list[Launch]:
    """The graphs of some steps, in their order."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(num_steps):
            bench.tick()
        torch.cuda.synchronize()
    launched, kernels = {}, defaultdict(list)
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    for event in results.events():
        if event.name() == "cudaGraphLaunch":
            launched[event.correlation_id()] = event.start_ns()
        elif event.device_type() == torch.autograd.DeviceType.CUDA:
            kernels[event.correlation_id()].append((event.start_ns(), event.start_ns() + event.duration_ns()))
    return sorted(
        (Launch(at, kernels[number]) for number, at in launched.items() if kernels[number]), key=lambda x: x.at
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b", choices=list(SHAPES))
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    bench = Bench(EngineConfig(model=given.model, dummy_weights=True, max_running=256))
    start(bench, given.rows, given.context, 1 << 20)
    graphs = trace(bench, given.steps)
    leads, idle = [], []
    for before, graph in pairwise(graphs):
        if len(graph.kernels) >= _KERNELS_OF_A_MODEL:
            leads.append((before.end - graph.at) / 1000)
            idle.append((graph.start - before.end) / 1000)
    line = {"model": given.model, "rows": given.rows, "steps": len(leads), "gpu": torch.cuda.get_device_name()}
    line |= {"lead_us": round(median(leads)), "least_lead_us": round(min(leads))}
    line |= {"idle_us": round(median(idle), 1), "most_idle_us": round(max(idle), 1)}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
