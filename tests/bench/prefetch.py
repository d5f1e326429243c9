"""What it gains to bring the beginning of the next weight into the L2 cache during norms and activations.

    python -m tests.bench.prefetch --budgets-mib 0 4 8 16 24

Times a layer's second half, [add_rms_norm, gate_up product, silu_and_mul, down product], in a CUDA graph of many layers
that have weights of their own, more than the L2 cache holds. A JSON line for each model's shapes, number of rows and
budget, beside the time that reading the weights takes (`floor_us`) and, at the end of each, `saved_us` against no
prefetching, which a budget of 0 stands for and which is measured first in any case.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from minisgl_kernels.add_rms_norm import add_rms_norm
from minisgl_kernels.silu_and_mul import silu_and_mul
from tests.bench.timing import READ_BYTES_PER_US, median_us, num_copies

MODELS = {"14B": (5120, 17408), "14B/2": (5120, 8704), "0.6B": (1024, 3072)}  # hidden and intermediate size
NUM_ROWS = (1, 8, 64, 128, 256)


class Layers:
    """Weights of as many layers as push each other out of the cache, and what calls them."""

    def __init__(self, hidden_size: int, width: int) -> None:
        self.num_bytes = 2 * 3 * hidden_size * width
        self._norm_weight = torch.ones(hidden_size, device="cuda", dtype=torch.bfloat16)
        self._weights = [
            (_weight(2 * width, hidden_size), _weight(hidden_size, width)) for _ in range(num_copies(self.num_bytes))
        ]

    def calls(self, num_rows: int) -> list[Callable[[], torch.Tensor]]:
        """One for each layer; all read the same hidden states."""
        x = torch.randn(num_rows, len(self._norm_weight), device="cuda").bfloat16()
        stream = torch.randn_like(x)
        return [partial(self._run, x, stream, *weights) for weights in self._weights]

    def _run(
        self, x: torch.Tensor, stream: torch.Tensor, gate_up_weight: torch.Tensor, down_weight: torch.Tensor
    ) -> torch.Tensor:
        normed, _ = add_rms_norm(x, stream, self._norm_weight, 1e-6, upcoming=gate_up_weight)
        gated = silu_and_mul(torch.mm(normed, gate_up_weight.t()), upcoming=down_weight)
        return torch.mm(gated, down_weight.t())


def _weight(num_rows: int, size: int) -> torch.Tensor:
    return (torch.randn(num_rows, size, device="cuda") * size**-0.5).bfloat16()


def us_with(budget_mib: float, calls: list[Callable[[], torch.Tensor]]) -> float:
    with patch("minisgl_kernels.upcoming.BUDGET_BYTES", int(budget_mib * (1 << 20))):
        return median_us(calls)


def lines(budgets_mib: list[float]) -> Iterator[dict[str, Any]]:
    for model, (hidden_size, width) in MODELS.items():
        layers = Layers(hidden_size, width)
        for num_rows in NUM_ROWS:
            calls = layers.calls(num_rows)
            without_us = us_with(0, calls)
            for budget_mib in budgets_mib:
                us = us_with(budget_mib, calls) if budget_mib else without_us
                yield {
                    "model": model,
                    "rows": num_rows,
                    "budget_mib": budget_mib,
                    "us": round(us, 2),
                    "floor_us": round(layers.num_bytes / READ_BYTES_PER_US, 2),
                    "saved_us": round(without_us - us, 2),
                    "gpu": torch.cuda.get_device_name(),
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets-mib", type=float, nargs="+", default=[0, 4, 8, 16, 24])
    for line in lines(parser.parse_args().budgets_mib):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
