"""Every Triton kernel compiles for a GPU, wherever the tests run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.processes import environment


def test_every_triton_kernel_compiles_for_hopper() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.kernels.compile_for_hopper"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(TRITON_INTERPRET="0"), timeout=600)
    assert done.returncode == 0, done.stderr
    compiled = {tuple(line.removeprefix("minisgl_kernels.").split()) for line in done.stdout.splitlines()}
    assert compiled >= {
        *(("adjust_logits", name) for name in ("_rule_kernel", "_count_kernel", "_penalty_kernel")),
        ("decode_inputs", "_kernel"),
        *((module, "_kernel") for module in ("activate_fp8", "add_rms_norm", "fp8_tiles", "quantize_fp8")),
        ("fused_moe", "_sum_kernel"),
        ("mask_logits", "_kernel"),
        *((module, "_kernel") for module in ("matmul_tiles", "merge_states", "shared_prefix")),
        ("moe_routing", "_kernel"),
        ("moe_tiles", "_product_kernel"),
        ("sample_filtered", "_kernel"),
        *(("sample_gumbel", name) for name in ("_split_kernel", "_reduce_kernel")),
        *(("paged_attention", name) for name in ("_decode_kernel", "_join_kernel", "_extend_kernel")),
    }
