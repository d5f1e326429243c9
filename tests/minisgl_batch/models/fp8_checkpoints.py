"""Checkpoints in FP8 as people have them, made of tiny random models, and what they stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from minisgl_kernels import reference_fp8
from tests.minisgl_batch.models.hf import save

BLOCK = 128


def compressed(weights: str, activations: str, **more: Any) -> dict[str, Any]:
    """llm-compressor's quantization_config."""
    kind = {"num_bits": 8, "type": "float", "symmetric": True}
    inputs = kind | {"strategy": activations, "dynamic": activations != "tensor"}
    if activations == "group":
        inputs["group_size"] = BLOCK
    structure = {"block_structure": [BLOCK, BLOCK]} if weights == "block" else {}
    group = {"targets": ["Linear"], "weights": kind | {"strategy": weights} | structure, "input_activations": inputs}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    return config | {"ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed"} | more


@dataclass(frozen=True)
class Format:
    """One way to store a model in FP8.

    Attributes:
        config: its quantization_config.
        block: rows and columns that share a scale; 0: all of them.
        scale: the name of the scale beside a layer's weight.
        shape: what the stored scales are shaped as, from (rows, columns) of blocks.
        dtype: of the scales.
        extra: other tensors of a layer.
        kept: layers that stay as they are, besides the head.
    """

    config: dict[str, Any]
    block: tuple[int, int]
    scale: str = "weight_scale"
    shape: Callable[[int, int], tuple[int, ...]] = lambda rows, columns: (rows, columns)
    dtype: torch.dtype = torch.float32
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    kept: str = "$^"


FORMATS: dict[str, Format] = {
    "fp8, per tensor, static": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        (0, 0),
        shape=lambda *_: (),
        extra={"input_scale": torch.tensor(0.5)},
    ),
    "fp8, per tensor, as transformers has it": Format(
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "weight_block_size": None,
            "modules_to_not_convert": ["lm_head", "model.layers.1.self_attn"],
        },
        (0, 0),
        scale="weight_scale_inv",
        shape=lambda *_: (),
        extra={"activation_scale": torch.tensor(0.5)},
        kept=r"layers\.1\.self_attn",
    ),
    "fp8, blocks": Format(
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.down_proj", "model.norm"],
        },
        (BLOCK, BLOCK),
        scale="weight_scale_inv",
        kept=r"layers\.0\.mlp\.down_proj",
    ),
    "compressed-tensors, per tensor, static": Format(
        compressed("tensor", "tensor"),
        (0, 0),
        shape=lambda *_: (1,),
        extra={"input_scale": torch.ones(1), "k_scale": torch.ones(1)},
    ),
    "compressed-tensors, channels": Format(
        compressed("channel", "token", ignore=["lm_head", r"re:.*layers\.0\.self_attn\..*"]),
        (1, 0),
        dtype=torch.bfloat16,
        kept=r"layers\.0\.self_attn",
    ),
    "compressed-tensors, blocks": Format(compressed("block", "group"), (BLOCK, BLOCK)),
}


def save_fp8(model: PreTrainedModel, folder: Path, how: Format) -> Path:
    """The folder. The model gets the weights that the checkpoint stands for, and scales its activations like us."""
    save(model, folder)
    file, config_file = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(file)
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or name == "lm_head" or re.search(how.kept, name):
            continue
        values, scales, meant = _in_fp8(layer.weight.detach(), how)
        tensors |= {f"{name}.weight": values, f"{name}.{how.scale}": scales.reshape(how.shape(*scales.shape))}
        tensors |= {f"{name}.{key}": tensor.clone() for key, tensor in how.extra.items()}
        layer.weight.data.copy_(meant)
        layer.register_forward_pre_hook(_by_group if how.block == (BLOCK, BLOCK) else _by_token)
    save_file(tensors, file)
    config = json.loads(config_file.read_text(encoding="utf-8")) | {"quantization_config": how.config}
    config_file.write_text(json.dumps(config), encoding="utf-8")
    return folder


def _in_fp8(weight: torch.Tensor, how: Format) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, scales by block, and what both stand for."""
    block = [length or size for length, size in zip(how.block, weight.shape, strict=True)]
    rows, columns = (torch.arange(size) // length for size, length in zip(weight.shape, block, strict=True))
    largest = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
    for row in range(largest.shape[0]):
        for column in range(largest.shape[1]):
            largest[row, column] = weight[rows == row][:, columns == column].abs().max()
    scales = (largest / 400).to(how.dtype)  # room for scales that are rounded
    everywhere = scales.float()[rows][:, columns]
    values = (weight / everywhere).to(torch.float8_e4m3fn)
    return values, scales, values.float() * everywhere


def _by_token(_: nn.Module, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return _through_fp8(args[0], grouped=False)


def _by_group(_: nn.Module, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return _through_fp8(args[0], grouped=True)


def _through_fp8(x: torch.Tensor, *, grouped: bool) -> torch.Tensor:
    return reference_fp8.dequantize(reference_fp8.quantize(x.flatten(0, -2), grouped=grouped)).view(x.shape)
