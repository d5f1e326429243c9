"""Micro-benchmarks of a layer's and a step's small kernels on a GPU: one JSON line each.

    python -m tests.bench.kernels

`us` is for inputs that rotate through more memory than the L2 cache holds, and `floor_us` what their bytes take at the
speed of a copy. Within a decode step inputs come from the cache instead, where `us_cached` is what counts;
`us_triton` is that of the Triton kernel where there is one in CUDA C++ too, and `us_serial` that of the Triton kernel
without programmatic dependent launch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from minisgl_kernels.add_rms_norm import add_rms_norm
from minisgl_kernels.decode_inputs import DecodeInputs, PageLists, decode_inputs
from minisgl_kernels.embedding import embedding
from minisgl_kernels.merge_states import merge_states
from minisgl_kernels.norm_rope_store import norm_rope_store
from minisgl_kernels.silu_and_mul import silu_and_mul
from tests.bench.timing import line, median_us, num_copies

Call = Callable[[], object]
NUM_TOKENS = (1, 8, 64, 256, 2048, 16384)
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Model:
    """What of a model counts here."""

    name: str
    hidden_size: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128


MODELS = (Model("0.6B", 1024, 3072, 16, 8), Model("14B", 5120, 17408, 40, 8), Model("14B/8", 5120, 2176, 5, 1))


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(DTYPE)


def measure(kernel: str, num_bytes: int, make: Callable[[], Call], **shape: Any) -> dict[str, Any]:
    """`make` gives a call over inputs of its own."""
    calls = [make() for _ in range(num_copies(num_bytes))]
    cached = median_us(calls[:1])
    # Functions, since a mock would keep all tensors that it is called with.
    with patch("minisgl_kernels.cuda.layer_kernels", lambda _: None):
        triton = median_us(calls[:1])
        with patch("minisgl_kernels.triton_support.uses_pdl", lambda _: False):
            serial = median_us(calls[:1])
    more = {"us_cached": round(cached, 2), "us_triton": round(triton, 2), "us_serial": round(serial, 2)}
    return line(kernel, num_bytes, median_us(calls), **shape, **more)


def norm_rope_store_call(model: Model, num_tokens: int, page_size: int = 16) -> Call:
    num_pages = -(-num_tokens // page_size) + 1
    pool = randn(2, num_pages, page_size, model.num_kv_heads, model.head_dim)
    qkv = randn(num_tokens, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim)
    norms = randn(model.head_dim), randn(model.head_dim)
    out_loc = torch.randperm(num_pages * page_size, device="cuda")[:num_tokens].int()
    rope = randn(num_tokens, 2, model.head_dim)
    return partial(norm_rope_store, qkv, norms, 1e-6, rope, out_loc, pool[0], pool[1])


def layer_lines() -> Iterator[dict[str, Any]]:
    for model in MODELS:
        for n in NUM_TOKENS:
            shape = {"model": model.name, "tokens": n}
            size, width = model.hidden_size, model.width
            heads = model.num_heads + 2 * model.num_kv_heads
            yield measure(
                "norm_rope_store",
                2 * n * (2 * heads + 1) * model.head_dim,
                partial(norm_rope_store_call, model, n),
                **shape,
            )
            yield measure(
                "add_rms_norm",
                2 * 4 * n * size,
                lambda n=n, size=size: partial(add_rms_norm, randn(n, size), randn(n, size), randn(size), 1e-6),
                **shape,
            )
            yield measure(
                "silu_and_mul",
                2 * 3 * n * width,
                lambda n=n, width=width: partial(silu_and_mul, randn(n, 2 * width)),
                **shape,
            )


def embedding_lines(vocab_size: int = 151_936) -> Iterator[dict[str, Any]]:
    for model in MODELS[:2]:
        weight = randn(vocab_size, model.hidden_size)
        for n in NUM_TOKENS:

            def call(n: int = n, weight: torch.Tensor = weight) -> Call:
                ids = torch.randint(0, vocab_size, (n,), device="cuda", dtype=torch.int32)
                return partial(embedding, ids, weight, range(vocab_size))

            yield measure("embedding", 2 * 2 * n * model.hidden_size, call, model=model.name, tokens=n)


def merge_states_call(num_tokens: int, num_heads: int, head_dim: int) -> Call:
    a, b = randn(num_tokens, num_heads, head_dim), randn(num_tokens, num_heads, head_dim)
    lse_a, lse_b = (
        torch.randn(num_heads, num_tokens, device="cuda").T,
        torch.randn(num_tokens, num_heads, device="cuda"),
    )
    return partial(merge_states, a, lse_a, b, lse_b, lse_a_is_log2=False, lse_b_is_log2=True)


def decode_inputs_call(num_rows: int, num_pages: int, page_size: int = 16) -> Call:
    """Rows of `num_pages` full pages, one in sixteen of which begins its last."""

    def ints(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, device="cuda", dtype=torch.int32)

    table, tokens = ints(1 << 20, num_rows + 1, 2560), ints(150_000, num_rows + 1, 2560 * page_size + 1)
    slots = torch.randperm(num_rows, device="cuda").int()
    kv_lens = torch.full_like(slots, num_pages * page_size)
    new_pages = torch.where(slots % 16 == 0, slots, -1)
    lists = PageLists(
        torch.arange(0, (num_rows + 1) * num_pages, num_pages, device="cuda", dtype=torch.int32),
        torch.zeros_like(slots),
        ints(1, num_rows * num_pages),
        ints(1, num_rows),
    )
    inputs = DecodeInputs(ints(1, num_rows), ints(1, num_rows), ints(1, num_rows))
    return partial(decode_inputs, slots, kv_lens, new_pages, table, tokens, page_size, inputs, lists)


def step_lines() -> Iterator[dict[str, Any]]:
    for model in MODELS[:2]:
        for n in (1, 64, 256, 1024):
            heads, dim = model.num_heads, model.head_dim
            num_bytes = n * heads * (3 * dim * 2 + 2 * 4)
            make = partial(merge_states_call, n, heads, dim)
            yield measure("merge_states", num_bytes, make, model=model.name, tokens=n)
    for n, num_pages in ((1, 40), (64, 40), (256, 40), (256, 160), (1024, 40), (64, 2560)):
        num_bytes = 4 * n * (2 * num_pages + 10)
        yield measure("decode_inputs", num_bytes, partial(decode_inputs_call, n, num_pages), rows=n, pages=num_pages)


def lines() -> Iterator[dict[str, Any]]:
    yield from layer_lines()
    yield from embedding_lines()
    yield from step_lines()


def main() -> None:
    worst: dict[str, float] = {}
    for result in lines():
        print(json.dumps(result), flush=True)
        if result["floor_us"] > 20.0:  # where bytes count, not launches
            worst[result["kernel"]] = max(result["of_floor"], worst.get(result["kernel"], 0.0))
    for kernel, ratio in worst.items():
        print(f"{kernel}: at most {math.ceil(ratio * 100)} % of its floor where that is above 20 us", flush=True)


if __name__ == "__main__":
    main()
