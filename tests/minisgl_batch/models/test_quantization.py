"""Models in FP8: checkpoints in each format against transformers, weights put into FP8 here against the floats."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen3ForCausalLM
from transformers.quantizers import quantizer_finegrained_fp8

from minisgl_batch.distributed.group import SINGLE
from minisgl_batch.errors import InvalidParameterError, ModelError
from minisgl_batch.models.base import CausalLM
from minisgl_batch.models.config import ModelConfig, load_model_config
from minisgl_batch.models.registry import make_model
from minisgl_batch.models.weights import checkpoint_parts, init_dummy_weights, load_weights
from minisgl_kernels import reference_fp8
from minisgl_kernels.fp8 import Fp8Matrix
from tests.minisgl_batch.distributed.rank_pool import RankPool
from tests.minisgl_batch.models import ranks
from tests.minisgl_batch.models.contiguous import sequence_logits
from tests.minisgl_batch.models.fp8_checkpoints import FORMATS, compressed, save_fp8
from tests.minisgl_batch.models.hf import hf_logits, random_model, random_sequences, save

SIZES = {
    "hidden_size": 136,  # a block and a part of one
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,  # so k and v have a block each, in the middle of a merged weight
    "intermediate_size": 256,
    "num_hidden_layers": 2,
}

FLIPS = 0.05  # mostly 1e-6, but what lies between two numbers of FP8 is rounded the other way now and then


def loaded(folder: Path, config: ModelConfig | None = None) -> CausalLM:
    model = make_model(config or load_model_config(folder), SINGLE, torch.float32, torch.device("cpu"))
    load_weights(model, folder)
    return model


def assert_near(got: list[torch.Tensor], want: list[torch.Tensor], tolerance: float) -> None:
    a, b = torch.cat(got), torch.cat(want)
    error = float((a - b).norm() / b.norm())
    assert error < tolerance


@pytest.mark.parametrize("name", FORMATS)
@torch.inference_mode()
def test_checkpoints_compute_what_their_weights_stand_for(name: str, tmp_path: Path) -> None:
    family = random.choice(("qwen3", "qwen2", "llama"))
    reference = random_model(family, **SIZES)
    folder = save_fp8(reference, tmp_path, FORMATS[name])
    sequences = random_sequences(reference.config.vocab_size, [1, 9, 20])
    got = sequence_logits(loaded(folder), sequences, [1, 4, 20])
    assert_near(got, hf_logits(reference, sequences), FLIPS)


@pytest.mark.parametrize("name", [name for name in FORMATS if "blocks" not in name])
@torch.inference_mode()
def test_layers_that_checkpoints_merge_share_their_scales(name: str, tmp_path: Path) -> None:
    """And rows take their scales along when a head's are put into another order."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "partial_rotary_factor": 0.75}
    reference = random_model("phi3", num_hidden_layers=2, **sizes)
    folder = save_fp8(reference, tmp_path, FORMATS[name])
    sequences = random_sequences(reference.config.vocab_size, [9, 20])
    assert_near(sequence_logits(loaded(folder), sequences, [4, 20]), hf_logits(reference, sequences), FLIPS)


@torch.inference_mode()
def test_weights_are_those_that_transformers_reads(tmp_path: Path) -> None:
    folder = save_fp8(random_model("qwen3", **(SIZES | {"hidden_size": 256})), tmp_path, FORMATS["fp8, blocks"])
    ours = loaded(folder).layers[1].mlp.gate_up_proj.weight
    with patch.object(quantizer_finegrained_fp8, "is_accelerate_available", return_value=True):  # not needed on a CPU
        theirs = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).model.layers[1].mlp
    weight = reference_fp8.dequantize(Fp8Matrix(ours.values, ours.scales.T, torch.float32))
    assert torch.equal(weight, torch.cat([theirs.gate_proj.weight, theirs.up_proj.weight]))


@pytest.mark.parametrize(("name", "tolerance"), [("fp8, blocks", FLIPS), ("compressed-tensors, channels", 0.15)])
def test_ranks_share_weights_with_their_scales(
    name: str, tolerance: float, rank_pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    """Where a token has one scale, each rank has one for its share of a split input: near, but not the same.

    The second rank's keys and values begin in the middle of a block and end in another.
    """
    reference = random_model("qwen3", **(SIZES | {"hidden_size": 256, "head_dim": 192, "tie_word_embeddings": True}))
    folder = save_fp8(reference, tmp_path, FORMATS[name])
    sequences = random_sequences(reference.config.vocab_size, [9, 20])
    answers = rank_pool(2).run(ranks.logits_of_checkpoint, folder, sequences, [4, 20])
    assert_near(answers[0][1], hf_logits(reference, sequences), tolerance)


def test_ranks_cannot_cut_blocks(tmp_path: Path) -> None:
    reference = random_model("llama", **(SIZES | {"intermediate_size": 384}))
    config = load_model_config(save_fp8(reference, tmp_path, FORMATS["fp8, blocks"]))
    with pytest.raises(InvalidParameterError, match=r"2 ranks can't share a width of 384 .* 192 must be a multiple"):
        config.check_tp_size(2)
    config.check_tp_size(1)


@torch.inference_mode()
def test_weights_put_into_fp8_are_near_the_floats(tmp_path: Path) -> None:
    reference = random_model(random.choice(("qwen3", "llama", "gemma3")), **SIZES)
    folder = save(reference, tmp_path)
    sequences = random_sequences(reference.config.vocab_size, [9, 30])
    model = loaded(folder, load_model_config(folder).quantized(at_load=False))
    assert model.layers[0].mlp.down_proj.weight.values.dtype == torch.float8_e4m3fn
    assert model.lm_head.weight.dtype == torch.float32
    want = hf_logits(reference, sequences)
    got = sequence_logits(model, sequences, [4, 30])
    assert_near(got, want, 0.2)
    # By the same rules as from checkpoints: channels that are scaled by their own largest number.
    for layer in reference.model.layers:
        for linear in (module for module in layer.modules() if isinstance(module, nn.Linear)):
            linear.weight.data.copy_(reference_fp8.dequantize(reference_fp8.quantize(linear.weight, grouped=False)))
            linear.register_forward_pre_hook(
                lambda _, args: reference_fp8.dequantize(reference_fp8.quantize(args[0][0], grouped=False)).view(
                    args[0].shape
                )
            )
    assert_near(got, hf_logits(reference, sequences), FLIPS)


@torch.inference_mode()
def test_dummy_weights_need_no_scales_of_a_checkpoint(tmp_path: Path, seed: int) -> None:
    folder = save_fp8(random_model("llama", **SIZES), tmp_path, FORMATS["fp8, blocks"])
    config = load_model_config(folder).quantized(at_load=True)
    model = make_model(config, SINGLE, torch.float32, torch.device("cpu"))
    assert all(part.name != "weight_scale" for part in checkpoint_parts(model).values())
    init_dummy_weights(model, seed)
    weight = model.layers[1].mlp.down_proj.weight
    values = reference_fp8.dequantize(Fp8Matrix(weight.values, weight.scales.T, torch.float32))
    assert abs(float(values.std()) - 0.02) < 0.001
    assert weight.scales.shape == (2, SIZES["hidden_size"])


def fp8(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "fp8"} | changes


def grouped(**changes: Any) -> dict[str, Any]:
    config = compressed("channel", "token")
    config["config_groups"]["group_0"] |= changes
    return config


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other blocks": (fp8(weight_block_size=[64, 64]), r"weight_block_size: only \[128, 128\] is supported"),
    "another type": (fp8(fmt="e5m2"), r"fmt: 'e5m2' isn't supported"),
    "scales of 8 bits": (fp8(weight_block_size=[128, 128], scale_fmt="ue8m0"), r"scale_fmt: 'ue8m0' isn't supported"),
    "embeddings": (fp8(modules_to_convert=["embed_tokens"]), r"modules_to_convert: isn't supported"),
    "no list": (fp8(modules_to_not_convert="lm_head"), r"modules_to_not_convert: must be a list of layers"),
    "no expression": (fp8(ignored_layers=["a["]), r"ignored_layers: .* is no regular expression"),
    "an expression without an end": (
        compressed("channel", "token", ignore=[r"re:(?:(.)|(.)\2?)+[^j]$"]),
        r"ignore: an expression takes too long to match model\.layers\.0\.self_attn",
    ),
    "int8": (compressed("channel", "token", format="int-quantized"), r"format: only float-quantized is supported"),
    "weights alone": (grouped(input_activations=None), r"group_0: both weights and input_activations must be"),
    "some layers": (grouped(targets=["re:.*mlp.*"]), r"targets: must be \['Linear'\]"),
    "4 bits": (
        grouped(weights={"num_bits": 4, "type": "float", "strategy": "channel"}),
        r"config_groups\.group_0\.weights\.num_bits: must be 8, got 4",
    ),
    "groups without blocks": (compressed("channel", "group"), r"strategy: group is supported for 128 channels and"),
    "rotated weights": (
        compressed("channel", "token", transform_config={"config_groups": {"R1": {"type": "hadamard"}}}),
        "transform_config: isn't supported",
    ),
    "some of what is merged": (
        fp8(modules_to_not_convert=["model.layers.1.self_attn.k_proj"]),
        r"modules_to_not_convert: model\.layers\.1\.self_attn\.k_proj isn't in FP8, but other layers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_its_key(case: str, tmp_path: Path) -> None:
    config, message = REFUSED[case]
    save(random_model("llama", **SIZES), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    with pytest.raises(ModelError, match=f"{re.escape(str(file))}: quantization_config.*{message}"):
        make_model(load_model_config(tmp_path), SINGLE, torch.float32)


def test_experts_are_refused(tmp_path: Path) -> None:
    file = save(random_model("qwen3_moe"), tmp_path) / "config.json"
    with pytest.raises(InvalidParameterError, match="quantization: mixtures of experts aren't supported in FP8"):
        load_model_config(tmp_path).quantized(at_load=False)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": fp8()}))
    with pytest.raises(ModelError, match="quantization_config: checkpoints of experts in FP8 aren't supported: use"):
        load_model_config(tmp_path)


KEY = "model.layers.0.mlp.up_proj.weight"
FAULTS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "floats": (lambda t: t.update({KEY: t[KEY].float()}), "is stored as F32, but by .* it has to be in FP8"),
    "a head in FP8": (
        lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}),
        "lm_head.weight is stored as F8_E4M3, but by .* floats",
    ),
    "no scales": (lambda t: t.pop(f"{KEY}_scale_inv"), r"lacks layers\.0\.mlp\.up_proj\.weight_scale"),
    "scales of another shape": (
        lambda t: t.update({f"{KEY}_scale_inv": torch.ones(2, 3)}),
        r"up_proj\.weight_scale_inv has the shape \[2, 3\], but config.json asks for \[2, 2\]",
    ),
    "scales under two names": (
        lambda t: t.update({f"{KEY}_scale": torch.ones(2, 2)}),
        r"up_proj\.weight_scale_inv, but .* holds model\.layers\.0\.mlp\.up_proj\.weight_scale: both are layers",
    ),
    "a scale that is no number": (
        lambda t: t[f"{KEY}_scale_inv"].view(-1)[3:].fill_(random.choice((math.nan, math.inf, -1.0))),
        r"model\.layers\.0\.mlp\.up_proj\.weight_scale_inv has scales that are negative, infinite or no numbers",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_tensor_is_named(fault: str, tmp_path: Path) -> None:
    change, message = FAULTS[fault]
    save_fp8(random_model("llama", **SIZES, tie_word_embeddings=False), tmp_path, FORMATS["fp8, blocks"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(ModelError, match=message):
        loaded(tmp_path)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_a_weight_in_fp8_that_is_no_number_is_named(byte: int, tmp_path: Path) -> None:
    save_fp8(random_model("llama", **SIZES), tmp_path, FORMATS[random.choice(list(FORMATS))])
    file, key = tmp_path / "model.safetensors", "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(file)
    flat = tensors[key].view(torch.uint8).view(-1)
    flat[random.randrange(len(flat))] = byte
    save_file(tensors, file)
    with pytest.raises(ModelError, match=rf"model\.safetensors: {re.escape(key)} holds NaN or infinite numbers"):
        loaded(tmp_path)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_named_when_it_is_put_into_fp8(number: float, tmp_path: Path) -> None:
    file = save(random_model("llama", **SIZES), tmp_path) / "model.safetensors"
    tensors = load_file(file)
    tensors[KEY].view(-1)[random.randrange(tensors[KEY].numel())] = number
    save_file(tensors, file)
    with pytest.raises(ModelError, match=rf"model\.safetensors: {re.escape(KEY)} holds NaN or infinite numbers"):
        loaded(tmp_path, load_model_config(tmp_path).quantized(at_load=False))


def test_scales_of_channels_are_no_row(tmp_path: Path) -> None:
    save_fp8(random_model("llama", **SIZES), tmp_path, FORMATS["compressed-tensors, channels"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    key = "model.layers.1.mlp.up_proj.weight_scale"
    save_file(tensors | {key: tensors[key].T.contiguous()}, file)
    with pytest.raises(ModelError, match=r"up_proj\.weight_scale has the shape \[1, 256\], but .* \[256, 1\]"):
        loaded(tmp_path)
