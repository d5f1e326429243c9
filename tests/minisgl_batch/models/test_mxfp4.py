"""Checkpoints whose experts are in MXFP4, against transformers, which unpacks them in its own way."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from minisgl_batch.distributed.group import SINGLE
from minisgl_batch.errors import ModelError
from minisgl_batch.models.config import load_model_config
from minisgl_batch.models.mxfp4 import unpack
from minisgl_batch.models.registry import make_model
from minisgl_batch.models.weights import load_weights
from tests.minisgl_batch.distributed.rank_pool import RankPool
from tests.minisgl_batch.models import ranks
from tests.minisgl_batch.models.hf import hf_logits, random_model, random_sequences, save

Tensors = dict[str, torch.Tensor]
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
KEY = "model.layers.1.mlp.experts.{}".format
WEIGHTS = "model.safetensors"


def random_packed(num_experts: int, size_in: int, size_out: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of any bytes, and scales that make numbers of a model's size of them."""
    blocks = torch.randint(256, (num_experts, size_out, size_in // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(121, 126, blocks.shape[:-1], dtype=torch.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint as it is published; a rank of 4 gets a half of a block."""
    sizes = {"hidden_size": 96, "intermediate_size": 64, "num_experts": 3, "num_experts_per_tok": 2}
    model = random_model("gpt_oss", num_hidden_layers=2, **sizes, **HEADS)
    save(model, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = random_packed(*tensors.pop(name).shape)
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def theirs(folder: Path, sequences: list[list[int]]) -> list[torch.Tensor]:
    model = GptOssForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        quantization_config=Mxfp4Config(dequantize=True),
    )
    return hf_logits(model, sequences)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_logits_equal_those_of_transformers(size: int, rank_pool: Callable[[int], RankPool], folder: Path) -> None:
    sequences, cuts = random_sequences(load_model_config(folder).vocab_size, [9, 1, 14]), [5, 1, 13]
    if size == 1:
        ours = ranks.logits_of_checkpoint(SINGLE, folder, sequences, cuts)[1]
    else:
        ours = rank_pool(size).run(ranks.logits_of_checkpoint, folder, sequences, cuts)[0][1]
    for got, want in zip(ours, theirs(folder, sequences), strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_every_byte_and_scale_is_unpacked_as_by_transformers() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 254, -1, -1)
    scales = torch.arange(254, dtype=torch.uint8).view(1, 254, 1).expand(-1, -1, 16)
    want = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    assert torch.equal(unpack(blocks, scales), want)


def narrow(tensors: Tensors) -> None:
    tensors[KEY("down_proj_blocks")], tensors[KEY("down_proj_scales")] = random_packed(3, 32, 96)


def load(folder: Path) -> None:
    load_weights(make_model(load_model_config(folder), SINGLE, torch.float32, torch.device("cpu")), folder)


FAULTS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "no scales": (lambda t: t.pop(KEY("down_proj_scales")), r"down_proj_blocks needs scales as U8, there are none"),
    "no blocks": (lambda t: t.pop(KEY("down_proj_blocks")), r"lacks layers\.1\.mlp\.experts\.down_proj:"),
    "scales of another type": (
        lambda t: t.update({KEY("down_proj_scales"): torch.ones(3, 96, 2)}),
        r"down_proj_blocks needs scales as U8, there are F32 in .*model\.safetensors",
    ),
    "scales of another shape": (
        lambda t: t.update({KEY("down_proj_scales"): t[KEY("down_proj_scales")][:, 1:].clone()}),
        r"down_proj_blocks has the shape \[3, 96, 2, 16\] and its scales \[3, 95, 2\]",
    ),
    "another width": (
        narrow,
        r"down_proj_blocks has the shape \[3, 32, 96\], but config\.json asks for \[3, 64, 96\]",
    ),
    "a scale that is no number": (
        lambda t: t[KEY("gate_up_proj_scales")].view(-1)[-1:].fill_(0xFF),
        r"model\.safetensors: \S+gate_up_proj_blocks holds NaN or infinite numbers",
    ),
    "another tensor": (
        lambda t: t.update({"model.layers.0.self_attn.sinks": torch.ones(8, dtype=torch.uint8)}),
        r"self_attn\.sinks is stored as U8; quantized",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_tensor_is_named(fault: str, folder: Path) -> None:
    change, message = FAULTS[fault]
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ModelError, match=message) as caught:
        load(folder)
    assert re.search(re.escape(str(folder)), str(caught.value))


def test_blocks_and_scales_in_different_files(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    save_file({key: tensor for key, tensor in tensors.items() if "scales" in key}, folder / "a.safetensors")
    save_file({key: tensor for key, tensor in tensors.items() if "scales" not in key}, folder / "b.safetensors")
    load(folder)
