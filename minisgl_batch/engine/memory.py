"""How much memory the KV pool may take."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from minisgl_batch.engine.options import EngineOptions
from minisgl_batch.errors import InvalidParameterError, ModelUnavailableError
from minisgl_batch.models.config import ModelConfig
from minisgl_kernels.fused_moe import max_rows

CPU_MEMORY_RATIO = 0.4  # other programs live on a CPU's memory too
GPU_MEMORY_RATIO = 0.9
MIN_BALANCE = 0.8  # of the least to the most memory in a group
GPU_WORKSPACE_BYTES = 3 << 30  # of attention and matrix libraries, and what CUDA graphs and the allocator keep


def available_bytes(device: torch.device, memory_ratio: float | None) -> int:
    """Memory for weights and KV pool together, before either is allocated."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps of tensors that are gone is free, too
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * (memory_ratio or GPU_MEMORY_RATIO))
    return int(_host_memory_left() * (memory_ratio or CPU_MEMORY_RATIO))


def step_bytes(model: ModelConfig, options: EngineOptions) -> int:
    """What a step needs besides weights and KV: its largest activations, logits, workspaces and graphs."""
    if options.device.type == "cpu":
        return 0
    per_token = 4 * model.hidden_size + 3 * max(model.mlp_widths) + 3 * model.num_heads * model.head_dim
    logits = options.max_running * model.vocab_size
    experts = 0
    if model.moe is not None:
        rows = max_rows(options.max_prefill_tokens, model.moe.top_k, model.moe.num_experts, options.dtype)
        experts = rows * (model.moe.intermediate_size + model.hidden_size)
    activations = (per_token * options.max_prefill_tokens + experts + 2 * logits) * options.dtype.itemsize
    # Penalties and the like work on float32 logits and count tokens.
    return activations + 8 * logits + GPU_WORKSPACE_BYTES


def check_balance(available: list[int]) -> None:
    """Refuse a group whose ranks have very different memory: all would get the pool of the poorest.

    Args:
        available: bytes for weights and KV pool, by rank.

    Raises:
        ModelUnavailableError: names the ranks.
    """
    least, most = min(available), max(available)
    if least < MIN_BALANCE * most:
        raise ModelUnavailableError(
            f"rank {available.index(least)} has {least / 2**30:.1f} GiB for weights and KV cache, and rank "
            f"{available.index(most)} has {most / 2**30:.1f} GiB: free memory there, or set `num_pages`"
        )


def num_pages(budget_bytes: int, page_bytes: int, page_size: int, useful_tokens: int) -> int:
    """Pages that fit into what the weights left, but no more than all slots can ever use.

    Args:
        budget_bytes: left for the pool.
        page_bytes: of one page over all layers.
        useful_tokens: of all slots at their longest.

    Raises:
        ModelUnavailableError: not even one page fits.
    """
    pages = min(budget_bytes // page_bytes, -(-useful_tokens // page_size))
    if pages < 1:
        raise ModelUnavailableError(
            f"no memory is left for the KV cache: the weights leave {max(budget_bytes, 0) / 2**20:.0f} MiB and a page "
            f"of {page_size} tokens takes {page_bytes / 2**20:.1f} MiB. Raise `memory_ratio`, free memory or use a "
            "smaller model"
        )
    return int(pages)


def check_size(field: str, value: int, num_bytes: int, device: torch.device) -> None:
    """Refuse an option that asks for more memory than the device has, used or free.

    Raises:
        InvalidParameterError: names the option.
    """
    on_gpu = device.type == "cuda"
    most = torch.cuda.mem_get_info(device)[1] if on_gpu else psutil.virtual_memory().total
    if num_bytes > most:
        sizes = f"{num_bytes / 2**30:,.1f} GiB, and this {'GPU' if on_gpu else 'machine'} has {most / 2**30:,.1f} GiB"
        raise InvalidParameterError(field, f"{value:,} of them would take {sizes}")


def _host_memory_left() -> int:
    """What this process may still take: of the machine, or of its control group where that is less."""
    left = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return left  # no version 2 control groups here
    return left if limit == "max" else max(0, min(left, int(limit) - used))
