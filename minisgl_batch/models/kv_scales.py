"""Scales of keys and values for an fp8 KV cache, which some checkpoints have. Called by `weights`.

llm-compressor and others find them by running the model: one number for a layer's keys, one for its values.
"""

from __future__ import annotations

import math

from minisgl_batch.errors import ModelError
from minisgl_batch.layers.attention import SelfAttention
from minisgl_batch.models.base import CausalLM
from minisgl_batch.models.checkpoint import Checkpoint


def read_kv_scales(checkpoint: Checkpoint, model: CausalLM) -> None:
    """Give each layer's attention the scales that the checkpoint has for it.

    Raises:
        ModelError: one isn't a positive number; names the file and the tensor.
    """
    for path, module in model.named_modules():
        if isinstance(module, SelfAttention):
            k_scale, v_scale = (_scale(checkpoint, path, kind) for kind in "kv")
            module.kv_scales = k_scale, v_scale


def _scale(checkpoint: Checkpoint, path: str, kind: str) -> float:
    """1 where there is none."""
    names = (
        f"{path}.{kind}_scale",
        f"{path}.attn.{kind}_scale",
        f"{path}.{kind}_proj.{kind}_scale",
        f"{path}.kv_scale",
    )
    stored = next((checkpoint.tensors[name] for name in names if name in checkpoint.tensors), None)
    if stored is None:
        return 1.0
    if math.prod(stored.shape) != 1:
        raise ModelError(
            f"{stored.file}: {stored.key} has the shape {list(stored.shape)}, but only one scale for all of a layer's "
            "keys or values is supported"
        )
    scale = float(checkpoint.whole(stored))
    if not (math.isfinite(scale) and scale > 0.0):
        raise ModelError(f"{stored.file}: {stored.key} is {scale}, but a scale must be a positive number")
    return scale
