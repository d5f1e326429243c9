"""Matrix products of decode steps on a GPU: torch's own algorithm and the chosen one, one JSON line each.

    python -m tests.bench.matmul [--fp8]

`us_torch` is torch's own and `us` what a decode step runs, with weights that rotate through more memory than the L2
cache holds; `floor_us` is what the bytes take at the speed of a copy. Algorithms are chosen anew, whatever the user's
cache says; `tuning_s` is how long that took for all the rows of a shape.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from minisgl_kernels.matmul import Operand, matmul, tune
from minisgl_kernels.quantize_fp8 import quantize
from tests.bench.timing import line, median_us, num_copies

ROWS = [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256]
VOCAB_SIZE = 151_936
# (out_features, in_features) by model; "14B/2" is a rank's share of two.
SHAPES = {
    "0.6B": {
        "qkv": (4096, 1024),
        "o": (1024, 2048),
        "gate_up": (6144, 1024),
        "down": (1024, 3072),
        "lm_head": (VOCAB_SIZE, 1024),
    },
    "14B": {
        "qkv": (7168, 5120),
        "o": (5120, 5120),
        "gate_up": (34816, 5120),
        "down": (5120, 17408),
        "lm_head": (VOCAB_SIZE, 5120),
    },
    "14B/2": {
        "qkv": (3584, 5120),
        "o": (5120, 2560),
        "gate_up": (17408, 5120),
        "down": (5120, 8704),
        "lm_head": (VOCAB_SIZE // 2, 5120),
    },
}


def lines(model: str, layer: str, *, fp8: bool) -> Iterator[dict[str, Any]]:
    out_features, in_features = SHAPES[model][layer]

    def operand(num_rows: int) -> Operand:
        numbers = torch.randn(num_rows, in_features, device="cuda", dtype=torch.bfloat16)
        return quantize(numbers, grouped=False) if fp8 else numbers

    itemsize = 1 if fp8 else 2
    weights = [operand(out_features) for _ in range(num_copies(itemsize * out_features * in_features))]
    torch.cuda.synchronize()
    started = time.perf_counter()
    with torch.cuda.stream(torch.cuda.Stream()):
        algorithms = tune(weights, ROWS, torch.device("cuda", torch.cuda.current_device()))
    tuning_s = round(time.perf_counter() - started, 2)
    for num_rows in ROWS:
        x = operand(num_rows)
        out = torch.empty(num_rows, out_features, device="cuda", dtype=torch.bfloat16)
        calls = [partial(matmul, x, weight, out) for weight in weights]
        us_torch = median_us(calls)
        with algorithms.active():
            us = median_us(calls)
        num_bytes = itemsize * (out_features + num_rows) * in_features + 2 * num_rows * out_features
        more = {"us_torch": round(us_torch, 2), "gain": round(us_torch / us, 3), "tuning_s": tuning_s}
        shape = {"out": out_features, "in": in_features}
        kind = "fp8" if fp8 else "bfloat16"
        yield line("matmul", num_bytes, us, dtype=kind, model=model, layer=layer, rows=num_rows, **shape, **more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fp8", action="store_true", help="with weights in FP8, but for the LM head")
    fp8 = parser.parse_args().fp8
    logging.basicConfig(level=logging.INFO)
    for model, layers in SHAPES.items():
        for layer in layers:
            with (
                tempfile.TemporaryDirectory() as folder,
                patch("minisgl_kernels.cpp.cache_dir", return_value=Path(folder)),
            ):
                for result in lines(model, layer, fp8=fp8 and layer != "lm_head"):
                    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
