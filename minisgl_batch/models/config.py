"""What a model's config.json says, as one frozen record for all architectures.

Reads the file itself, in the spellings of transformers 4.5x and 5.x, with the defaults that transformers has for keys
that are missing. Knows nothing of torch. Called by the engine and by whoever needs a model's context length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from minisgl_batch.errors import InvalidParameterError
from minisgl_batch.layers.fp8_config import Fp8Config
from minisgl_batch.layers.rope_config import RopeConfig
from minisgl_batch.layers.sharding import check_tp_size
from minisgl_batch.models.config_file import ConfigFile
from minisgl_batch.models.families import Family, read_family
from minisgl_batch.models.moe_config import MoEConfig
from minisgl_batch.models.quantization import (
    METHODS,
    QUANTIZED_AT_LOAD,
    Quantization,
    read_quantization,
    refuse_experts,
)
from minisgl_batch.models.refusals import refuse_quantized, refuse_unsupported
from minisgl_batch.models.rope import read_local_rope, read_rope
from minisgl_batch.text_part import text_part

Activation = Literal["silu", "gelu"]
MAX_LAYERS = 4096
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
        has_sinks: attention heads have sinks, see `AttnSpec`.
        embedding_scale: factor on embedded tokens.
        norm_offset: what is added to norms' weights.
        has_post_norms: what attention and MLP give is normalised too, before it is added.
        moe: None: all MLPs are dense.
        dtype: what the checkpoint was saved in: "float32", "bfloat16" or "float16"; but for weights in FP8.
        quantization: of the linear layers; None: they are of the model's own type.
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
    has_sinks: bool = False
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    has_post_norms: bool = False
    moe: MoEConfig | None = None
    dtype: str
    quantization: Quantization | None = None
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

    def fp8_of(self, block: str, *layers: str, merged: str | None = None) -> Fp8Config | None:
        """How some layers are in FP8, if they are; see `Quantization.of`."""
        return None if self.quantization is None else self.quantization.of(block, *layers, merged=merged)

    def quantized(self, *, at_load: bool) -> ModelConfig:
        """With linear layers in FP8, which they are already or are put into as they're loaded.

        Args:
            at_load: do so even if the config says that the checkpoint has it done.

        Raises:
            InvalidParameterError: the model can't be.
        """
        if self.moe is not None:
            raise InvalidParameterError("quantization", "mixtures of experts aren't supported in FP8: leave it out")
        if self.quantization is None:
            return replace(self, quantization=QUANTIZED_AT_LOAD)
        return replace(self, quantization=self.quantization.at_load()) if at_load else self

    def window(self, layer: int) -> int | None:
        """How many tokens back a token sees in a layer; None where that are all of the longest sequence."""
        window = self.sliding_window[layer]
        return None if window is None or window >= self.context_len else window

    @property
    def longest_window(self) -> int | None:
        """Of the layers that have one; None if no layer has."""
        windows = [self.window(layer) for layer in range(self.num_layers)]
        return max((window for window in windows if window is not None), default=None)

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
        if self.quantization is not None:
            self.quantization.check_tp_size(tp_size, self.num_heads * self.head_dim, *self.mlp_widths)


def load_model_config(path: Path) -> ModelConfig:
    """Read `path`/config.json.

    Raises:
        ModelError: the file is missing, broken or lacks a key, or asks for something that isn't supported: names the
            file, the key and what is supported.
    """
    file = ConfigFile.read(path / "config.json")
    if (text := text_part(file.data)) is not file.data:
        file = replace(file, data=text, prefix="text_config.")
    refuse_unsupported(file)
    architecture, family = read_family(file)
    refuse_quantized(file, (*METHODS, *family.quant_methods))
    quantization = read_quantization(file)
    num_layers = file.count("num_hidden_layers", high=MAX_LAYERS)
    num_heads = file.count("num_attention_heads")
    hidden_size = file.count("hidden_size")
    head_dim = file.count("head_dim", family.head_dim or hidden_size // num_heads)
    max_position_embeddings = file.count("max_position_embeddings", family.max_position_embeddings)
    moe = family.moe(file, num_layers)
    if moe is not None and quantization is not None:
        refuse_experts(file)
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
        has_sinks=family.has_sinks,
        moe=moe,
        dtype=file.choice(file.either("dtype", "torch_dtype"), DTYPES, "float32"),
        quantization=quantization,
    )
    config = family.complete(file, config)
    if config.num_heads % config.num_kv_heads:
        raise file.error(
            "num_key_value_heads", f"{config.num_kv_heads} doesn't divide the {config.num_heads} attention heads"
        )
    if config.head_dim % 2:
        raise file.error("head_dim", f"must be even for rotary embeddings, got {config.head_dim}")
    return config


def _num_kv_heads(file: ConfigFile, family: Family, num_heads: int) -> int:
    if "num_key_value_heads" in file.data and file.data["num_key_value_heads"] is None:
        return num_heads
    return file.count("num_key_value_heads", family.num_kv_heads or num_heads)
