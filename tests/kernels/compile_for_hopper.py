"""Compiles every Triton kernel for a Hopper GPU where there is none: `python -m tests.kernels.compile_for_hopper`.

What the interpreter runs need not compile. The kernels' functions are called with CPU tensors, and each launch compiles
instead. Prints the kernels' names.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from minisgl_kernels import triton_support
from minisgl_kernels.activate_fp8 import activate_fp8
from minisgl_kernels.add_rms_norm import add_rms_norm, add_rms_norm_fp8
from minisgl_kernels.adjust_logits import AdjustedRows, adjust_logits
from minisgl_kernels.decode_inputs import DecodeInputs, PageLists, decode_inputs
from minisgl_kernels.e4m3 import E4M3
from minisgl_kernels.embedding import embedding
from minisgl_kernels.fp8_matmul import fp8_matmul
from minisgl_kernels.fp8_tiles import candidates, fp8_tiles
from minisgl_kernels.fused_moe import ClampedSwiglu, fused_moe
from minisgl_kernels.mask_logits import mask_logits
from minisgl_kernels.matmul_tiles import matmul_tiles
from minisgl_kernels.merge_states import merge_states
from minisgl_kernels.norm_rope_store import norm_rope_store
from minisgl_kernels.paged_attention import PagedRows, paged_attention
from minisgl_kernels.quantize_fp8 import quantize
from minisgl_kernels.sample_filtered import sample_filtered
from minisgl_kernels.sample_gumbel import sample_gumbel
from minisgl_kernels.shared_prefix import PrefixGroups, attend_to_prefixes
from minisgl_kernels.silu_and_mul import gelu_and_mul, silu_and_mul
from tests.kernels.sampling import random_rows

HOPPER = GPUTarget("cuda", 90, 32)
OPTIONS = ("num_warps", "num_stages", "launch_pdl", "enable_fp_fusion")
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", E4M3: "*fp8e4nv", torch.int32: "*i32", torch.int64: "*i64"}


def compile_launch(kernel: triton.JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """In place of a launch. Specialises as the launcher does: on ones, and on aligned pointers and multiples of 16."""
    del grid, warmup
    options = {key: kwargs.pop(key) for key in OPTIONS if key in kwargs}
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    types = {p.name: "constexpr" if p.is_constexpr else type_of(values[p.name]) for p in kernel.params}
    constants = {(p.num,): values[p.name] for p in kernel.params if types[p.name] == "constexpr"}
    aligned = {(p.num,): [["tt.divisibility", 16]] for p in kernel.params if is_aligned(values[p.name], types[p.name])}
    triton.compile(ASTSource(kernel, types, constants, aligned), target=HOPPER, options=options)
    print(kernel.__module__, kernel.__name__)  # noqa: T201 - its output


def type_of(value: object) -> str:
    if value is None:
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if value == 1 and isinstance(value, int):
        return "constexpr"
    return "i32" if isinstance(value, int) else "fp32"


def is_aligned(value: object, kind: str) -> bool:
    return kind.startswith("*") or (kind == "i32" and isinstance(value, int) and value % 16 == 0)


def run_all(dtype: torch.dtype) -> None:
    def values(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.int32)

    add_rms_norm(values(4, 1024), values(4, 1024), values(1024), 1e-6)
    add_rms_norm(values(4, 1024), None, torch.zeros(1024), 1e-6)
    add_rms_norm_fp8(values(4, 5120), values(4, 5120), values(5120), 1e-6)
    for gelu in (False, True):
        activate_fp8(values(4, 2 * 17408), gelu=gelu)
    quantize(values(4, 5120), grouped=False)
    plain, memory = quantize(values(160, 5120), grouped=False), (torch.zeros(64, dtype=torch.uint8), numbers(9))
    for num_rows, splits in ((32, 2), (200, 1)):
        x, tiles = quantize(values(num_rows, 5120), grouped=False), next(candidates(num_rows, 160, 5120, 0))
        fp8_tiles(x, plain, values(num_rows, 160), tiles._replace(splits=splits), *memory)
    weight = quantize(values(160, 5120), grouped=True)
    for num_rows in (1, 200):
        fp8_matmul(quantize(values(num_rows, 5120), grouped=True), weight)
    silu_and_mul(values(4, 2048))
    gelu_and_mul(values(4, 2048))
    embedding(numbers(4), values(100, 1024), range(50, 150))
    merge_states(
        values(4, 16, 128),
        torch.zeros(4, 16),
        values(4, 16, 128),
        torch.zeros(4, 16),
        lse_a_is_log2=True,
        lse_b_is_log2=False,
    )
    pool = values(2, 9, 16, 8, 128)
    norm_rope_store(values(4, 32 * 128), (values(128), values(128)), 1e-6, values(4, 2, 128), numbers(4), *pool)
    wide_pool, wide_norms = values(2, 9, 16, 4, 256), (torch.zeros(256), torch.zeros(256))
    norm_rope_store(values(4, 16 * 256), wide_norms, 1e-6, values(4, 2, 256), numbers(4), *wide_pool)
    norm_rope_store(
        values(4, 32 * 128), (values(128), values(128)), 1e-6, values(4, 2, 128), numbers(4), *pool.to(E4M3)
    )
    inputs, lists = DecodeInputs(*numbers(3, 4)), PageLists(numbers(5), numbers(4), numbers(9), numbers(4))
    decode_inputs(numbers(4), numbers(4), numbers(4), numbers(5, 8), numbers(5, 99), 16, inputs, lists)
    rows = random_rows(4, torch.device("cpu"))
    sample_gumbel(values(4, 151_936), rows)
    sample_gumbel(values(1, 1), rows._replace(slots=rows.slots[:1]), 1)
    sample_filtered(values(4, 151_936), rows)
    adjusted = AdjustedRows(*rows[:3], numbers(7, 99), *torch.ones(3, 7), numbers(7), numbers(7, 2048, 4))
    adjust_logits(values(4, 151_936), adjusted)
    mask_logits(values(4, 151_936), numbers(3, 4748), numbers(4), 151_936)
    matmul_tiles(values(4, 1000), values(8, 1000), values(4, 8))
    gate_up, down = values(8, 2 * 192, 256), values(8, 256, 192)
    for num_tokens in (1, 8, 32, 120, 800):  # a tile each
        fused_moe(values(num_tokens, 256), values(num_tokens, 8), gate_up, down, 2, renormalize=True)
    biased = {"gate_up_bias": values(8, 2 * 192), "down_bias": values(8, 256), "activation": ClampedSwiglu(1.702, 7.0)}
    fused_moe(values(4, 256), values(4, 8), gate_up, down, 2, renormalize=True, **biased)
    for num_rows, window in ((4, None), (1, 100)):
        paged = PagedRows(numbers(5, 300), numbers(num_rows), numbers(num_rows))
        paged_attention(values(num_rows, 40, 128), *pool, paged, 0.1, window)
        if window is None:
            groups = PrefixGroups(numbers(10), numbers(9), numbers(9, 300), numbers(num_rows))
            prefix = attend_to_prefixes(values(num_rows, 40, 128), *pool, groups, 0.1)
            behind = paged._replace(prefix=prefix)
            paged_attention(values(num_rows, 40, 128), *pool, behind, 0.1, fixed_order=True)
        paged_attention(values(num_rows, 40, 128), *pool, paged, 0.1, window, torch.zeros(40))
        paged = paged._replace(q_starts=numbers(num_rows + 1), max_q_len=300)
        paged_attention(values(300, 40, 128), *pool, paged, 0.1, window)
        paged_attention(values(300, 40, 128), *pool, paged, 0.1, window, torch.zeros(40))
        paged_attention(values(300, 8, 256), *wide_pool, paged, 0.1, window)
        for rows in (paged, paged._replace(q_starts=None)):
            paged_attention(values(300 if rows is paged else num_rows, 40, 128), *pool.to(E4M3), rows, 0.1, window)


def main() -> None:
    triton_support.runs_kernels = lambda _: True
    triton_support.uses_pdl = lambda _: True
    triton.JITFunction.run = compile_launch
    for dtype in (torch.bfloat16, torch.float32):
        run_all(dtype)


if __name__ == "__main__":
    main()
