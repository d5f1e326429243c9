"""The pre-norm transformer: Llama, Mistral, Qwen, Phi, Gemma, gpt-oss and mixtures of experts, told apart by configs.

Module names follow Hugging Face checkpoints, with q/k/v and gate/up merged. Built by `registry.make_model`.
"""

from __future__ import annotations

import torch
from torch import nn

from minisgl_batch.attention.base import ForwardContext
from minisgl_batch.distributed.group import SINGLE, TPGroup
from minisgl_batch.layers.attention import SelfAttention
from minisgl_batch.layers.embedding import LMHead, VocabParallelEmbedding
from minisgl_batch.layers.norm import RMSNorm
from minisgl_batch.layers.rotary import RotaryEmbedding, Rotation
from minisgl_batch.models.base import CausalLM
from minisgl_batch.models.config import ModelConfig
from minisgl_batch.models.mlp import MLP, SparseMLP


class DecoderLayer(nn.Module):
    """Attention and MLP, each reading the normalised residual stream and adding to it."""

    def __init__(
        self, config: ModelConfig, layer: int, tp: TPGroup, dtype: torch.dtype, device: torch.device | None
    ) -> None:
        super().__init__()
        self.self_attn = _attention(config, layer, tp, dtype, device)
        self.mlp = _mlp(config, layer, tp, dtype, device)
        self.input_layernorm = _norm(config, tp, dtype, device, into_fp8=self.self_attn.reads_fp8)
        self.post_attention_layernorm = _norm(config, tp, dtype, device, into_fp8=self.mlp.reads_fp8)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation,
        ctx: ForwardContext,
        keep: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's share of the last block's output and the stream without it -> the same after this layer.

        (num_tokens, hidden_size) all; of the tokens in `keep` alone, if it is given.
        """
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, rotation, ctx, keep)
        residual = residual if keep is None else residual[keep]
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class PostNormLayer(nn.Module):
    """A decoder layer with four norms: what attention and MLP give is normalised too, before it is added.

    So it has to be summed over the ranks before that, and nothing is left to sum for the norm that follows.
    """

    def __init__(
        self, config: ModelConfig, layer: int, tp: TPGroup, dtype: torch.dtype, device: torch.device | None
    ) -> None:
        super().__init__()
        self._tp = tp
        self.self_attn = _attention(config, layer, tp, dtype, device)
        self.mlp = _mlp(config, layer, tp, dtype, device)
        self.input_layernorm = _norm(config, SINGLE, dtype, device, into_fp8=self.self_attn.reads_fp8)
        self.post_attention_layernorm = _norm(config, SINGLE, dtype, device)
        self.pre_feedforward_layernorm = _norm(config, SINGLE, dtype, device, into_fp8=self.mlp.reads_fp8)
        self.post_feedforward_layernorm = _norm(config, SINGLE, dtype, device)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation,
        ctx: ForwardContext,
        keep: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `DecoderLayer.forward`, but for `x`, which is the whole output, on each rank."""
        x, residual = self.input_layernorm(x, residual)
        x = self._tp.all_reduce(self.self_attn(x, rotation, ctx, keep))
        residual = residual if keep is None else residual[keep]
        x, residual = self.pre_feedforward_layernorm(self.post_attention_layernorm(x)[0], residual)
        return self.post_feedforward_layernorm(self._tp.all_reduce(self.mlp(x)))[0], residual


def _norm(
    config: ModelConfig, tp: TPGroup, dtype: torch.dtype, device: torch.device | None, *, into_fp8: bool = False
) -> RMSNorm:
    return RMSNorm(
        config.hidden_size,
        config.rms_norm_eps,
        dtype=dtype,
        device=device,
        tp=tp,
        offset=config.norm_offset,
        into_fp8=into_fp8,
    )


def _attention(
    config: ModelConfig, layer: int, tp: TPGroup, dtype: torch.dtype, device: torch.device | None
) -> SelfAttention:
    block = f"model.layers.{layer}.self_attn"
    return SelfAttention(
        layer=layer,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_output_bias,
        qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
        qk_norm_offset=config.norm_offset,
        scale=config.attention_scale,
        window=config.window(layer),
        has_sinks=config.has_sinks,
        rotary_dim=config.rope.rotary_dim(config.head_dim),
        qkv_fp8=config.fp8_of(block, "q_proj", "k_proj", "v_proj", merged="qkv_proj"),
        output_fp8=config.fp8_of(block, "o_proj"),
        tp=tp,
        dtype=dtype,
        device=device,
    )


def _mlp(
    config: ModelConfig, layer: int, tp: TPGroup, dtype: torch.dtype, device: torch.device | None
) -> MLP | SparseMLP:
    if config.is_sparse(layer):
        return SparseMLP(config, tp, dtype, device)
    return MLP(config, config.intermediate_size, tp, dtype, device, block=f"model.layers.{layer}.mlp")


class DenseModel(CausalLM):
    """One rank's share of a model, dense but for MLPs that are mixtures of experts.

    Args:
        config: any of the supported architectures.
        tp: the group that shares it.
        dtype: compute type of weights and activations.
        device: where the weights are; "meta" for sizes only; None is torch's default.

    Raises:
        InvalidParameterError: the group's size doesn't suit the model; lists the sizes that do.
    """

    def __init__(
        self, config: ModelConfig, tp: TPGroup, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        super().__init__()
        config.check_tp_size(tp.size)
        self.config = config
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, tp=tp, dtype=dtype, device=device, scale=config.embedding_scale
        )
        ropes = [config.rope] if config.local_rope is None else [config.rope, config.local_rope]
        self.rotary_embs = nn.ModuleList(
            RotaryEmbedding(rope, config.head_dim, config.context_len, dtype=dtype, device=device) for rope in ropes
        )
        has_local_rope = [window is not None and config.local_rope is not None for window in config.sliding_window]
        self._rotation_of_layer = [int(is_local) for is_local in has_local_rope]
        layer_class = PostNormLayer if config.has_post_norms else DecoderLayer
        self.layers = nn.ModuleList(layer_class(config, layer, tp, dtype, device) for layer in range(config.num_layers))
        self.norm = _norm(config, SINGLE if config.has_post_norms else tp, dtype, device)
        self.lm_head = LMHead(
            config.vocab_size,
            config.hidden_size,
            tp=tp,
            dtype=dtype,
            device=device,
            tied=self.embed_tokens if config.tie_word_embeddings else None,
        )

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        kinds = [rotary_emb(positions) for rotary_emb in self.rotary_embs]
        rotations = [kinds[kind] for kind in self._rotation_of_layer]
        residual = None
        # No slice: that of a ModuleList is a new module, which takes the host longer than a layer.
        *layers, last_layer = self.layers
        for layer, rotation in zip(layers, rotations[:-1], strict=True):
            x, residual = layer(x, residual, rotation, ctx)
        # Behind the last layer's attention nothing is needed of tokens that give no logits.
        x, residual = last_layer(x, residual, rotations[-1], ctx, keep=ctx.batch.sample_tokens)
        hidden: torch.Tensor = self.norm(x, residual)[0]
        return hidden

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(hidden, out)
        return logits

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return self.lm_head.gather(logits)

    @property
    def vocab_shard(self) -> int:
        return self.lm_head.shard_size

    @property
    def vocab_range(self) -> range:
        return self.lm_head.vocab_range
