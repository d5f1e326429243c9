"""Attention backends by name. A backend's module is imported only when it is chosen."""

from __future__ import annotations

from importlib import import_module

from minisgl_batch.attention.base import AttentionBackend
from minisgl_batch.errors import InvalidParameterError
from minisgl_batch.kvcache.mha_pool import MHAKVCache

_BACKENDS = {"torch": ("minisgl_batch.attention.torch", "TorchAttention")}


def resolve_backend(name: str) -> str:
    """The backend that `name` stands for.

    Raises:
        InvalidParameterError: there is no such backend; lists those that are.
    """
    if name == "auto":
        return "torch"
    if name not in _BACKENDS:
        known = ", ".join(sorted(_BACKENDS))
        raise InvalidParameterError("attention_backend", f"{name!r} is unknown; known ones are auto, {known}")
    return name


def make_backend(name: str, pool: MHAKVCache) -> AttentionBackend:
    """The backend of a resolved name, over `pool`."""
    module, attribute = _BACKENDS[name]
    backend: AttentionBackend = getattr(import_module(module), attribute)(pool)
    return backend
