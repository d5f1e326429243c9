"""What a model's config.json says, as one frozen record for all architectures.

Reads the file itself, in the spellings of transformers 4.5x and 5.x, with the defaults that transformers has for keys
that are missing. Knows nothing of torch. Called by the engine and by whoever needs a model's context length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from minisgl_batch.layers.rope_config import RopeConfig
from minisgl_batch.layers.sharding import check_tp_size
from minisgl_batch.models.config_file import ConfigFile
from minisgl_batch.models.gemma import gemma3_layer_types, read_gemma3
from minisgl_batch.models.moe_config import MoEConfig, no_experts, qwen_moe, read_mixtral
from minisgl_batch.models.refusals import refuse_unsupported, why_not
from minisgl_batch.models.rope import read_local_rope, read_rope

Activation = Literal["silu", "gelu"]
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer.

    Attributes:
        architecture: the checkpoint's class name in transformers.
        intermediate_size: width of dense MLPs.
        max_position_embeddings: the context length that the checkpoint states; see `context_len`.
        attention_bias: query, key and value projections have a bias.
        attention_output_bias: so has the output projection.
        qk_norm: queries and keys are normalised per head.
        sliding_window: per layer, how many tokens back a token sees (itself included); None sees all.
        rope: of all layers, or of those without a window where `local_rope` is that of the others.
        activation: of MLPs; "gelu" is the approximation by tanh.
        attention_scale: factor on q·k.
        embedding_scale: factor on embedded tokens.
        norm_offset: what is added to norms' weights.
        has_post_norms: what attention and MLP give is normalised too, before it is added.
        moe: None: all MLPs are dense.
        dtype: what the checkpoint was saved in: "float32", "bfloat16" or "float16".
        max_len: no sequence is longer, in tokens; None: nothing is known but the context.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: tuple[int | None, ...]
    rope: RopeConfig
    local_rope: RopeConfig | None = None
    activation: Activation = "silu"
    attention_scale: float
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    has_post_norms: bool = False
    moe: MoEConfig | None = None
    dtype: str
    max_len: int | None = None

    @property
    def context_len(self) -> int:
        """The longest sequence that the model can take, or is asked to, in tokens."""
        if self.max_len is not None:
            return self.max_len
        # The common recipes for longer contexts add the scaling without raising max_position_embeddings.
        if self.rope.type == "yarn":
            return max(self.max_position_embeddings, round(self.rope.original_context_len * self.rope.factor))
        if self.rope.type == "linear" and self.local_rope is None:  # Gemma's configs do raise it
            return round(self.max_position_embeddings * self.rope.factor)
        return self.max_position_embeddings

    @property
    def fits_float16(self) -> bool:
        """Whether float16 holds the activations; Gemma's grow too large."""
        return not self.has_post_norms

    def limited_to(self, max_len: int) -> ModelConfig:
        """For sequences of at most `max_len` tokens, which is no more than the context."""
        return replace(self, max_len=max_len)

    def window(self, layer: int) -> int | None:
        """How many tokens back a token sees in a layer; None where that are all of the longest sequence."""
        window = self.sliding_window[layer]
        return None if window is None or window >= self.context_len else window

    @property
    def has_windows(self) -> bool:
        """Whether some layer has one."""
        return any(self.window(layer) is not None for layer in range(self.num_layers))

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer's MLP is a mixture of experts."""
        return self.moe is not None and self.moe.is_sparse[layer]

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """Of all kinds of MLPs and experts that the layers have."""
        moe = self.moe
        if moe is None:
            return (self.intermediate_size,)
        dense = () if all(moe.is_sparse) else (self.intermediate_size,)
        shared = () if moe.shared_intermediate_size is None else (moe.shared_intermediate_size,)
        return (*dense, moe.intermediate_size, *shared)

    def num_kv_heads_per_rank(self, tp_size: int) -> int:
        """KV heads that each rank of a group holds; more in all than the model has when they are replicated."""
        return max(1, self.num_kv_heads // tp_size)

    def check_tp_size(self, tp_size: int) -> None:
        """Refuse a tensor-parallel group that can't share this model.

        Raises:
            InvalidParameterError: lists the sizes that work.
        """
        check_tp_size(tp_size, self.num_heads, self.num_kv_heads, *self.mlp_widths)


def load_model_config(path: Path) -> ModelConfig:
    """Read `path`/config.json.

    Raises:
        ModelError: the file is missing, broken or lacks a key, or asks for something that isn't supported: names the
            file, the key and what is supported.
    """
    file = ConfigFile.read(path / "config.json")
    refuse_unsupported(file)
    architecture, family = _family(file)
    num_layers = file.count("num_hidden_layers")
    num_heads = file.count("num_attention_heads")
    hidden_size = file.count("hidden_size")
    head_dim = file.count("head_dim", family.head_dim or hidden_size // num_heads)
    max_position_embeddings = file.count("max_position_embeddings", family.max_position_embeddings)
    config = ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(file, family, num_heads),
        head_dim=head_dim,
        intermediate_size=file.count("intermediate_size"),
        vocab_size=file.count("vocab_size"),
        rms_norm_eps=file.number("rms_norm_eps", family.rms_norm_eps),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=file.flag("tie_word_embeddings", family.tie_word_embeddings),
        attention_bias=family.attention_bias(file),
        attention_output_bias=family.attention_output_bias(file),
        mlp_bias=family.mlp_bias(file),
        qk_norm=family.qk_norm,
        sliding_window=family.sliding_window(file, num_layers),
        rope=read_rope(
            file,
            head_dim,
            max_position_embeddings,
            family.rope_theta,
            may_be_partial=family.partial_rotary,
            by_layer_type=family.local_rope_theta is not None,
            may_scale_queries=family.scales_queries,
        ),
        local_rope=read_local_rope(file, max_position_embeddings, family.local_rope_theta),
        activation=family.activation(file),
        attention_scale=head_dim**-0.5,
        moe=family.moe(file, num_layers),
        dtype=file.choice(file.either("dtype", "torch_dtype"), DTYPES, "float32"),
    )
    config = family.complete(file, config)
    if config.num_heads % config.num_kv_heads:
        raise file.error(
            "num_key_value_heads", f"{config.num_kv_heads} doesn't divide the {config.num_heads} attention heads"
        )
    if config.head_dim % 2:
        raise file.error("head_dim", f"must be even for rotary embeddings, got {config.head_dim}")
    return config


def _complete(_file: ConfigFile, config: ModelConfig) -> ModelConfig:
    return config


def _with_ministral3_rope(file: ConfigFile, config: ModelConfig) -> ModelConfig:
    if file.child("rope_parameters") or file.child("rope_scaling"):
        return config
    rope = RopeConfig(theta=1e6, type="yarn", factor=16.0, original_context_len=16384, query_growth=0.1)
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
class _Family:
    """Where one architecture's configs differ from another's: defaults, and which keys mean something.

    `num_kv_heads` None: as many as query heads. `head_dim` None: hidden size / heads. `local_rope_theta`: layers with a
    window have a rotary embedding of their own. `complete` adds what only this architecture has.
    """

    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    num_kv_heads: int | None = None
    head_dim: int | None = None
    attention_bias: Callable[[ConfigFile], bool] = _never
    attention_output_bias: Callable[[ConfigFile], bool] = _never
    mlp_bias: Callable[[ConfigFile], bool] = _never
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    activation: Callable[[ConfigFile], Activation] = _silu
    sliding_window: Callable[[ConfigFile, int], tuple[int | None, ...]] = _no_window
    partial_rotary: bool = False
    local_rope_theta: float | None = None
    scales_queries: bool = False
    moe: Callable[[ConfigFile, int], MoEConfig | None] = no_experts
    complete: Callable[[ConfigFile, ModelConfig], ModelConfig] = _complete


_FAMILIES = {
    "Gemma3ForCausalLM": _Family(
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
    "LlamaForCausalLM": _Family(
        max_position_embeddings=2048,
        attention_bias=_as_configured("attention_bias"),
        attention_output_bias=_as_configured("attention_bias"),
        mlp_bias=_as_configured("mlp_bias"),
    ),
    "MinistralForCausalLM": _Family(
        max_position_embeddings=131072,
        num_kv_heads=8,
        sliding_window=_window_by_layer_type,
    ),
    "Ministral3ForCausalLM": _Family(
        max_position_embeddings=262144,
        rms_norm_eps=1e-5,
        num_kv_heads=8,
        head_dim=128,
        sliding_window=_window_in_all_layers(None),
        scales_queries=True,
        complete=_with_ministral3_rope,
    ),
    "MistralForCausalLM": _Family(
        max_position_embeddings=131072,
        num_kv_heads=8,
        sliding_window=_window_in_all_layers(4096),
    ),
    "MixtralForCausalLM": _Family(
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        num_kv_heads=8,
        sliding_window=_window_in_all_layers(None),
        moe=read_mixtral,
    ),
    "Phi3ForCausalLM": _Family(
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        sliding_window=_window_in_all_layers(None),
        partial_rotary=True,
    ),
    "Qwen2ForCausalLM": _Family(
        max_position_embeddings=32768,
        num_kv_heads=32,
        attention_bias=_always,
        sliding_window=_window_by_layer,
    ),
    "Qwen3ForCausalLM": _Family(
        max_position_embeddings=32768,
        num_kv_heads=32,
        head_dim=128,
        attention_bias=_as_configured("attention_bias"),
        attention_output_bias=_as_configured("attention_bias"),
        qk_norm=True,
        sliding_window=_window_by_layer,
    ),
    "Qwen2MoeForCausalLM": _Family(
        max_position_embeddings=32768,
        num_kv_heads=16,
        attention_bias=_as_configured("qkv_bias", default=True),
        sliding_window=_no_window_or_refused,
        moe=qwen_moe(num_experts=60, top_k=4, intermediate_size=1408, shared_intermediate_size=5632),
    ),
    "Qwen3MoeForCausalLM": _Family(
        max_position_embeddings=32768,
        num_kv_heads=4,
        attention_bias=_as_configured("attention_bias"),
        attention_output_bias=_as_configured("attention_bias"),
        qk_norm=True,
        sliding_window=_no_window_or_refused,
        moe=qwen_moe(num_experts=128, top_k=8, intermediate_size=768, shared_intermediate_size=None),
    ),
}

SUPPORTED_ARCHITECTURES: tuple[str, ...] = tuple(_FAMILIES)


def _family(file: ConfigFile) -> tuple[str, _Family]:
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


def _num_kv_heads(file: ConfigFile, family: _Family, num_heads: int) -> int:
    if "num_key_value_heads" in file.data and file.data["num_key_value_heads"] is None:
        return num_heads
    return file.count("num_key_value_heads", family.num_kv_heads or num_heads)
