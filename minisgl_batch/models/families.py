"""Where the configs of the supported architectures differ: defaults, and which keys mean something.

The defaults are those of transformers. Read by `config.load_model_config`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minisgl_batch.layers.rope_config import RopeConfig, yarn_attention_factor
from minisgl_batch.models.config_file import ConfigFile
from minisgl_batch.models.gemma import gemma3_layer_types, read_gemma3
from minisgl_batch.models.moe_config import MoEConfig, no_experts, qwen_moe, read_gpt_oss, read_mixtral
from minisgl_batch.models.refusals import why_not
from minisgl_batch.text_part import MODELS_WITH_IMAGES

if TYPE_CHECKING:
    from minisgl_batch.models.config import Activation, ModelConfig


def _complete(_file: ConfigFile, config: ModelConfig) -> ModelConfig:
    return config


def _with_ministral3_rope(file: ConfigFile, config: ModelConfig) -> ModelConfig:
    if file.child("rope_parameters") or file.child("rope_scaling"):
        return config
    rope = RopeConfig(theta=1e6, type="yarn", factor=16.0, original_context_len=16384, query_growth=0.1)
    return replace(config, rope=rope)


def _with_gpt_oss_rope(file: ConfigFile, config: ModelConfig) -> ModelConfig:
    if file.child("rope_parameters") or file.child("rope_scaling"):
        return config
    factor = 32.0
    rope = RopeConfig(
        theta=config.rope.theta,
        type="yarn",
        factor=factor,
        original_context_len=4096,
        truncate=False,
        attention_factor=yarn_attention_factor(factor),
    )
    return replace(config, rope=rope)


def _silu(file: ConfigFile) -> Activation:
    file.choice("hidden_act", ("silu", "swish"), "silu")
    return "silu"


def _gelu(file: ConfigFile) -> Activation:
    file.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    return "gelu"


def _never(_file: ConfigFile) -> bool:
    return False


def _always(_file: ConfigFile) -> bool:
    return True


def _as_configured(key: str, default: bool = False) -> Callable[[ConfigFile], bool]:
    return lambda file: file.flag(key, default)


def _no_window(_file: ConfigFile, num_layers: int) -> tuple[int | None, ...]:
    return (None,) * num_layers


def _window_in_all_layers(default: int | None) -> Callable[[ConfigFile, int], tuple[int | None, ...]]:
    return lambda file, num_layers: (_window(file, default),) * num_layers


def _no_window_or_refused(file: ConfigFile, num_layers: int) -> tuple[int | None, ...]:
    if file.flag("use_sliding_window", False):
        raise file.error(
            "use_sliding_window", "isn't supported: releases of transformers differ in which layers have one"
        )
    return (None,) * num_layers


def _window_by_layer(file: ConfigFile, num_layers: int) -> tuple[int | None, ...]:
    """Qwen's rule: layers from `max_window_layers` on, unless `layer_types` says which."""
    window = _window(file, 4096) if file.flag("use_sliding_window", False) else None
    if file.data.get("layer_types") is None:
        first = file.count("max_window_layers", 28, low=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return _layer_types(file, num_layers, window)


def _window_by_layer_type(file: ConfigFile, num_layers: int) -> tuple[int | None, ...]:
    """Ministral's rule: all layers, unless `layer_types` says which."""
    window = _window(file, 4096)
    if file.data.get("layer_types") is None:
        return (window,) * num_layers
    return _layer_types(file, num_layers, window)


def _window_by_pattern(file: ConfigFile, num_layers: int) -> tuple[int | None, ...]:
    """Gemma's rule: all layers but every sixth, unless `layer_types` says which."""
    return _layer_types(file, num_layers, _window(file, 4096), gemma3_layer_types(file, num_layers))


def _window_in_every_second_layer(file: ConfigFile, num_layers: int) -> tuple[int | None, ...]:
    """gpt-oss' rule: the first layer and every second one, unless `layer_types` says which."""
    default = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
    return _layer_types(file, num_layers, _window(file, 128), default)


def _layer_types(
    file: ConfigFile, num_layers: int, window: int | None, default: list[str] | None = None
) -> tuple[int | None, ...]:
    layer_types = file.data.get("layer_types") or default
    known = ("full_attention", "sliding_attention")
    if not isinstance(layer_types, list) or len(layer_types) != num_layers or any(t not in known for t in layer_types):
        raise file.error("layer_types", f"must be a list of {num_layers} of {' and '.join(known)}")
    if window is None and "sliding_attention" in layer_types:
        raise file.error("layer_types", "names sliding_attention, but sliding_window (use_sliding_window) sets none")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def _window(file: ConfigFile, default: int | None) -> int | None:
    if file.data.get("sliding_window", default) is None:
        return None
    return file.count("sliding_window", default)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture's configs.

    `models` names published ones, for the tables of README.md and docs/models.md (`python -m tests.tables`).
    `num_kv_heads` None: as many as query heads. `head_dim` None: hidden size / heads. `local_rope_theta`: layers with a
    window have a rotary embedding of their own. `quant_methods`: of checkpoints that can be read. `complete` adds what
    only this architecture has.
    """

    models: str
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    num_kv_heads: int | None = None
    head_dim: int | None = None
    attention_bias: Callable[[ConfigFile], bool] = _never
    attention_output_bias: Callable[[ConfigFile], bool] = _never
    mlp_bias: Callable[[ConfigFile], bool] = _never
    qk_norm: bool = False
    has_sinks: bool = False
    tie_word_embeddings: bool = False
    activation: Callable[[ConfigFile], Activation] = _silu
    sliding_window: Callable[[ConfigFile, int], tuple[int | None, ...]] = _no_window
    partial_rotary: bool = False
    local_rope_theta: float | None = None
    scales_queries: bool = False
    moe: Callable[[ConfigFile, int], MoEConfig | None] = no_experts
    quant_methods: tuple[str, ...] = ()
    complete: Callable[[ConfigFile, ModelConfig], ModelConfig] = _complete


_FAMILIES = {
    "Gemma3ForCausalLM": Family(
        models="Gemma 3 that reads text alone",
        max_position_embeddings=131072,
        rope_theta=1e6,
        local_rope_theta=1e4,
        num_kv_heads=4,
        head_dim=256,
        attention_bias=_as_configured("attention_bias"),
        attention_output_bias=_as_configured("attention_bias"),
        qk_norm=True,
        tie_word_embeddings=True,
        activation=_gelu,
        sliding_window=_window_by_pattern,
        complete=read_gemma3,
    ),
    "GptOssForCausalLM": Family(
        models="gpt-oss-20b, gpt-oss-120b",
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        num_kv_heads=8,
        head_dim=64,
        attention_bias=_as_configured("attention_bias", default=True),
        attention_output_bias=_as_configured("attention_bias", default=True),
        has_sinks=True,
        sliding_window=_window_in_every_second_layer,
        moe=read_gpt_oss,
        quant_methods=("mxfp4",),
        complete=_with_gpt_oss_rope,
    ),
    "LlamaForCausalLM": Family(
        models="Llama 2, 3, 3.1, 3.2 and 3.3",
        max_position_embeddings=2048,
        attention_bias=_as_configured("attention_bias"),
        attention_output_bias=_as_configured("attention_bias"),
        mlp_bias=_as_configured("mlp_bias"),
    ),
    "MinistralForCausalLM": Family(
        models="Ministral 8B",
        max_position_embeddings=131072,
        num_kv_heads=8,
        sliding_window=_window_by_layer_type,
    ),
    "Ministral3ForCausalLM": Family(
        models="Ministral 3 that reads text alone",
        max_position_embeddings=262144,
        rms_norm_eps=1e-5,
        num_kv_heads=8,
        head_dim=128,
        sliding_window=_window_in_all_layers(None),
        scales_queries=True,
        complete=_with_ministral3_rope,
    ),
    "MistralForCausalLM": Family(
        models="Mistral 7B, Nemo, Small and Large",
        max_position_embeddings=131072,
        num_kv_heads=8,
        sliding_window=_window_in_all_layers(4096),
    ),
    "MixtralForCausalLM": Family(
        models="Mixtral",
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        num_kv_heads=8,
        sliding_window=_window_in_all_layers(None),
        moe=read_mixtral,
    ),
    "Phi3ForCausalLM": Family(
        models="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        sliding_window=_window_in_all_layers(None),
        partial_rotary=True,
    ),
    "Qwen2ForCausalLM": Family(
        models="Qwen2, Qwen2.5",
        max_position_embeddings=32768,
        num_kv_heads=32,
        attention_bias=_always,
        sliding_window=_window_by_layer,
    ),
    "Qwen3ForCausalLM": Family(
        models="Qwen3",
        max_position_embeddings=32768,
        num_kv_heads=32,
        head_dim=128,
        attention_bias=_as_configured("attention_bias"),
        attention_output_bias=_as_configured("attention_bias"),
        qk_norm=True,
        sliding_window=_window_by_layer,
    ),
    "Qwen2MoeForCausalLM": Family(
        models="Qwen1.5-MoE, Qwen2-57B-A14B",
        max_position_embeddings=32768,
        num_kv_heads=16,
        attention_bias=_as_configured("qkv_bias", default=True),
        sliding_window=_no_window_or_refused,
        moe=qwen_moe(num_experts=60, top_k=4, intermediate_size=1408, shared_intermediate_size=5632),
    ),
    "Qwen3MoeForCausalLM": Family(
        models="Qwen3-30B-A3B and other Qwen3-MoE",
        max_position_embeddings=32768,
        num_kv_heads=4,
        attention_bias=_as_configured("attention_bias"),
        attention_output_bias=_as_configured("attention_bias"),
        qk_norm=True,
        sliding_window=_no_window_or_refused,
        moe=qwen_moe(num_experts=128, top_k=8, intermediate_size=768, shared_intermediate_size=None),
    ),
}

MODELS = {architecture: family.models for architecture, family in _FAMILIES.items()} | MODELS_WITH_IMAGES
"""Architecture -> published models that have it."""
SUPPORTED_ARCHITECTURES: tuple[str, ...] = tuple(MODELS)


def read_family(file: ConfigFile) -> tuple[str, Family]:
    """The architecture that a config names, and its family.

    Raises:
        ModelError: it names none, or one that isn't supported; lists those that are.
    """
    supported = f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
    architectures = file.data.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise file.error("architectures", f"must be a list with the model's class name; {supported}")
    family = _FAMILIES.get(str(architectures[0]))
    if family is None:
        raise file.error(
            "architectures", f"{architectures[0]!r} isn't supported{why_not(str(architectures[0]))}; {supported}"
        )
    return str(architectures[0]), family
