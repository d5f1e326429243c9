"""The MLPs of decoder layers: dense ones, and mixtures of experts. Used by the models."""

from __future__ import annotations

import torch
from torch import nn

from minisgl_batch.distributed.group import TPGroup
from minisgl_batch.layers.linear import LinearColParallelMerged, LinearReplicated, LinearRowParallel
from minisgl_batch.layers.moe import FusedMoE
from minisgl_batch.models.config import ModelConfig
from minisgl_kernels.activate_fp8 import activate_fp8
from minisgl_kernels.fixed_order import by_row
from minisgl_kernels.fused_moe import ClampedSwiglu
from minisgl_kernels.matmul import Operand
from minisgl_kernels.silu_and_mul import gelu_and_mul, silu_and_mul


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x)), `width` wide in between.

    Args:
        block: its name in the checkpoint, by which the config says which of its layers are in FP8.

    Attributes:
        reads_fp8: see `Weight`.
    """

    def __init__(
        self,
        config: ModelConfig,
        width: int,
        tp: TPGroup,
        dtype: torch.dtype,
        device: torch.device | None,
        block: str = "",
    ) -> None:
        super().__init__()
        self._is_gelu = config.activation == "gelu"
        self.gate_up_proj = LinearColParallelMerged(
            config.hidden_size,
            {"gate_proj": width, "up_proj": width},
            bias=config.mlp_bias,
            tp=tp,
            dtype=dtype,
            device=device,
            fp8=config.fp8_of(block, "gate_proj", "up_proj", merged="gate_up_proj"),
        )
        self.down_proj = LinearRowParallel(
            width,
            config.hidden_size,
            bias=config.mlp_bias,
            tp=tp,
            dtype=dtype,
            device=device,
            fp8=config.fp8_of(block, "down_proj"),
        )
        self.reads_fp8 = self.gate_up_proj.weight.reads_fp8

    def forward(self, x: Operand) -> torch.Tensor:
        """(num_tokens, hidden_size) -> this rank's share of the same shape."""
        gate_up = self.gate_up_proj(x)
        activated: Operand
        if self.down_proj.weight.reads_fp8:
            activated = activate_fp8(gate_up, gelu=self._is_gelu)
        else:
            activated = by_row(gelu_and_mul if self._is_gelu else silu_and_mul, gate_up)
        out: torch.Tensor = self.down_proj(activated)
        return out


class SparseMLP(FusedMoE):
    """A mixture of experts, and the shared expert that all tokens go through, if the model has one."""

    reads_fp8 = False

    def __init__(self, config: ModelConfig, tp: TPGroup, dtype: torch.dtype, device: torch.device | None) -> None:
        moe = config.moe
        assert moe is not None
        super().__init__(
            hidden_size=config.hidden_size,
            num_experts=moe.num_experts,
            top_k=moe.top_k,
            intermediate_size=moe.intermediate_size,
            renormalize=moe.renormalize,
            block=moe.block,
            router=moe.router,
            projections=moe.projections,
            has_biases=moe.has_biases,
            activation=None if moe.clamped_swiglu is None else ClampedSwiglu(*moe.clamped_swiglu),
            tp=tp,
            dtype=dtype,
            device=device,
        )
        self.shared_expert = self.shared_expert_gate = None
        if moe.shared_intermediate_size is not None:
            self.shared_expert = MLP(config, moe.shared_intermediate_size, tp, dtype, device)
            self.shared_expert_gate = LinearReplicated(config.hidden_size, 1, bias=False, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(num_tokens, hidden_size) -> this rank's share of the same shape."""
        if self.shared_expert is None or self.shared_expert_gate is None:
            return super().forward(x)
        shared = by_row(torch.sigmoid, self.shared_expert_gate(x)) * self.shared_expert(x)
        return super().forward(x).add_(shared)
