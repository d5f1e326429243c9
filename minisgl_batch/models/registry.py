"""Which module runs which architecture; a module is imported when its model is built. Called by the engine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from minisgl_batch.errors import ModelError

if TYPE_CHECKING:
    import torch

    from minisgl_batch.distributed.group import TPGroup
    from minisgl_batch.models.base import CausalLM
    from minisgl_batch.models.config import ModelConfig

_DENSE = "minisgl_batch.models.dense:DenseModel"

# Architecture, as in the first entry of config.json's `architectures` -> module:class.
_MODELS = {
    "Gemma3ForCausalLM": _DENSE,
    "GptOssForCausalLM": _DENSE,
    "LlamaForCausalLM": _DENSE,
    "MinistralForCausalLM": _DENSE,
    "Ministral3ForCausalLM": _DENSE,
    "MistralForCausalLM": _DENSE,
    "MixtralForCausalLM": _DENSE,
    "Phi3ForCausalLM": _DENSE,
    "Qwen2ForCausalLM": _DENSE,
    "Qwen3ForCausalLM": _DENSE,
    "Qwen2MoeForCausalLM": _DENSE,
    "Qwen3MoeForCausalLM": _DENSE,
}


def model_class(architecture: str) -> type[CausalLM]:
    """The class that runs `architecture`.

    Raises:
        ModelError: there is none; lists the supported architectures.
    """
    if architecture not in _MODELS:
        raise ModelError(f"architecture {architecture!r} isn't supported; supported are {', '.join(_MODELS)}")
    module, _, name = _MODELS[architecture].partition(":")
    found: type[CausalLM] = getattr(import_module(module), name)
    return found


def make_model(config: ModelConfig, tp: TPGroup, dtype: torch.dtype, device: torch.device | None = None) -> CausalLM:
    """A model on `device` (None: torch's default), with uninitialised weights.

    Raises:
        ModelError: the architecture isn't supported.
        InvalidParameterError: the group's size doesn't suit the model.
    """
    return model_class(config.architecture)(config, tp, dtype, device)
