"""Turns the options a user gave into the values an engine runs with, once, knowing the model and the device."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from minisgl_batch.attention.registry import AttnShapes, resolve_backend
from minisgl_batch.config import EngineConfig
from minisgl_batch.errors import InvalidParameterError
from minisgl_batch.models.config import ModelConfig
from minisgl_kernels.e4m3 import E4M3, E4M3_CAPABILITY
from minisgl_kernels.fixed_order import can_fix_order

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineOptions:
    """Every "auto" of an EngineConfig resolved, but for what depends on the memory that weights leave."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    attention_backend: str
    page_size: int
    max_running: int
    max_prefill_tokens: int
    max_seq_len: int
    cuda_graph_max_bs: int
    overlap: bool
    mixed: bool
    share_prefixes: bool
    batch_invariant: bool


def resolve(config: EngineConfig, model: ModelConfig, local_rank: int = 0) -> EngineOptions:
    """See the module's docstring.

    Args:
        local_rank: which of the host's devices.

    Raises:
        InvalidParameterError: an option doesn't fit the model or the machine; names it.
    """
    device = pick_device(config.device, local_rank)
    on_gpu = device.type == "cuda"
    max_seq_len = config.max_seq_len or model.context_len
    if max_seq_len > model.context_len:
        raise InvalidParameterError(
            "max_seq_len", f"{max_seq_len} is more than the model's context of {model.context_len} tokens"
        )
    dtype, page_size = _dtype(config.dtype, model.dtype, device), config.page_size or 16
    if dtype == torch.float16 and not model.fits_float16:
        raise InvalidParameterError(
            "dtype", f"float16 can't hold what {model.architecture} computes: use bfloat16 or float32"
        )
    if model.quantization is not None and on_gpu and torch.cuda.get_device_capability(device) < E4M3_CAPABILITY:
        raise InvalidParameterError(
            "quantization",
            f"{torch.cuda.get_device_name(device)} can't multiply in FP8, GPUs since Ada and Hopper can: use a model "
            "in bfloat16",
        )
    if config.batch_invariant:
        _check_fixed_order(device, dtype, model)
    group = model.num_heads // model.num_kv_heads
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else E4M3
    has_windows = model.limited_to(max_seq_len).longest_window is not None
    shapes = AttnShapes(
        dtype,
        group,
        model.head_dim,
        page_size,
        has_windows,
        model.has_sinks,
        kv_is_fp8=kv_dtype == E4M3,
        fixed_order=config.batch_invariant,
    )
    return EngineOptions(
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        attention_backend=resolve_backend(config.attention_backend, device, shapes),
        page_size=page_size,
        max_running=config.max_running or (256 if on_gpu else 64),
        max_prefill_tokens=config.max_prefill_tokens or (8192 if on_gpu else 512),
        max_seq_len=max_seq_len,
        cuda_graph_max_bs=512 if config.cuda_graph_max_bs is None else config.cuda_graph_max_bs,
        overlap=on_gpu if config.overlap is None else config.overlap,
        mixed=not on_gpu if config.mixed is None else config.mixed,
        share_prefixes=config.share_prefixes and config.cache == "radix",
        batch_invariant=config.batch_invariant,
    )


def _check_fixed_order(device: torch.device, dtype: torch.dtype, model: ModelConfig) -> None:
    """
    Raises:
        InvalidParameterError: there are no kernels that add up in an order which depends on a row alone.
    """
    if model.quantization is not None:
        raise InvalidParameterError("batch_invariant", "isn't there for FP8 weights yet: use a model in 16 or 32 bits")
    if not can_fix_order(device, dtype):
        if device.type == "cuda":
            raise InvalidParameterError("batch_invariant", "needs Triton, which isn't there on this machine")
        name = str(dtype).removeprefix("torch.")
        others = [name for name in ("bfloat16", "float32") if can_fix_order(device, getattr(torch, name))]
        hint = f": use `dtype` {' or '.join(others)}" if others else ""
        raise InvalidParameterError(
            "batch_invariant", f"needs oneDNN's products of {name}, which aren't there on this machine{hint}"
        )


def pick_device(name: str, local_rank: int) -> torch.device:
    """The device of a rank.

    Raises:
        InvalidParameterError: the host has none for it.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InvalidParameterError("device", "cuda was asked for, but torch sees no CUDA GPU here")
    num_gpus = torch.cuda.device_count()
    if local_rank >= num_gpus:
        raise InvalidParameterError("tp", f"{local_rank + 1} ranks on this host need a GPU each, and it has {num_gpus}")
    return torch.device("cuda", local_rank)


def _dtype(asked: str, checkpoint: str, device: torch.device) -> torch.dtype:
    name = checkpoint if asked == "auto" else asked
    if asked == "auto" and device.type == "cpu" and name != "float32" and not (name == "bfloat16" and _fast_bf16()):
        # Without such instructions a bfloat16 matrix product is two orders of magnitude slower than a float32 one.
        logger.info("computing in float32: this CPU has no fast %s arithmetic", name)
        name = "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _fast_bf16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
