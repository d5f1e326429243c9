"""config.json in both spellings, defaults, and refusals that name file, key and what is supported."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minisgl_batch.errors import InvalidParameterError, ModelError
from minisgl_batch.layers.rope_config import RopeConfig
from minisgl_batch.models.config import ModelConfig, load_model_config
from minisgl_batch.models.families import SUPPORTED_ARCHITECTURES
from minisgl_batch.models.registry import model_class
from minisgl_batch.text_part import MODELS_WITH_IMAGES
from tests.minisgl_batch.models.hf import FAMILIES, random_model, save

MINIMAL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 96,
    "vocab_size": 100,
}


def parse(folder: Path, *removed: str, **changes: Any) -> ModelConfig:
    data = {key: value for key, value in (MINIMAL | changes).items() if key not in removed}
    (folder / "config.json").write_text(json.dumps(data))
    return load_model_config(folder)


def parse_as(folder: Path, family: str, **changes: Any) -> ModelConfig:
    return parse(folder, architectures=[f"{family}ForCausalLM"], **changes)


def test_what_is_missing_has_the_defaults_of_transformers(tmp_path: Path) -> None:
    assert parse(tmp_path) == ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=64,
        num_layers=4,
        num_heads=8,
        num_kv_heads=8,
        head_dim=8,
        intermediate_size=96,
        vocab_size=100,
        rms_norm_eps=1e-6,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_window=(None,) * 4,
        rope=RopeConfig(theta=10000.0),
        attention_scale=8**-0.5,
        dtype="float32",
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_equal_those_of_transformers_config_classes(family: str, tmp_path: Path) -> None:
    config_class, model = FAMILIES[family]
    heads = {"num_attention_heads": 32, "hidden_size": 1024}
    reference = config_class(**heads)
    ours = parse(tmp_path, architectures=[model.__name__], **heads)
    assert ours.num_kv_heads == reference.num_key_value_heads
    assert ours.head_dim == (getattr(reference, "head_dim", None) or 32)
    assert ours.rms_norm_eps == reference.rms_norm_eps
    assert ours.max_position_embeddings == reference.max_position_embeddings
    assert ours.tie_word_embeddings == reference.tie_word_embeddings
    if family == "ministral3":
        theirs = reference.rope_parameters
        assert (ours.rope.type, ours.rope.theta) == (theirs["rope_type"], theirs["rope_theta"])
        assert (ours.rope.factor, ours.rope.query_growth) == (theirs["factor"], theirs["llama_4_scaling_beta"])
        assert ours.rope.original_context_len == theirs["original_max_position_embeddings"]
    if family == "gpt_oss":
        theirs = reference.rope_parameters
        assert (ours.rope.type, ours.rope.theta) == (theirs["rope_type"], theirs["rope_theta"])
        assert (ours.rope.factor, ours.rope.truncate) == (theirs["factor"], theirs["truncate"])
        assert ours.rope.original_context_len == theirs["original_max_position_embeddings"]
        assert ours.sliding_window == (reference.sliding_window, None) * 2
        assert ours.attention_bias is ours.attention_output_bias is reference.attention_bias
    if family in (
        "llama",
        "ministral",
        "ministral3",
        "mistral",
        "phi3",
    ):  # older Qwen configs keep a window that they don't use
        assert ours.sliding_window[0] == getattr(reference, "sliding_window", None)


@pytest.mark.parametrize("family", FAMILIES)
def test_biases_and_norms_are_those_of_the_architecture(family: str, tmp_path: Path) -> None:
    for flags in ({}, {"attention_bias": True}, {"mlp_bias": True}):
        reference = random_model(family, **flags)
        names = {name for name, _ in reference.named_parameters()}
        config = load_model_config(save(reference, tmp_path))
        assert config.attention_bias == ("model.layers.0.self_attn.k_proj.bias" in names)
        assert config.attention_output_bias == ("model.layers.0.self_attn.o_proj.bias" in names)
        assert config.mlp_bias == ("model.layers.0.mlp.down_proj.bias" in names)
        assert config.qk_norm == ("model.layers.0.self_attn.q_norm.weight" in names)


@pytest.mark.parametrize(
    ("rope_scaling", "want"),
    [
        (None, RopeConfig(theta=5e5)),
        ({"rope_type": "default"}, RopeConfig(theta=5e5)),
        ({"type": "linear", "factor": 2}, RopeConfig(theta=5e5, type="linear", factor=2.0)),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.5,
                "high_freq_factor": 5.0,
                "original_max_position_embeddings": 256,
            },
            RopeConfig(
                theta=5e5,
                type="llama3",
                factor=8.0,
                original_context_len=256,
                low_freq_factor=1.5,
                high_freq_factor=5.0,
            ),
        ),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
            RopeConfig(
                theta=5e5,
                type="yarn",
                factor=4.0,
                original_context_len=512,
                attention_factor=0.1 * math.log(4.0) + 1.0,
            ),
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.9, "beta_fast": 16, "truncate": False},
            RopeConfig(
                theta=5e5,
                type="yarn",
                factor=4.0,
                original_context_len=2048,
                beta_fast=16.0,
                truncate=False,
                attention_factor=0.9,
            ),
        ),
        (
            {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024, "mscale": 2.0},
            RopeConfig(
                theta=5e5,
                type="yarn",
                factor=2.0,
                original_context_len=1024,
                attention_factor=0.1 * math.log(2.0) + 1.0,
            ),
        ),
    ],
)
def test_rotary_parameters_in_both_spellings(
    rope_scaling: dict[str, Any] | None, want: RopeConfig, tmp_path: Path
) -> None:
    old = parse(tmp_path, rope_theta=5e5, rope_scaling=rope_scaling, torch_dtype="bfloat16")
    new = parse(tmp_path, rope_parameters={"rope_theta": 5e5} | (rope_scaling or {}), dtype="bfloat16")
    assert old == new
    assert old.rope == want
    assert old.dtype == "bfloat16"


def test_gemma_has_a_rope_for_either_type_of_layer_in_both_spellings(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    old = parse_as(tmp_path, "Gemma3", rope_theta=5e5, rope_local_base_freq=2e4, rope_scaling=linear)
    nested = {"full_attention": linear | {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 2e4}}
    new = parse_as(tmp_path, "Gemma3", rope_parameters=nested)
    assert old == new
    assert old.rope == RopeConfig(theta=5e5, type="linear", factor=8.0)
    assert old.local_rope == RopeConfig(theta=2e4)
    assert old.context_len == 131072  # with the factor in it
    plain = parse_as(tmp_path, "Gemma3")
    assert (plain.rope, plain.local_rope) == (RopeConfig(theta=1e6), RopeConfig(theta=1e4))


def test_yarn_and_linear_scaling_lengthen_the_context(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert parse(tmp_path, rope_scaling=yarn, max_position_embeddings=512).context_len == 2048
    assert parse(tmp_path, rope_scaling=yarn, max_position_embeddings=4096).context_len == 4096
    assert parse(tmp_path, max_position_embeddings=512).context_len == 512
    linear = {"rope_type": "linear", "factor": 4.0}
    assert parse(tmp_path, rope_scaling=linear, max_position_embeddings=512).context_len == 2048
    llama3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    assert parse(tmp_path, rope_scaling=llama3, max_position_embeddings=512).context_len == 512


@pytest.mark.parametrize(
    ("family", "keys", "windows"),
    [
        ("Mistral", {}, (4096,) * 4),
        ("Mistral", {"sliding_window": None}, (None,) * 4),
        ("Mistral", {"sliding_window": 9}, (9,) * 4),
        ("Ministral", {}, (4096,) * 4),
        ("Ministral", {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2}, (9, None) * 2),
        ("Ministral", {"sliding_window": None, "layer_types": ["full_attention"] * 4}, (None,) * 4),
        ("Llama", {"sliding_window": 9}, (None,) * 4),
        ("Gemma3", {}, (4096,) * 4),
        ("Gemma3", {"sliding_window": 9, "sliding_window_pattern": 2}, (9, None) * 2),
        ("Gemma3", {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"] * 2}, (None, 9) * 2),
        ("Phi3", {}, (None,) * 4),
        ("Phi3", {"sliding_window": 9}, (9,) * 4),
        ("Qwen2", {"sliding_window": 9}, (None,) * 4),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 9}, (None,) * 4),  # from layer 28 on
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, (None, 9, 9, 9)),
        ("Qwen3", {"use_sliding_window": True, "max_window_layers": 0}, (4096,) * 4),
        (
            "Qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (9, None, 9, None),
        ),
        ("Qwen3", {"layer_types": ["full_attention"] * 4, "sliding_window": None}, (None,) * 4),
    ],
)
def test_windows_per_layer(family: str, keys: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path) -> None:
    assert parse_as(tmp_path, family, num_key_value_heads=8, **keys).sliding_window == windows


def test_a_window_that_no_sequence_outgrows_is_none(tmp_path: Path) -> None:
    config = parse_as(tmp_path, "Mistral", num_key_value_heads=8, sliding_window=9, max_position_embeddings=10)
    assert [config.window(layer) for layer in range(4)] == [9] * 4
    assert config.longest_window is not None
    short = config.limited_to(9)
    assert [short.window(layer) for layer in range(4)] == [None] * 4
    assert short.longest_window is None
    assert short.context_len == 9


def test_explicit_nulls_mean_as_many_kv_heads_as_heads(tmp_path: Path) -> None:
    config = parse_as(tmp_path, "Mistral", num_key_value_heads=None, head_dim=None)
    assert (config.num_kv_heads, config.head_dim) == (8, 8)


GEMMA = {"architectures": ["Gemma3ForCausalLM"]}
PHI = {"architectures": ["Phi3ForCausalLM"]}
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown architecture": ({"architectures": ["GPT2LMHeadModel"]}, r"architectures: 'GPT2LMHeadModel'.*Qwen3For"),
    "no architecture": ({"architectures": None}, r"architectures: must be a list.*supported are Gemma3ForCausalLM"),
    "quantized": ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config: .*awq.*bfloat16"),
    "float8": ({"torch_dtype": "float8_e4m3fn"}, r"torch_dtype: 'float8_e4m3fn'.*supported are float32"),
    "dynamic rope": ({"rope_scaling": {"type": "dynamic", "factor": 2}}, r"rope_scaling\.type: 'dynamic'.*yarn"),
    "longrope without factors": (
        {"rope_parameters": {"rope_type": "longrope"}},
        r"rope_parameters\.short_factor: is missing",
    ),
    "longrope of another size": (
        {"rope_scaling": {"type": "su", "short_factor": [1, 1, 1, 1], "long_factor": [1, 2]}},
        r"rope_scaling\.long_factor: must be a list of 4 numbers, got 2",
    ),
    "longrope of no numbers": (
        {"rope_scaling": {"type": "su", "short_factor": [1, 0, 1, 1]}},
        r"rope_scaling\.short_factor: must be a list of numbers greater than 0",
    ),
    "no rope factor": ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor: is missing"),
    "rope factor 0": ({"rope_scaling": {"type": "linear", "factor": 0}}, r"rope_scaling\.factor: .*between 0\.001"),
    "no llama3 bound": ({"rope_scaling": {"type": "llama3", "factor": 2}}, r"rope_scaling\.low_freq_factor: is miss"),
    "llama3 bounds swapped": (
        {"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1}},
        r"high_freq_factor: must be greater",
    ),
    "rope per layer type": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        r"rope_parameters\.full_attention: .*per layer type",
    ),
    "partial rope": ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor: rotating a part"),
    "odd part": (PHI | {"partial_rotary_factor": 0.4}, r"partial_rotary_factor: 0\.4 of 8 dimensions isn't an even"),
    "more than a head": (
        PHI | {"rope_parameters": {"partial_rotary_factor": 1.5}},
        r"rope_parameters\.partial_rotary_factor: 1\.5 of 8",
    ),
    "theta": ({"rope_theta": 0}, r"rope_theta: must be greater than 1"),
    "other activation": ({"hidden_act": "gelu"}, r"hidden_act: 'gelu'.*silu"),
    "kv heads": ({"num_key_value_heads": 3}, r"num_key_value_heads: 3 doesn't divide the 8"),
    "odd head_dim": ({"head_dim": 7}, r"head_dim: must be even"),
    "gemma's softcap": (GEMMA | {"final_logit_softcapping": 30.0}, r"final_logit_softcapping: softcapping isn't"),
    "gemma's encoder": (GEMMA | {"use_bidirectional_attention": True}, r"use_bidirectional_attention: .*see later"),
    "gemma's activation": (GEMMA | {"hidden_activation": "relu"}, r"hidden_activation: 'relu'.*gelu_pytorch_tanh"),
    "gemma's scalar": (GEMMA | {"query_pre_attn_scalar": 0}, r"query_pre_attn_scalar: must be greater than 0"),
    "gemma's local theta": (GEMMA | {"rope_local_base_freq": 1}, r"rope_local_base_freq: must be greater than 1"),
    "gemma without a window": (GEMMA | {"sliding_window": None}, r"layer_types: names sliding_attention, but"),
    "scaled queries": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2, "llama_4_scaling_beta": 0.1}},
        r"rope_parameters\.llama_4_scaling_beta: scaling queries by position isn't supported",
    ),
    "text for a number": ({"hidden_size": "64"}, r"hidden_size: must be a whole number.*'64'"),
    "text for a flag": ({"tie_word_embeddings": "no"}, r"tie_word_embeddings: must be true or false"),
    "list for rope": ({"rope_scaling": [1]}, r"rope_scaling: must be an object"),
    "layer_types too short": (
        {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 8, "layer_types": ["full_attention"]},
        r"layer_types: must be a list of 4",
    ),
    "window without a size": (
        {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 8, "layer_types": ["sliding_attention"] * 4},
        r"layer_types: .*use_sliding_window",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_file_and_key(fault: str, tmp_path: Path) -> None:
    changes, message = FAULTS[fault]
    with pytest.raises(ModelError, match=message) as caught:
        parse(tmp_path, **changes)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")


@pytest.mark.parametrize("key", [key for key in MINIMAL if key != "architectures"])
def test_sizes_must_be_there(key: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"config.json: {key}: is missing"):
        parse(tmp_path, key)


def test_a_broken_or_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"can't read .*config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": ')
    with pytest.raises(ModelError, match=r"can't read .*config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold a JSON object, not list"):
        load_model_config(tmp_path)


def test_group_sizes_are_checked_without_a_model(tmp_path: Path) -> None:
    config = parse(tmp_path, num_key_value_heads=2)
    for size in (1, 2, 4, 8):
        config.check_tp_size(size)
    assert [config.num_kv_heads_per_rank(size) for size in (1, 2, 4, 8)] == [2, 1, 1, 1]
    with pytest.raises(InvalidParameterError, match=r"valid sizes: 1, 2, 4, 8$"):
        config.check_tp_size(3)


def test_every_architecture_that_is_read_has_a_module() -> None:
    of_text = [name for name in SUPPORTED_ARCHITECTURES if name not in MODELS_WITH_IMAGES]  # these run as one of text
    for architecture in of_text:
        assert model_class(architecture).__name__ == "DenseModel"
    with pytest.raises(ModelError, match=f"'OPTForCausalLM'.*{', '.join(of_text)}"):
        model_class("OPTForCausalLM")


def test_reading_a_config_needs_no_torch() -> None:
    code = "import sys, minisgl_batch.models.config; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("hidden_size", 10**400),
        ("rms_norm_eps", 10**400),
        ("rope_theta", 1e308),
        ("rope_scaling.factor", {"type": "linear", "factor": 1e308}),
        ("rope_scaling.factor", {"type": "linear", "factor": 1e-320}),
        ("rope_scaling.beta_fast", {"type": "yarn", "factor": 2.0, "beta_fast": 1e-320}),
        (
            "rope_scaling.original_max_position_embeddings",
            {"type": "longrope", "factor": 2.0, "original_max_position_embeddings": 1},
        ),
    ],
)
def test_numbers_that_no_model_has_are_named(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ModelError, match=f"json: {re.escape(key)}: must be a .*number between") as caught:
        parse(tmp_path, **{key.partition(".")[0]: value})
    assert len(str(caught.value)) < 500
