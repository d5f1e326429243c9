"""Where a decode step's time goes on a GPU, by kernel, and how long a step takes at some batch sizes.

    python -m tests.bench.decode_step --model qwen3-0.6b --context 600
    python -m tests.bench.decode_step --no-table --sampling '{"repetition_penalty": 1.1, "num_logprobs": 5}'

Prints a table of kernels at the largest batch, and a JSON line with the step's time against its floor for each batch.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import time
from collections import defaultdict
from typing import Any, get_args

import numpy as np
import torch

from minisgl_batch.bench import SHAPES, Bench
from minisgl_batch.config import EngineConfig, Quantization
from minisgl_batch.engine_sampling import EngineSampling
from minisgl_batch.messages import AbortRequests, AddRequests, NewPrompt, NewRequest

READ_BYTES_PER_S = 4.3e12
BATCHES = (1, 8, 64, 256)


def start(bench: Bench, num_rows: int, context: int, first_uid: int, sampling: dict[str, Any]) -> list[int]:
    """Rows that decode from about `context` tokens on; `sampling` are values of EngineSampling."""
    uids = list(range(first_uid, first_uid + num_rows))
    requests = [
        NewPrompt(
            np.random.randint(0, 10_000, context, dtype=np.int32).tobytes(),
            EngineSampling(**({"max_tokens": 1000, "temperature": 0.6, "seed": uid} | sampling)),
            [NewRequest(uid)],
        )
        for uid in uids
    ]
    bench.engine.source.inbox.append(AddRequests(requests))
    while bench.stats().num_running < num_rows or bench.stats().num_waiting:
        bench.tick()
    for _ in range(20):
        bench.tick()
    return uids


def step_ms(bench: Bench, num_steps: int) -> float:
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else torch.cpu.synchronize
    synchronize()
    started = time.perf_counter()
    for _ in range(num_steps):
        bench.tick()
    synchronize()
    return (time.perf_counter() - started) / num_steps * 1000


def floor_ms(model: str, num_rows: int, context: float, quantization: Quantization | None) -> float:
    """Weights and KV read once at the memory's speed; of experts, as many as evenly routed rows need."""
    shape = SHAPES[model]
    layers, hidden, head_dim = shape["num_hidden_layers"], shape["hidden_size"], shape["head_dim"]
    kv = 2 * shape["num_key_value_heads"] * head_dim
    q = shape["num_attention_heads"] * head_dim
    width = shape["intermediate_size"]
    if "num_experts" in shape:
        touched = 1 - (1 - shape["num_experts_per_tok"] / shape["num_experts"]) ** num_rows
        width = touched * shape["num_experts"] * shape["moe_intermediate_size"]
    weights = layers * hidden * (2 * q + kv + 3 * width) * (2 if quantization is None else 1)
    others = hidden * shape["vocab_size"] + num_rows * context * layers * kv
    return (weights + 2 * others) / READ_BYTES_PER_S * 1000


def kernel_table(bench: Bench, num_steps: int = 8) -> None:
    """Print this rank's kernels, and last the share of those that talk to other ranks (their waiting included)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            bench.tick()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name].append(event.device_time)
    total = sum(map(sum, times.values()))
    print(
        f"{'us a step':>10} {'launches':>9} {'share':>6}  kernel   ({num_steps} steps, {total / num_steps:.0f} us busy)"
    )
    for name, spent in sorted(times.items(), key=lambda item: -sum(item[1]))[:22]:
        per_step, share = sum(spent) / num_steps, sum(spent) / total
        print(f"{per_step:10.1f} {len(spent) / num_steps:9.1f} {share:6.1%}  {name[:110]}")
    talking = sum(sum(spent) for name, spent in times.items() if "one_shot" in name or "nccl" in name.lower())
    print(json.dumps({"busy_us": round(total / num_steps), "communication_share": round(talking / total, 4)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b", choices=list(SHAPES))
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--quantization", choices=get_args(Quantization))
    parser.add_argument("--no-table", action="store_true")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--no-pynccl", action="store_true")
    parser.add_argument("--sampling", type=json.loads, default={}, help="more values of EngineSampling, as JSON")
    parser.add_argument("--timeout-s", type=float, default=300)
    given = parser.parse_args()
    faulthandler.dump_traceback_later(given.timeout_s, exit=True)
    pynccl = not given.no_pynccl
    config = EngineConfig(
        model=given.model,
        quantization=given.quantization,
        dummy_weights=True,
        max_running=256,
        tp=given.tp,
        pynccl=pynccl,
    )
    with Bench(config) as bench:
        uid = 1 << 20
        for num_rows in BATCHES:
            uids = start(bench, num_rows, given.context, uid, given.sampling)
            uid += num_rows
            took = step_ms(bench, 50)
            floor = floor_ms(given.model, num_rows, given.context + 45, given.quantization) / given.tp
            line = {
                "model": given.model,
                "tp": given.tp,
                "quantization": given.quantization or "none",
                "batch": num_rows,
                "context": given.context + 45,
                "step_ms": round(took, 3),
                **given.sampling,
            }
            print(json.dumps(line | {"floor_ms": round(floor, 3), "of_floor": round(took / floor, 2)}), flush=True)
            if num_rows == BATCHES[-1] and not given.no_table:
                kernel_table(bench)
            bench.engine.source.inbox.append(AbortRequests(uids))
            while bench.stats().num_running:
                bench.tick()


if __name__ == "__main__":
    main()
