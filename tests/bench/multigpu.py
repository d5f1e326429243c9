"""How long GPUs take to sum a decode step's hidden states: our kernel, NCCL in windows and without, torch's NCCL.

"norm" is our kernel with the residual addition and the norm that follow, "in_place" for what is in its buffers already.

    python -m tests.bench.multigpu --tp 2 --json results.jsonl

Each time is that of one sum in a CUDA graph of many, the median over replays, on the slowest rank. A line of JSON for
each number of rows; a hang ends in a stack dump after a minute. With `--device cpu`, what gloo takes, to try this out.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from minisgl_batch.distributed.group import TPGroup
from minisgl_batch.distributed.pynccl_comm import PyNcclCommunicator
from minisgl_kernels.one_shot import OneShotAllReduce
from tests.bench.records import about
from tests.bench.timing import median_us
from tests.minisgl_batch.distributed.rank_pool import RankPool

NUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 4096, 8192)
BLOCKS = (16, 32, 64, 128)
REPEATS_ON_CPU = 9


def times_us(tp: TPGroup, hidden_size: int, num_rows: int) -> dict[str, float]:
    """Microseconds of one sum by each means; of our kernel, with several limits on its blocks."""
    comm = tp.comm
    assert isinstance(comm, PyNcclCommunicator)
    shape, num_bytes = (num_rows, hidden_size), num_rows * hidden_size * 2
    x = torch.zeros(shape, dtype=torch.bfloat16, device=torch.device("cuda", torch.cuda.current_device()))
    calls: dict[str, Callable[[], object]] = {"nccl": lambda: comm.nccl.all_reduce(x, x)}
    stream, weight = torch.zeros_like(x), torch.ones_like(x[0])
    kernels = []
    for blocks in BLOCKS:
        kernels.append(OneShotAllReduce(tp.rank, tp.size, num_bytes, x.device, blocks))
        kernels[-1].connect(comm._exchange(kernels[-1].handle))
        calls[f"one_shot_{blocks}"] = partial(kernels[-1].all_reduce, x)
        if kernels[-1].takes_rows(x):
            calls[f"norm_{blocks}"] = partial(kernels[-1].add_rms_norm, x, stream, weight, 1e-6)
            calls[f"norm_in_place_{blocks}"] = partial(add_in_place, kernels[-1], x, stream, weight)
    if comm._window is not None:
        inside = comm._window[:num_bytes].view(torch.bfloat16).view(shape)
        inside.zero_()
        calls["nccl_window"] = lambda: comm.nccl.all_reduce(inside, inside)
    found = measure(tp, calls)
    tp.gather_numbers(0)
    for kernel in kernels:
        kernel.close()
    return found


def add_in_place(kernel: OneShotAllReduce, x: torch.Tensor, stream: torch.Tensor, weight: torch.Tensor) -> None:
    """As a model does it, whose product is in the buffer."""
    kernel.add_rms_norm(kernel.buffer(x.shape, x.dtype), stream, weight, 1e-6)


def torch_us(tp: TPGroup, hidden_size: int, num_rows: int) -> dict[str, float]:
    shape = (num_rows, hidden_size)
    x = torch.zeros(shape, dtype=torch.bfloat16, device=torch.device("cuda", torch.cuda.current_device()))
    return measure(tp, {"torch": lambda: tp.all_reduce(x)})


def gloo_us(tp: TPGroup, hidden_size: int, num_rows: int) -> dict[str, float]:
    x = torch.zeros((num_rows, hidden_size))
    times = []
    for _ in range(REPEATS_ON_CPU):
        started = time.perf_counter()
        tp.all_reduce(x)
        times.append((time.perf_counter() - started) * 1e6)
    return {"gloo": sorted(times)[REPEATS_ON_CPU // 2]}


def measure(tp: TPGroup, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    found = {}
    with torch.cuda.stream(torch.cuda.Stream()):
        for name, call in calls.items():
            tp.gather_numbers(0)  # begin together
            found[name] = median_us([call])
    return found


def prepare(tp: TPGroup, num_bytes: int) -> str:
    assert tp.comm is not None
    tp.comm.prepare(num_bytes)
    return tp.comm.describe()


def slowest(answers: list[dict[str, float]]) -> dict[str, float]:
    return {f"{name}_us": round(max(answer[name] for answer in answers), 2) for name in answers[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=5120)
    parser.add_argument("--rows", type=int, nargs="+", default=NUM_ROWS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--json", type=Path, help="append the lines to this file")
    parser.add_argument("--timeout-s", type=float, help="say where it hangs and end after this time")
    given = parser.parse_args()
    if given.timeout_s is not None:
        faulthandler.dump_traceback_later(given.timeout_s, exit=True)
    # Multicast is another matter, and not for every machine.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    lines: dict[int, dict[str, Any]] = {num_rows: {} for num_rows in given.rows}
    gpu_means = ((True, times_us), (False, torch_us))
    for use_pynccl, function in gpu_means if given.device == "cuda" else ((False, gloo_us),):
        pool = RankPool(given.tp, given.device, use_pynccl=use_pynccl)
        (means, *_) = pool.run(prepare, max(given.rows) * given.hidden_size * 2)
        print(means, flush=True)
        for num_rows, line in lines.items():
            line |= slowest(pool.run(function, given.hidden_size, num_rows))
        pool.close()
    context = about("tests.bench.multigpu")
    for num_rows, line in lines.items():
        found = {"rows": num_rows, "hidden_size": given.hidden_size, "tp": given.tp, **line, **context}
        print(json.dumps(found), flush=True)
        if given.json is not None:
            with given.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
