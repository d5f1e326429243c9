"""Attention backends by name. A backend's module is imported only when it is chosen.

- torch: any device; CPUs, and the reference
- triton: our own kernels; any CUDA GPU
- fa: flash-attn for all rows, without CUDA graphs
- fi: FlashInfer for all rows
- fa,cuda: flash-attn for extend rows, our own kernel for decode rows; for Hopper
- fa,fi: flash-attn for extend rows, FlashInfer for decode rows
- trtllm: FlashInfer's TensorRT-LLM kernels for all rows; for Blackwell, where this project has not run it
- auto: the first of fa,cuda, fa,fi (both on Hopper) and fi that can run the model here, else triton; triton too for
  float32 and for heads that the libraries haven't been tried with; torch on a CPU

Those that read an fp8 KV cache are torch, triton and fa,cuda.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch

from minisgl_batch.attention.base import AttentionBackend, BackendSetup
from minisgl_batch.attention.flash_attn import installed_generation
from minisgl_batch.errors import InvalidParameterError
from minisgl_kernels.e4m3 import E4M3_CAPABILITY
from minisgl_kernels.paged_decode import can_run

# Name -> module:function that makes the backend of a BackendSetup.
_BACKENDS = {
    "torch": "minisgl_batch.attention.torch:make",
    "triton": "minisgl_batch.attention.triton:make",
    "fa": "minisgl_batch.attention.fa:make",
    "fi": "minisgl_batch.attention.fi:make",
    "fa,cuda": "minisgl_batch.attention.cuda:make",
    "fa,fi": "minisgl_batch.attention.fi:make_behind_flash_attn",
    "trtllm": "minisgl_batch.attention.trtllm:make",
}
_WITH_WINDOWS = ("torch", "triton", "fa", "fa,cuda")
_WITH_SINKS = _WITH_WINDOWS
_WITH_FP8_KV = ("torch", "triton", "fa,cuda")
_WITH_FLOAT32 = ("torch", "triton")
_HEAD_DIMS_OF_LIBRARIES = (64, 128)  # what the tests run flash-attn and FlashInfer with


@dataclass(frozen=True)
class AttnShapes:
    """What decides which backends can run a model.

    Attributes:
        group: query heads per KV head.
        has_window: some layer sees a window of tokens only.
        has_sinks: some heads have attention sinks.
        kv_is_fp8: the KV pool holds e4m3, else `dtype`.
        fixed_order: as for `BackendSetup`.
    """

    dtype: torch.dtype
    group: int
    head_dim: int
    page_size: int
    has_window: bool = False
    has_sinks: bool = False
    kv_is_fp8: bool = False
    fixed_order: bool = False


def resolve_backend(name: str, device: torch.device, shapes: AttnShapes) -> str:
    """The name of a backend that runs on this device.

    Raises:
        InvalidParameterError: there is no such backend, or it can't run this model here; lists those that can.
    """
    name = {"fi,fi": "fi", "fa,fa": "fa"}.get(name, name)
    if device.type == "cpu":
        if name in ("auto", "torch"):
            return "torch"
        raise InvalidParameterError("attention_backend", f"{name!r} doesn't run on a CPU; torch does")
    if shapes.fixed_order and name not in ("auto", "triton"):
        raise InvalidParameterError("batch_invariant", f"runs on the attention backend 'triton', not on {name!r}")
    if shapes.kv_is_fp8 and torch.cuda.get_device_capability(device) < E4M3_CAPABILITY:
        raise InvalidParameterError("kv_cache_dtype", "fp8 needs a GPU of the Ada or Hopper generation or newer")
    if name == "auto":
        return "triton" if shapes.fixed_order else _best(device, shapes)
    if name not in _BACKENDS:
        known = ", ".join(["auto", *(repr(backend) for backend in _BACKENDS)])
        raise InvalidParameterError("attention_backend", f"{name!r} is unknown; known ones are {known}")
    if shapes.dtype == torch.float32 and name not in _WITH_FLOAT32:
        raise InvalidParameterError("attention_backend", f"{name!r} doesn't compute in float32; triton does")
    if shapes.has_window and name not in _WITH_WINDOWS:
        raise InvalidParameterError("attention_backend", f"{name!r} runs no models with sliding windows; triton does")
    if shapes.has_sinks and name not in _WITH_SINKS:
        raise InvalidParameterError("attention_backend", f"{name!r} runs no models with attention sinks; triton does")
    if shapes.kv_is_fp8 and name not in _WITH_FP8_KV:
        raise InvalidParameterError("attention_backend", f"{name!r} reads no fp8 KV cache; triton and fa,cuda do")
    return name


def make_backend(name: str, setup: BackendSetup) -> AttentionBackend:
    """The backend of a resolved name.

    Raises:
        InvalidParameterError: its library isn't installed, or can't read pages of this size.
    """
    module, _, function = _BACKENDS[name].partition(":")
    backend: AttentionBackend = getattr(import_module(module), function)(setup)
    return backend


def widens_layers(name: str) -> bool:
    """Whether a backend reads an fp8 KV cache a layer at a time in the compute type, and keeps room for one."""
    return name == "fa,cuda"


def _best(device: torch.device, shapes: AttnShapes) -> str:
    if shapes.dtype == torch.float32 or shapes.head_dim not in _HEAD_DIMS_OF_LIBRARIES:
        return "triton"
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    has_flash_attn = is_hopper and installed_generation() in (3, 4)
    if has_flash_attn and can_run(device, shapes.dtype, shapes.group, shapes.head_dim, shapes.page_size):
        return "fa,cuda"
    if shapes.kv_is_fp8 or shapes.has_window or shapes.has_sinks or find_spec("flashinfer") is None:
        return "triton"
    return "fa,fi" if has_flash_attn else "fi"
