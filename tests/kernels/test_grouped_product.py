"""The experts' product in CUDA C++, on a GPU and in the emulator, against its twin."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from minisgl_kernels import fused_moe as module
from minisgl_kernels import grouped_product, matmul, reference_moe
from minisgl_kernels.fixed_order import CpuFixedOrder
from minisgl_kernels.fused_moe import ClampedSwiglu, fused_moe, runs_clusters
from tests.kernels.devices import interpreter
from tests.kernels.emulation import build_emulator, emulated, late_thread
from tests.kernels.errors import assert_close
from tests.kernels.test_fused_moe import experts


@pytest.fixture(params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where `fused_moe` runs the product, for however few rows; on a CPU with the Triton kernels around it."""
    monkeypatch.setattr(module, "_MANY_ROWS", 0)
    if request.param == "emulator":
        run = partial(emulated(build_emulator(), "grouped_product"), 4)
        monkeypatch.setattr(grouped_product, "_load", lambda _: run)
        return interpreter(monkeypatch)
    if not grouped_product.can_run(torch.empty(0, dtype=torch.bfloat16, device="cuda")):
        pytest.skip("needs a Hopper GPU, nvcc, ninja and tvm-ffi")
    return torch.device("cuda")


def check(
    device: torch.device,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    width: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    biased: bool = False,
) -> None:
    """One expert gets a row of every token, another one none, if there are enough."""
    gate_up, down = experts(num_experts, hidden_size, width, device, dtype)
    x = torch.randn(num_tokens, hidden_size, device=device).to(dtype)
    assert grouped_product.can_run(x, hidden_size, width)
    logits = torch.randn(num_tokens, num_experts, device=device)
    logits[:, 0] += 20.0
    logits[:, -1] -= 20.0
    given: dict[str, Any] = {"renormalize": True}
    if biased:
        given["gate_up_bias"] = torch.randn(num_experts, 2 * width, device=device).to(dtype)
        given["down_bias"] = torch.randn(num_experts, hidden_size, device=device).to(dtype)
        given["activation"] = ClampedSwiglu(1.7, 0.8)
    wide = {name: value.float() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    exact = reference_moe.fused_moe(x.float(), logits, gate_up.float(), down.float(), top_k, **wide)
    twin = reference_moe.fused_moe(x, logits, gate_up, down, top_k, **given)
    assert_close(fused_moe(x, logits, gate_up, down, top_k, **given), exact, twin)


@pytest.mark.parametrize("biased", [False, True])
def test_rows_and_sizes_that_fill_no_tile(device: torch.device, biased: bool) -> None:
    check(device, 90, 5, 2, 72, 40, biased=biased)


def test_experts_with_a_row_each(device: torch.device) -> None:
    """The second block of a cluster has none."""
    check(device, 1, 5, 3, 72, 40)


def test_several_tiles_per_expert_and_program(device: torch.device) -> None:
    check(device, 330, 2, 1, 136, 136)


@pytest.mark.parametrize("thread", [32, 257, 288, 3 * 128 + 37, 3 * 128 + 383])
def test_a_thread_may_be_late(monkeypatch: pytest.MonkeyPatch, thread: int) -> None:
    """By however much: of those who multiply, of those who load, of either block."""
    library = build_emulator()
    run = partial(emulated(library, "grouped_product"), 2)
    monkeypatch.setattr(module, "_MANY_ROWS", 0)
    monkeypatch.setattr(grouped_product, "_load", lambda _: run)
    with late_thread(library, thread):
        check(interpreter(monkeypatch), 30, 2, 1, 136, 264)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [96, 192, 384, 768])
def test_shares_of_an_expert(device: torch.device, width: int) -> None:
    """Of Qwen3-30B-A3B, split over 8, 4, 2 and 1 GPUs."""
    for num_tokens in (1, 513, 4096):
        check(device, num_tokens, 128, 8, 2048, width)


@pytest.mark.gpu
def test_other_models_sizes(device: torch.device) -> None:
    check(device, 3000, 32, 4, 2880, 2880, biased=True)
    check(device, 1000, 8, 2, 4096, 1792, dtype=torch.float16)
    check(device, 999, 16, 4, 1000, 72)
    check(device, 2000, 1, 1, 512, 104)


def test_sizes_and_types_without_a_kernel(device: torch.device) -> None:
    x = torch.empty(4, 64, dtype=torch.bfloat16, device=device)
    assert grouped_product.can_run(x, 64, 40)
    assert not grouped_product.can_run(x, 64, 20)
    assert not grouped_product.can_run(x.float(), 64, 40)


def test_no_other_bits_where_order_is_kept(device: torch.device) -> None:
    x = torch.empty(8, 64, dtype=torch.bfloat16, device=device)
    assert runs_clusters(x, 8, 2, 40)
    with matmul.activate(CpuFixedOrder()):
        assert not runs_clusters(x, 8, 2, 40)


def test_other_devices_have_no_kernel() -> None:
    assert not grouped_product.can_run(torch.empty(0, dtype=torch.bfloat16), 64)
