"""Turns the options a user gave into the values an engine runs with, once, knowing the model and the device."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from minisgl_batch.attention.registry import AttnShapes, resolve_backend
from minisgl_batch.config import EngineConfig
from minisgl_batch.errors import InvalidParameterError
from minisgl_batch.models.config import ModelConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineOptions:
    """Every "auto" of an EngineConfig resolved, but for what depends on the memory that weights leave."""

    device: torch.device
    dtype: torch.dtype
    attention_backend: str
    page_size: int
    max_running: int
    max_prefill_tokens: int
    max_seq_len: int
    cuda_graph_max_bs: int
    overlap: bool
    mixed: bool
    share_prefixes: bool


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
    group = model.num_heads // model.num_kv_heads
    shapes = AttnShapes(dtype, group, model.head_dim, page_size, model.limited_to(max_seq_len).has_windows)
    return EngineOptions(
        device=device,
        dtype=dtype,
        attention_backend=resolve_backend(config.attention_backend, device, shapes),
        page_size=page_size,
        max_running=config.max_running or (256 if on_gpu else 64),
        max_prefill_tokens=config.max_prefill_tokens or (8192 if on_gpu else 512),
        max_seq_len=max_seq_len,
        cuda_graph_max_bs=512 if config.cuda_graph_max_bs is None else config.cuda_graph_max_bs,
        overlap=on_gpu if config.overlap is None else config.overlap,
        mixed=not on_gpu if config.mixed is None else config.mixed,
        share_prefixes=config.share_prefixes and config.cache == "radix",
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
