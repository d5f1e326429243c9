"""Attention backends by name. A backend's module is imported only when it is chosen.

torch       any device; CPUs, and the reference
triton      our own kernels; any CUDA GPU
fa          flash-attn for all rows, without CUDA graphs
fi          FlashInfer for all rows
fa,fi       flash-attn for extend rows, FlashInfer for decode rows
auto        fa,fi or fi where they are installed and the GPU runs them, else triton; torch on a CPU
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from minisgl_batch.attention.base import AttentionBackend, AttnHeads
from minisgl_batch.attention.decode_buffers import DecodeBuffers
from minisgl_batch.attention.flash_attn import installed_generation
from minisgl_batch.errors import InvalidParameterError
from minisgl_batch.kvcache.mha_pool import MHAKVCache

_WHOLE = {
    "torch": "minisgl_batch.attention.torch:TorchAttention",
    "fa": "minisgl_batch.attention.fa:FlashAttnBackend",
}
_HYBRID = ("fa,fi", "fi,fi")
_ALIASES = {"fi": "fi,fi"}


@dataclass(frozen=True)
class BackendSetup:
    """What backends are made of.

    Attributes:
        pool: the KV pool.
        heads: the model's heads on this rank.
        make_buffers: the buffers for decode rows, for backends that keep them.
    """

    pool: MHAKVCache
    heads: AttnHeads
    make_buffers: Callable[[], DecodeBuffers]


def resolve_backend(name: str, device: torch.device, *, has_window: bool) -> str:
    """The name of a backend that runs on this device.

    Args:
        has_window: some layer sees a window of tokens only, which `fi` isn't used for.

    Raises:
        InvalidParameterError: there is no such backend, or it can't run this model here; lists those that can.
    """
    name = _ALIASES.get(name, name)
    if device.type == "cpu":
        if name in ("auto", "torch"):
            return "torch"
        raise InvalidParameterError("attention_backend", f"{name!r} doesn't run on a CPU; torch does")
    if name == "auto":
        return _best(device, has_window=has_window)
    if name not in (*_WHOLE, *_HYBRID, "triton"):
        known = ", ".join(["auto", *sorted(_WHOLE), "triton", "fi", "'fa,fi'"])
        raise InvalidParameterError("attention_backend", f"{name!r} is unknown; known ones are {known}")
    if has_window and name in _HYBRID:
        raise InvalidParameterError("attention_backend", f"{name!r} runs no models with sliding windows; triton does")
    return name


def make_backend(name: str, setup: BackendSetup) -> AttentionBackend:
    """The backend of a resolved name."""
    if name in _WHOLE:
        backend: AttentionBackend = _load(_WHOLE[name])(setup.pool)
        return backend
    if name == "triton":
        from minisgl_batch.attention.triton import TritonAttention

        return TritonAttention(setup.pool, setup.make_buffers())
    from minisgl_batch.attention.fi import FlashInferDecode, FlashInferExtend
    from minisgl_batch.attention.hybrid import HybridBackend
    from minisgl_batch.attention.parts import ExtendPart, TwoLevelPart

    buffers = setup.make_buffers()
    decode = FlashInferDecode(setup.pool, setup.heads, buffers)
    extend: ExtendPart
    two_level: TwoLevelPart | None = None
    if name == "fa,fi":
        from minisgl_batch.attention.fa import FlashAttnExtend
        from minisgl_batch.attention.two_level import TwoLevelDecode

        extend = FlashAttnExtend(setup.pool)
        two_level = TwoLevelDecode(setup.pool, setup.heads, decode, buffers)
    else:
        extend = FlashInferExtend(setup.pool, setup.heads)
    return HybridBackend(extend, decode, two_level, buffers)


def _best(device: torch.device, *, has_window: bool) -> str:
    if has_window or find_spec("flashinfer") is None:
        return "triton"
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    return "fa,fi" if is_hopper and installed_generation() in (3, 4) else "fi,fi"


def _load(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)
